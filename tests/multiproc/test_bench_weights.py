"""The benchmark of weights with processes, on loopback: every way moves every element of every version."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import Loopback  # noqa: E402
from benchmarks.weights import delta  # noqa: E402
from benchmarks.weights.sync import NAMES, measure, text  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (97, 24),  # no number of ranks divides it
    f"{LAYER}self_attn.o_proj.weight": (24, 27),
    f"{LAYER}input_layernorm.weight": (24,),
    f"{LAYER}mlp.gate.weight": (8, 24),
    f"{LAYER}mlp.experts.down_proj": (8, 24, 15),
}


def test_every_way_moves_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'python'}{os.pathsep}{ROOT}")
    with Loopback(4, 1000.0) as network:
        found = measure(network, {"mixtral": SHAPES}, list(NAMES), 2)
    (model,) = found["models"]
    assert model["tensors"] == len(SHAPES)
    assert list(model["ways"]) == list(NAMES)
    for name, way in model["ways"].items():
        assert way["wrong_bytes"] == 0, name
        assert len(way["seconds"]) >= 1
        assert way["first"] > 0
    head = {
        "command": "",
        "commit": "",
        "cores": 2,
        "kernel": "",
        "torch": "",
        "link_mbit": 1.0,
        "repeats": 2,
    }
    assert "### Mixtral" in text({"header": head, **found})


def test_changes_make_every_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'python'}{os.pathsep}{ROOT}")
    with Loopback(4, 1000.0) as network:
        found = delta.measure(network, delta.shapes(96, 1), 1, 1, 3, tmp_path)
    assert len(found["runs"]) == 4
    for run in found["runs"]:
        assert run["wrong"] == 0
        assert len(run["parts"]) == len(run["ratio"]) == 2
        assert all(0 < ratio < 1 for ratio in run["ratio"]), run
