"""Programs for torch.distributed.pipelining, which is the oracle: torch_cases.py, in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from multiproc.harness import WorldResult

CASES = Path(__file__).with_name("torch_cases.py")
RANKS = 4

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.__version__.startswith(("2.11", "2.12")),
        reason=f"pipelines of torch {torch.__version__} itself, the oracle, hang in some of these programs",
    ),
]


def test_torch_program(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    pipeline_world.check_ends()
