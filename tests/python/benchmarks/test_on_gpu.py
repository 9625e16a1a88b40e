"""Benchmarks on GPUs: what they say where there is none, and what they write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from multiproc.fork_server import environment, run

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import cuda  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: they would measure it")
@pytest.mark.parametrize("name", ["cuda_beside", "cuda_ipc", "cuda_kernels", "cuda_topology"])
def test_nothing_is_measured_without_a_gpu(name: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", name, "--out", str(out)]
    done = run(command, cwd=ROOT, env=environment({"PYTHONPATH": str(ROOT)}))
    assert done.returncode == 1
    assert done.stderr.strip() == f"benchmarks {name}: torch sees no CUDA device: nothing was measured"
    assert not out.exists()


def test_figures_come_with_what_they_were_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    rows = [{"bytes": 64, "gb_per_s": 1.5}]
    cuda.write_figures(None, rows)
    cuda.write_figures(out, rows, ranks=4)
    found = json.loads(out.read_text())
    assert (found["ranks"], found["rows"], found["torch"]) == (4, rows, torch.__version__)
    assert found["device"], "a machine without nvidia-smi says why"
    assert "cuda" in found
