"""Point-to-point messages of backend "meshcast"; see cases_backend_p2p.py."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_backend_p2p.py")
# P2P_SEED in the environment draws the same programs again.
SEED = os.environ.get("P2P_SEED") or str(random.SystemRandom().randrange(1 << 30))
CASES = re.findall(r"\w+", MODULE.read_text().split("\nCASES = [")[1].split("]")[0])


@pytest.fixture(scope="module", params=["1", "0"], ids=["shared memory", "UCX"])
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(MODULE, 3, backend="meshcast", env={"P2P_SEED": SEED, "MESHCAST_SHM": request.param})


@pytest.mark.parametrize("case", CASES)
def test_messages(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


@pytest.mark.slow
def test_messages_of_five_ranks_under_torchs_checks() -> None:
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "P2P_PROGRAMS": "20", "P2P_SEED": SEED}
    world = run_world(MODULE, 5, backend="meshcast", env=env)
    for case in CASES:
        world.check(case)
    world.check_ends()
