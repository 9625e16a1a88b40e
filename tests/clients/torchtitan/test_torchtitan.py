"""torchtitan trains the same with the pipelines of torch and of meshcast: losses and gradient norms of three
steps, in all digits that it prints, pipeline degree 2 by FSDP2 of degree 2 on four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import titan

pytestmark = pytest.mark.timeout(1500)

PROGRAM = Path(__file__).with_name("program.py")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
OURS = ("Eager1F1B", "ZBH1")  # which torch has not: the sums are those of 1F1B


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return titan.prepared(tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="module")
def torchs(folder: Path) -> dict[str, titan.Steps]:
    return titan.trained(PROGRAM, folder, "torch", SCHEDULES)


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, titan.Steps]:
    return titan.trained(PROGRAM, folder, "meshcast", SCHEDULES + OURS)


@pytest.mark.parametrize("schedule", SCHEDULES + OURS)
def test_same_digits(torchs: dict[str, titan.Steps], ours: dict[str, titan.Steps], schedule: str) -> None:
    expected = torchs[schedule if schedule in SCHEDULES else "1F1B"]
    assert sorted(expected) == [0, 1, 2, 3]
    for rank, steps in expected.items():
        assert [step for step, _, _ in steps] == ["1", "2", "3"]
        assert ours[schedule][rank] == steps, f"rank {rank}"
    assert any(float(steps[0][1]) > 5 for steps in expected.values())
