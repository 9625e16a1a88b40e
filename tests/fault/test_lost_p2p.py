"""Messages with a rank that dies or freezes end, those of others do not; see cases_lost_p2p.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_p2p.py")
SURVIVORS = [0, 1]


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "UCX"])
@pytest.mark.parametrize("fault", ["none", "kill", "orphan", "freeze"])
def test_lost(fault: str, shared: str) -> None:
    env = {"FAULT": fault, "MESHCAST_SHM": shared}
    world = run_world(MODULE, 3, limit=150.0, backend="meshcast", env=env)
    world.check("messages_with_a_lost_rank", None if fault == "none" else SURVIVORS)
    found = [world.value("messages_with_a_lost_rank", rank) for rank in SURVIVORS]
    assert max(each["elapsed"] for each in found) < 30, found  # the limit of the kill's group is 60 s
    assert max(each["destroyed"] for each in found) < 20, found
    world.check_ends(None if fault == "none" else {2: -signal.SIGKILL})
