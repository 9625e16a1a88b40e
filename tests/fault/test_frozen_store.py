"""A rendezvous store that does not answer holds up neither an error nor the end of a process group; see
cases_frozen_store.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from multiproc.fork_server import Forked, environment
from multiproc.harness import run_world
from patience import patient

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_frozen_store.py")
LIMIT = 2.0  # of the call that cannot end, seconds
SPARE = patient(2.0)  # more seconds than promised, where cores are shared

_STORE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def run(fault: str, loss: str, thaw: bool, shm: str) -> list[dict]:
    """What each rank that lives tells. The store is in a process of its own."""
    host = Forked(
        [sys.executable, "-c", _STORE],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert host.stdout is not None
        port = host.stdout.readline().strip()
        env = {"FAULT": fault, "LOSS": loss, "THAW": str(int(thaw)), "LIMIT": str(LIMIT)}
        env |= {"STORE_PID": str(host.pid), "STORE_PORT": port, "MESHCAST_SHM": shm}
        world = run_world(MODULE, 3, limit=150.0, env=env)
    finally:
        os.kill(host.pid, signal.SIGCONT)
        host.kill()
        host.wait()
    living = [0, 1] if loss == "killed" else [0, 1, 2]
    world.check("frozen_store", living)
    world.check_ends({2: -signal.SIGKILL} if loss == "killed" else None)
    values = [world.value("frozen_store", rank) for rank in living]
    for value in values:
        assert value["destroyed"] < 5.0, value
    return values


@pytest.mark.parametrize("fault", ["frozen", pytest.param("none", marks=pytest.mark.slow)])
def test_a_rank_stays_away(fault: str) -> None:
    for value in run(fault, "away", thaw=True, shm="0")[:2]:
        assert value["error"] == "DeadlineExceededError", value
        assert 0.95 * LIMIT < value["elapsed"] < 1.5 * LIMIT + SPARE, value
        if fault == "none":
            assert value["peer"] == 2, value


def test_a_rank_dies() -> None:
    for value in run("frozen", "killed", thaw=True, shm="1"):
        assert value["error"] == "PeerLostError", value
        assert value["peer"] == 2 or "rank 2" in value["text"], value
        assert value["elapsed"] < 1.0 + 2.0 + SPARE, value


@pytest.mark.slow
def test_calls_go_on() -> None:
    for value in run("frozen", "none", thaw=False, shm="0"):
        assert value["error"] == "NoneType", value
