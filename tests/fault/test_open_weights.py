"""Processes end cleanly with a WeightSync that nobody has closed; see cases_open_weights.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(120)

MODULE = Path(__file__).with_name("cases_open_weights.py")


@pytest.mark.parametrize("way", ["returned", "destroyed", "dropped", "left"])
def test_open_weights(way: str) -> None:
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    world = run_world(MODULE, 4, limit=90.0, env={"WAY": way, "STORE_PORT": str(port)})
    world.check("open_weights")
    world.check_ends()
    for crash in ("terminate called", "Segmentation fault", "Fatal Python error", "not rethrown"):
        assert crash not in world.transcript(), world.transcript()
