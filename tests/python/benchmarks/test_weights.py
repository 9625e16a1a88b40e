"""The benchmark of weights without processes: its tables and chart, and which shapes it gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_pages import check_chart, check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.weights import sync  # noqa: E402
from benchmarks.weights.ways import MODELS, shapes  # noqa: E402

MIB = 1 << 20


def way(*seconds: float, first: float, servers: float = 0.0, **more: Any) -> dict[str, Any]:
    memory = {"trainers": 3 * MIB, "servers": servers, "servers, without the spare copy": servers - 4 * MIB}
    return {"seconds": list(seconds), "first": first, "first_cpu": 0.1234, "cpu": [0.5] * len(seconds),
            "memory": memory, "busy": [0.25] * len(seconds), "wrong_bytes": 0} | more  # fmt: skip


def results() -> dict[str, Any]:
    ways = {
        "two buffers": way(4.2, 4.4, 4.1, first=5.0, servers=20 * MIB, idle=0.002),
        "broadcast": way(40.0, first=41.0),
        "files": way(0.7, 0.5, first=1.0),
    }
    return {
        "header": {"command": "python -m benchmarks.weights", "commit": "c0ffee", "cores": 2,
                   "kernel": "6.1", "torch": "2.13.0", "link_mbit": 250.0, "repeats": 3},
        "calibration": {"hosts": 4, "efficiency": 0.96, "slowest_link_mbit": 240.0,
                        "slowest_all_at_once": 1.0, "local_copy_gbytes": 17.0},
        "models": [{"name": "llama", "tensors": 291, "nbytes": 253 * MIB, "part": 64 * MIB, "bound": 4.0,
                    "idle": 0.001, "ways": ways}],
    }  # fmt: skip


def test_tables_say_what_was_found() -> None:
    lines = sync.text(results()).splitlines()
    assert lines[0].startswith("`python -m benchmarks weights`: commit c0ffee, 2 cores")
    assert "### Llama" in lines
    two, others, files = (next(line for line in lines if sync.NAMES[each] in line) for each in
                          ("two buffers", "broadcast", "files"))  # fmt: skip
    assert two.endswith("| 4.20 | 1.050 | 1.00 | 5.00 | 0.50 | 25% | 3 | 20 | 0 |")
    assert "| 40.00 | 10.000 | 9.52 |" in others
    assert "| 0.60 | - | 0.14 |" in files, "no bound of the links"
    targets = lines[lines.index("|  | measured | at most |") :]
    assert any(line.endswith("time over the bound | 1.050 | 1.10 |") for line in targets)
    assert any(line.endswith("first call beyond the bound, s | 1.00 | 0.60 |") for line in targets)
    assert any(line.endswith("one rank in its first call, s | 0.123 |  |") for line in targets)
    assert any(line.endswith("spare copy, MiB | 16 | 64 |") for line in targets)
    assert any(line.endswith("while nothing is pushed | 0.20% (0.10% without it) |  |") for line in targets)


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    check_tables(sync.text(results()))


def test_the_chart_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    check_chart(sync.draw, results, tmp_path)


def test_shapes_are_those_of_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = {name: shapes(model) for name, model in MODELS.items()}
    assert len(found["llama"]) == 291, "as many tensors as Llama 3 8B has"
    assert found["llama"]["model.layers.31.mlp.down_proj.weight"] == (512, 1792)
    assert found["mixtral"]["model.layers.3.mlp.experts.down_proj"] == (8, 512, 896)
