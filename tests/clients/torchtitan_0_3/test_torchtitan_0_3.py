"""torchtitan 0.3 trains the same with the pipelines of torch and of meshcast: losses and gradient norms of
three steps, in all digits that it prints, pipeline degree 2 by FSDP2 of degree 2 on four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import titan

pytestmark = pytest.mark.timeout(1500)

PROGRAM = Path(__file__).with_name("program_0_3.py")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
# Torch's own leaves the last norm without a gradient there, so that only the first loss compares.
LOSES = "ZBVZeroBubble"
OURS = ("Eager1F1B", "ZBH1")  # which torch has not: the sums are those of 1F1B


def trained(folder: Path, package: str, schedules: tuple[str, ...]) -> dict[str, titan.Steps]:
    """A process for each rank and schedule: meshes are kept, and FSDP2 takes none of another Trainer."""
    found: dict[str, titan.Steps] = {}
    for schedule in schedules:
        found |= titan.trained(PROGRAM, folder, package, [schedule])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return titan.prepared(tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="module")
def torchs(folder: Path) -> dict[str, titan.Steps]:
    return trained(folder, "torch", SCHEDULES)


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, titan.Steps]:
    return trained(folder, "meshcast", SCHEDULES + OURS)


@pytest.mark.parametrize("schedule", SCHEDULES + OURS)
def test_same_digits(torchs: dict[str, titan.Steps], ours: dict[str, titan.Steps], schedule: str) -> None:
    expected = torchs[schedule if schedule in SCHEDULES else "1F1B"]
    assert sorted(expected) == [0, 1, 2, 3]
    if schedule == LOSES:
        assert (titan.WITHOUT, "norm.weight") in [steps[-1] for steps in expected.values()]
    for rank, steps in expected.items():
        if schedule == LOSES:
            assert ours[schedule][rank][0][:2] == steps[0][:2], f"rank {rank}"
            assert [step for step, *_ in ours[schedule][rank]] == ["1", "2", "3"]
            continue
        assert [step for step, _, _ in steps] == ["1", "2", "3"]
        assert ours[schedule][rank] == steps, f"rank {rank}"
    assert any(float(steps[0][1]) > 5 for steps in expected.values())
