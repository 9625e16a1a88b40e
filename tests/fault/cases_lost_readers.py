"""A process dies or freezes while a WeightReader reads; ranks 0 and 1 train, 2 and 3 serve whole copies, and
4 reads. The environment says which, and how.

A rank that serves: the reader gets the version from the other one, within its limit, and the job goes on
without the lost rank. The reader: neither a push nor those that serve notice.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding import weight_offers, weight_reader
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])
FAULT = os.environ["FAULT"]  # killed, frozen, offering: killed once it has been asked
LIMIT = 16.0  # seconds
SHAPE = (513, 257)
MEMBERS, READER = [0, 1, 2, 3], 4


def values(version: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


class Job:
    def __init__(self, rank: int, group: dist.ProcessGroup, readers: dist.Store, lost=()) -> None:
        self.rank, self.trains = rank, rank < 2
        self.held = {"w": sharded(values(0), quiet_mesh([0, 1]), [Shard(0)], rank)}
        serving = [each for each in (2, 3) if each not in lost]
        self.sync = meshcast.WeightSync(
            self.held if self.trains else None,
            {"w": (quiet_mesh(serving), [Replicate()])},
            group=group,
            readers=readers,
            lost=lost,
            timeout=20.0,
        )

    def call(self, version: int) -> None:
        """The next version, on either side."""
        if self.trains:
            self.held["w"].to_local().copy_(
                sharded(values(version), quiet_mesh([0, 1]), [Shard(0)], self.rank).to_local()
            )
            self.sync.push(version)
        else:
            assert self.sync.pull(version) == version
            assert torch.equal(self.sync.state["w"].to_local(), values(version))


def fail() -> None:
    os.kill(os.getpid(), signal.SIGSTOP if FAULT == "frozen" else signal.SIGKILL)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def fails_in_the_middle(context) -> None:
    """The next time that this rank takes part in reading: it is chosen, or has chosen."""

    def move(*_, **__):
        context.say("failing")
        fail()

    if FAULT == "offering":
        weight_offers.Offering._answer_now = move
    else:
        weight_reader.Meeting.move = move


def reads(context) -> None:
    where = {"w": Layout([0, 1], [Shard(1)])}
    reader = meshcast.WeightReader(context.store, where, rank=0, timeout=LIMIT)
    if context.rank == VICTIM:
        fails_in_the_middle(context)
    begin = time.monotonic()
    assert reader.pull() == 1
    print(f"read after {time.monotonic() - begin:.2f} s", flush=True)
    assert torch.equal(reader.state["w"], values(1)[:, :129])


def lost_readers(context) -> None:
    rank = context.rank
    group = dist.new_group(MEMBERS)
    living = [each for each in range(5) if each != VICTIM]
    if rank == READER:
        context.wait_for_all("one", limit=60.0)
        reads(context)
        context.wait_for_all("read", living, limit=60.0)
        context.wait_for_all("pushed", living, limit=60.0)
        reader = meshcast.WeightReader(
            context.store, {"w": Layout([0], [Replicate()])}, rank=0, timeout=LIMIT
        )
        assert reader.pull() == 2
        assert torch.equal(reader.state["w"], values(2))
        context.wait_for_all("read again", living, limit=60.0)
        return dist.destroy_process_group()
    job = Job(rank, group, context.store)
    job.call(1)
    if rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
        fails_in_the_middle(context)
    context.wait_for_all("one", limit=60.0)
    if VICTIM == READER:
        context.store.wait([f"{context.case}/failing/{VICTIM}"])
        job.call(2)
        if rank == 2:  # in the place of the reader, while the other one may still wait for that
            reader = meshcast.WeightReader(
                context.store, {"w": Layout([0], [Replicate()])}, rank=0, timeout=LIMIT
            )
            assert reader.pull() == 2
            assert torch.equal(reader.state["w"], values(2))
        context.wait_for_all("read", living, limit=60.0)
        job.sync.close()
        return dist.destroy_process_group()
    context.wait_for_all("read", living, limit=60.0)
    if FAULT == "frozen":
        if rank == 0:
            os.kill(int(context.store.get("victim")), signal.SIGKILL)
        context.wait_for_all("ended", [each for each in living if each != READER], limit=60.0)
    victim = int(context.store.get("victim"))
    context.wait_until(lambda: has_ended(victim), "the victim ends")
    with pytest.raises(meshcast.MeshcastError) as caught:
        job.call(2)
    assert isinstance(caught.value, meshcast.PeerLostError | meshcast.AbortedError), caught.value
    again = Job(rank, group, context.store, lost=[VICTIM])
    again.call(2)
    context.wait_for_all("pushed", living, limit=60.0)
    context.wait_for_all("read again", living, limit=60.0)
    again.sync.close()
    job.sync.close()
    return dist.destroy_process_group()


CASES = [lost_readers]
