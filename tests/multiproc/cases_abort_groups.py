"""A rank dies; the others wait for each other in a group of gloo until a thread of their own ends that."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from meshcast.elastic.remesh import abort_groups

GROUP_TIMEOUT = 3600.0  # seconds: nothing ends by it here
LEAVE_UP = True  # the group is of no use afterwards

VICTIM = int(os.environ["VICTIM"])


def what_waits_for_one_that_lives_ends(context) -> None:
    rank, alive = context.rank, [each for each in range(context.world) if each != VICTIM]
    dist.barrier()  # all are connected
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(1), VICTIM)
    time.sleep(0.5)  # what the death ends of itself has ended
    threading.Timer(0.5, abort_groups, ["a rank died"]).start()
    following = alive[(alive.index(rank) + 1) % len(alive)]
    with pytest.raises(RuntimeError):
        dist.recv(torch.zeros(1), following)  # which sends nothing


CASES = [what_waits_for_one_that_lives_ends]
