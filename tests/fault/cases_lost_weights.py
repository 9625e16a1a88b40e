"""A rank of a WeightSync dies or freezes; ranks 0 and 1 train, 2 and 3 serve. The environment says which, how
and when.

In a push: all survivors raise an error that names the lost rank; those that serve keep the version before, or
know that theirs is torn. Between pushes: a rank that is frozen stops a push for its limit, and nothing else.
"""

from __future__ import annotations

import os
import re
import signal
import time

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, DeadlineExceededError, MeshcastError, PeerLostError
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])
FAULT = os.environ["FAULT"]  # killed, frozen; idle: killed between pushes; thawed: frozen between pushes
BUFFERS = int(os.environ["BUFFERS"])
LIMIT = float(os.environ["LIMIT"])  # seconds
SHAPE = (513, 257)  # rows on trainers and columns on servers are uneven
LOST = (PeerLostError, DeadlineExceededError, AbortedError)


class Job:
    def __init__(self, rank: int) -> None:
        self.rank, self.trains = rank, rank < 2
        self.held = {
            "w": sharded(torch.zeros(SHAPE), quiet_mesh([0, 1]), [Shard(0)], rank),
            "v": sharded(torch.zeros(SHAPE, dtype=torch.bfloat16), quiet_mesh([0, 1]), [Shard(0)], rank),
        }
        where = {name: (quiet_mesh([2, 3]), [Shard(1)]) for name in self.held}
        options = {"buffers": BUFFERS, "timeout": LIMIT}
        self.sync = meshcast.WeightSync(self.held if self.trains else None, where, **options)

    def call(self, version: int) -> None:
        """The next version, on either side."""
        if self.trains:
            for x in self.held.values():
                x.to_local().fill_(version)
            self.sync.push(version)
        else:
            assert self.sync.pull(version) == version
            self.check(version)

    def check(self, version: int) -> None:
        assert self.sync.state.version == version
        assert all(bool((x.to_local() == version).all()) for x in self.sync.state.values())


def fail() -> None:
    os.kill(os.getpid(), signal.SIGSTOP if FAULT in ("frozen", "thawed") else signal.SIGKILL)


def named(error: BaseException) -> bool:
    """A frozen rank is one of those that are silent; the limit of a pull may come before that of the push."""
    text = str(error)
    ranks = " ".join(re.findall(r"ranks? \[?([\d, ]+)", text))
    return str(VICTIM) in re.findall(r"\d+", ranks) or (FAULT == "frozen" and "is in flight" in text)


def go_on(context, job: Job) -> None:
    """All ranks, once none is frozen."""
    context.wait_for_all("thawed", limit=60.0)
    job.call(3)
    context.wait_for_all("three", limit=60.0)
    job.sync.close()
    dist.destroy_process_group()


def lost_weights(context) -> None:
    rank = context.rank
    job = Job(rank)
    job.call(1)
    context.wait_for_all("one", limit=60.0)
    if rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
        if FAULT == "idle":
            fail()
        if FAULT == "thawed":
            fail()
            # It goes on here, and finds what it has missed.
            return go_on(context, job)

        def tear(_):
            time.sleep(0.5)  # the others have begun
            fail()

        job.sync._buffers.tear = tear
        if FAULT == "frozen" and BUFFERS == 1:
            time.sleep(0.4 * LIMIT)  # ready at last, and then it freezes
        job.call(2)
        raise AssertionError("the victim lives on")
    context.store.wait(["victim"])
    time.sleep(0.2)
    begin = time.monotonic()
    if FAULT == "thawed" and not job.trains:
        job.check(1)
    else:
        with pytest.raises(LOST) as caught:
            job.call(2)
        print(f"knew after {time.monotonic() - begin:.2f} s: {caught.value}", flush=True)
        # A push keeps to its limit; a pull has one until it comes and one for the transfer.
        assert time.monotonic() - begin < (LIMIT + 2 if job.trains else 2 * LIMIT + 8)
        assert named(caught.value), caught.value
    if FAULT == "thawed":
        assert not job.trains or isinstance(caught.value, DeadlineExceededError)
        context.wait_for_all("late", [r for r in range(4) if r != VICTIM], limit=60.0)
        if rank == 0:
            os.kill(int(context.store.get("victim")), signal.SIGCONT)
        return go_on(context, job)
    if FAULT == "idle":
        assert time.monotonic() - begin < 5, "the death was not seen"
        assert isinstance(caught.value, PeerLostError), caught.value
    if not job.trains:
        if BUFFERS == 2 or FAULT == "idle":
            job.check(1)
        else:
            with pytest.raises(MeshcastError, match="torn"):
                job.sync.state  # noqa: B018
    with pytest.raises(LOST):
        job.call(3)
    context.wait_for_all("survived", [r for r in range(4) if r != VICTIM], limit=60.0)
    begin = time.monotonic()
    job.sync.close()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 10
    if FAULT == "frozen" and rank == (VICTIM + 1) % 4:
        os.kill(int(context.store.get("victim")), signal.SIGKILL)


CASES = [lost_weights]
