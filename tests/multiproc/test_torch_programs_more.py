"""Programs for torch.distributed.pipelining, which is the oracle: torch_more_cases.py, in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult
from multiproc.torch_oracle import NEEDS_ORACLE

CASES = Path(__file__).with_name("torch_more_cases.py")
RANKS = 4

pytestmark = [pytest.mark.timeout(450), NEEDS_ORACLE]


def test_torch_program(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    pipeline_world.check_ends()
