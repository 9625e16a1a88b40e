"""Every survivor of a dead or frozen peer raises a typed error in bounded time; see cases_lost_peer.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_peer.py")
DEATH = (
    2.0 + 3.0
)  # seconds in which a death must be seen; 2 on a machine of its own, more where cores are shared
SHORT = 4.0  # limit of a call that is to run into it; the others have much longer than they may take


def _run(victim: int, fault: str, moment: str, limit: float = 30.0, shm: str = "1"):
    env = {"VICTIM": str(victim), "FAULT": fault, "MOMENT": moment, "LIMIT": str(limit), "MESHCAST_SHM": shm}
    return run_world(MODULE, 3, limit=150.0, env=env)


def test_control() -> None:
    """Without a fault the same calls succeed: the errors of the other tests come from their faults."""
    world = _run(-1, "killed", "middle")
    world.check("lost_peer")
    world.check_ends()


# Rank 0 is the root, 1 relays, 2 is the leaf of the chain (or 2 relays to 1).
# Over shared memory both read what rank 0 wrote.
@pytest.mark.parametrize(
    ("victim", "moment", "shm"),
    [
        (0, "middle", "1"),
        pytest.param(1, "middle", "1", marks=pytest.mark.slow),
        (1, "before", "1"),
        pytest.param(0, "middle", "0", marks=pytest.mark.slow),
        (1, "middle", "0"),
        pytest.param(2, "middle", "0", marks=pytest.mark.slow),
    ],
)
def test_killed(victim: int, moment: str, shm: str) -> None:
    _check_loss(_run(victim, "killed", moment, shm=shm), victim)


def _check_loss(world: WorldResult, victim: int) -> None:
    survivors = [rank for rank in range(3) if rank != victim]
    world.check("lost_peer", survivors)
    world.check_ends({victim: -signal.SIGKILL})
    for rank in survivors:
        value = world.value("lost_peer", rank)
        assert value["error"] == "PeerLostError", value
        assert value["peer"] == victim, value
        assert value["elapsed"] < DEATH, value
        assert value["destroyed"] < 5.0, value


@pytest.mark.parametrize(
    ("victim", "moment", "shm"),
    [
        pytest.param(0, "middle", "1", marks=pytest.mark.slow),
        pytest.param(1, "middle", "1", marks=pytest.mark.slow),
        (1, "before", "0"),
        pytest.param(0, "first use", "0", marks=pytest.mark.slow),
    ],
)
def test_frozen(victim: int, moment: str, shm: str) -> None:
    _check_deadline(_run(victim, "frozen", moment, SHORT, shm), victim)


def test_killed_before_the_first_use_of_a_plan() -> None:
    """The ranks agree on a new plan through the store, which does not tell who died: they look after each
    other."""
    _check_loss(_run(1, "killed", "unagreed"), 1)


def _check_deadline(world: WorldResult, victim: int) -> None:
    survivors = [rank for rank in range(3) if rank != victim]
    world.check("lost_peer", survivors)
    world.check_ends({victim: -signal.SIGKILL})
    for rank in survivors:
        value = world.value("lost_peer", rank)
        assert value["error"] == "DeadlineExceededError", value
        assert value["peer"] == victim, value
        assert 0.95 * SHORT <= value["elapsed"] <= 1.5 * SHORT + 1.0, value
        assert value["destroyed"] < 5.0, value
