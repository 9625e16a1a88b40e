"""meshcast.integrations.torchft; see cases_torchft.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from multiproc.harness import WorldResult

pytestmark = pytest.mark.timeout(270)

CASES = Path(__file__).with_name("cases_torchft.py")
RANKS, VICTIM = 4, 3
# torchft's own test of transports: three replicas as threads, some of which recover, and what never comes.
PACKAGES_OWN = """
import unittest, torch
from meshcast.integrations.torchft import MeshcastTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test
made = lambda rank, world: MeshcastTransport(hostname="127.0.0.1")
run_multi_recovery_test(unittest.TestCase(), made, device=torch.device("cpu"))
print("passed")
"""


def test_torchft(world: WorldResult, case: str, ranks: list[int]) -> None:
    world.check(case, ranks)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({VICTIM: -signal.SIGKILL})


def test_as_torchft_tests_transports() -> None:
    root = str(CASES.parents[3] / "python")
    environment = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", PACKAGES_OWN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.endswith("passed\n"), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
