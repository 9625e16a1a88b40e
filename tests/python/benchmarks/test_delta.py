"""The benchmark of changes without processes: its tables, its training, and its kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from benchmark_pages import check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.weights import delta  # noqa: E402

MIB = 1 << 20


def results() -> dict[str, Any]:
    run = {
        "rate": 1e-6, "kept": "float32", "parts": [0.01, 0.02, 0.03], "wrong": 0, "ratio": [0.05] * 3,
        "whole": {"seconds": [0.8, 0.9, 1.0], "bytes": [20.0 * MIB] * 3},
        "changes": {"seconds": [0.09, 0.1, 0.2], "bytes": [1.0 * MIB] * 3},
    }  # fmt: skip
    return {
        "header": {"command": "python -m benchmarks delta", "commit": "c0ffee", "cores": 2, "kernel": "6.1",
                   "torch": "2.13.0", "link_mbit": 250.0, "versions": 4},
        "calibration": {"hosts": 4, "efficiency": 0.96, "slowest_link_mbit": 240.0,
                        "slowest_all_at_once": 1.0, "local_copy_gbytes": 17.0},
        "bound": 0.7, "nbytes": 20 * MIB, "runs": [run],
        "kernels": [{"part": 0.0, "copy": 10.0, "find": 1.0, "make": None, "ratio": 0.0}],
    }  # fmt: skip


def test_tables_say_what_was_found() -> None:
    text = delta.text(results())
    check_tables(text)
    assert "| 1e-06 | float32 | 2.00% | 20.00 | 1.00 | 0.050 | 0.900 | 0.100 | 0.11 | 0 |" in text
    assert "| 0.0% | 10.0 | 1.00 | - | 0.0000 |" in text


def test_a_training_writes_versions_and_counts_what_they_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = delta.first_weights(delta.shapes(24, 1), 2)
    assert all(bool(x.isfinite().all()) for x in weights.values())
    parts = delta.train(weights, 1e-2, "float32", 1, 3, tmp_path)
    first, second = (torch.load(tmp_path / f"{at}.pt") for at in (0, 1))
    count = sum(int((first[name] != second[name]).sum()) for name in first)
    assert parts[0] == count / sum(x.numel() for x in first.values()) > 0.5
    assert delta.train(weights, 1e-12, "bfloat16", 0, 2, tmp_path) == [0.0]


def test_kernels_make_what_they_found() -> None:
    threads = torch.get_num_threads()
    try:
        found = delta.kernels(1)
    finally:
        torch.set_num_threads(threads)
    assert [each["part"] for each in found] == list(delta._PARTS)
    ratios = [each["ratio"] for each in found]
    assert ratios == sorted(ratios)
    assert ratios[0] == 0
