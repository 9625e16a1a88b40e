"""The death, or the freezing, of the rendezvous store ends no call that does not need it, and holds up none
beyond its limit; see cases_lost_store.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fault.test_frozen_store import _STORE
from multiproc.fork_server import Forked, environment
from multiproc.harness import run_world
from patience import patient

pytestmark = pytest.mark.timeout(200)

LIMIT = {"killed": 4.0, "none": 4.0, "frozen": 2.0}  # of each call by what befalls the store, seconds
SPARE = patient(2.0)  # more seconds than promised, where cores are shared
SOON = 1.0 + SPARE


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    fault: str,
    host: str,
    shm: str,
    transport: str = "ucx",
    first: str = "known",
    what: str = "calls",
) -> list[dict]:
    """What each rank that lives tells. host: of the store, a process "apart" or "rank" 0."""
    apart, limit = None, LIMIT[fault] * (1 if what == "calls" else 2)
    if host == "apart":
        apart = Forked(
            [sys.executable, "-c", _STORE],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        port = _free_port()
        if apart is not None:
            assert apart.stdout is not None
            port = int(apart.stdout.readline())
        env = {"FAULT": fault, "HOST": host, "FIRST": first, "LIMIT": str(limit), "STORE_PORT": str(port)}
        env["WHAT"] = what
        env |= {"STORE_PID": str(apart.pid if apart is not None else 0)}
        env |= {"MESHCAST_SHM": shm, "MESHCAST_TRANSPORT": transport}
        world = run_world(Path(__file__).with_name("cases_lost_store.py"), 3, limit=150.0, env=env)
    finally:
        if apart is not None:
            if apart.poll() is None:
                os.kill(apart.pid, signal.SIGCONT)
            apart.kill()
            apart.wait()
    dead = host == "rank" and fault != "none"
    living = [1, 2] if dead else [0, 1, 2]
    case = {"calls": "lost_store", "pipeline": "lost_pipeline"}[what]
    world.check(case, living)
    world.check_ends({0: -signal.SIGKILL} if dead else None)
    found = [world.value(case, rank) for rank in living]
    for each in found:
        assert each["destroyed"] < 1.0 + SPARE, each
        calls = {name: call for name, call in each.items() if name != "destroyed"}
        for name, call in calls.items():
            assert call["typed"], (name, call)
            assert call["elapsed"] < 1.5 * limit + SPARE, (name, call)
    return found


@pytest.mark.slow
def test_control() -> None:
    for each in run("none", "apart", "0"):
        assert all(call["error"] is None for name, call in each.items() if name != "destroyed"), each


@pytest.mark.parametrize(
    ("shm", "transport"), [("0", "ucx"), pytest.param("1", "gloo", marks=pytest.mark.slow)]
)
def test_a_store_apart_dies(shm: str, transport: str) -> None:
    """What is known goes on, on all ranks and after refusals too; what is new says what it lacks, at once."""
    for found in run("killed", "apart", shm, transport):
        for name, call in found.items():
            if name == "destroyed":
                continue
            if name.startswith(("known", "after")):
                assert call["error"] is None, (name, call)
            elif call["error"] is not None or name in ("new plan", "new group", "first call"):
                assert call["error"] == "MeshcastError", (name, call)
                assert "the rendezvous store does not answer" in call["text"], (name, call)
                assert call["elapsed"] < SOON, (name, call)


@pytest.mark.parametrize("first", ["known", "new"])
def test_the_rank_that_has_the_store_dies(first: str) -> None:
    for found in run("killed", "rank", "0", first=first):
        lost = found["known" if first == "known" else "new plan"]
        assert lost["error"] == "PeerLostError", lost
        assert lost["peer"] == 0, lost
        assert lost["elapsed"] < SOON, lost
        for name in ("after that", "again"):  # a group that has failed
            assert found[name]["error"] == "AbortedError", found[name]
            assert found[name]["elapsed"] < SOON, found[name]
        for name in ("known, without rank 0", "known after that"):
            assert found[name]["error"] is None, found[name]


def test_a_store_apart_freezes() -> None:
    for found in run("frozen", "apart", "0"):
        assert found["known"]["error"] is None, found
        for name in ("new plan", "first call"):
            assert found[name]["error"] == "DeadlineExceededError", (name, found[name])
            assert "the rendezvous store does not answer" in found[name]["text"], (name, found[name])
            assert found[name]["elapsed"] > 0.9 * LIMIT["frozen"], (name, found[name])
        for name in ("after that", "again"):  # the group has failed
            assert found[name]["error"] == "AbortedError", (name, found[name])
            assert found[name]["elapsed"] < SOON, (name, found[name])


@pytest.mark.parametrize(
    ("fault", "host"),
    [("killed", "rank"), ("killed", "apart"), pytest.param("frozen", "apart", marks=pytest.mark.slow)],
)
def test_a_pipeline(fault: str, host: str) -> None:
    for found in run(fault, host, "0", what="pipeline"):
        step, again = found["step"], found["again"]
        if host == "rank":
            assert step["error"] in ("PeerLostError", "AbortedError"), step
            assert "rank 0" in step["text"], step
            assert step["elapsed"] < 2.0 + SPARE, step
        else:
            assert "the rendezvous store does not answer" in step["text"], step
            assert step["error"] == ("MeshcastError" if fault == "killed" else "DeadlineExceededError"), step
        assert again["error"] == "AbortedError", again
        assert again["elapsed"] < SOON, again
