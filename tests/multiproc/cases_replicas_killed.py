"""meshcast.elastic.Replicas where a rank is killed while copies are made. MESHCAST_TEST_KILL in the
environment is "RANK MOMENT": which rank dies, and when in its refresh; or "RANK random SEED"."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist
from meshcast import MeshcastError, elastic
from meshcast.resharding import rows, state_batches
from multiproc.cases_elastic import goes_on_as_one_that_began_here, world_of
from multiproc.cases_replicas import HOSTS, resumed, trained
from multiproc.elastic_training import Job, Reference
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
CASE_LIMIT = 200.0
VICTIM, MOMENT, *SEED = os.environ["MESHCAST_TEST_KILL"].split()
GATHERINGS = {"begin": 1, "end": 2, "commit": 3}  # of a refresh


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_the_moment() -> None:
    """From now on: before a gathering of the next refresh, or before its tensors move."""
    if MOMENT == "move":
        state_batches.Batch.run = lambda *_: die()
        return
    gather, count = rows.Rows.gather, [0]

    def dying(self, row, limit):
        count[0] += 1
        if count[0] == GATHERINGS[MOMENT]:
            time.sleep(0.3)  # what it has sent before arrives
            die()
        return gather(self, row, limit)

    rows.Rows.gather = dying


def all_agree(step: int) -> None:
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    assert set(steps) == {step}, steps


def new_numbers() -> tuple[list[int], dict[int, int]]:
    """The ranks that live, in another order, and their new numbers."""
    after = [rank for rank in (4, 3, 2, 1, 0) if rank != int(VICTIM)]
    return after, {rank: after.index(rank) for rank in after}


def killed_in_a_refresh(context) -> None:
    """FSDP2 and AdamW. The second refresh is interrupted: all go on from the same step, that of the first
    until all have the second."""
    reference = Reference(9)
    mesh = DeviceMesh("cpu", [0, 1, 2, 3, 4])
    job = Job(mesh, mesh.get_group())
    job.begin()
    job.train(1)
    replicas = elastic.Replicas(job.state, 2, own=["rng"], topology=HOSTS)
    trained(job, replicas, range(2, 4))
    job.train(1)
    if context.rank == int(VICTIM):
        die_at_the_moment()
    replicas.step(4)
    error = None
    try:
        replicas.wait()
    except MeshcastError as found:
        error = found
    assert error is not None
    assert str(error).startswith("Replicas")
    after, ranks = new_numbers()
    world_of(context, after, all_call=False)
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    job, found = resumed(replicas, mesh, [int(VICTIM)], ranks)
    expected = 4 if MOMENT == "commit" else 2
    assert found.version == job.position == expected
    all_agree(found.version)
    goes_on_as_one_that_began_here(job, mesh, reference)


def killed_at_random(context) -> None:
    """Copies at every step, one after the other, until a rank is gone."""
    full = unique_fill((301, 1999), torch.float32, 1)
    mesh = quiet_mesh([0, 1, 2, 3, 4])
    state = {"w": sharded(full, mesh, [Shard(0)], context.rank), "position": 0}
    replicas = elastic.Replicas(state, 1, topology=HOSTS)
    replicas.step(0)
    replicas.wait()
    if context.rank == int(VICTIM):
        threading.Timer(random.Random(int(SEED[0])).uniform(0.0, 0.5), die).start()
    step = 0
    try:
        while True:
            step += 1
            state["w"].to_local().add_(1.0)
            state["position"] = step
            replicas.step(step)
    except MeshcastError:
        pass
    after, ranks = new_numbers()
    world_of(context, after, all_call=False)
    new = quiet_mesh([0, 1, 2, 3])
    found = elastic.remesh(
        None, None, lambda _: (new, [Shard(1)]), [int(VICTIM)], ranks=ranks, replicas=replicas
    )
    all_agree(found.version)
    assert step - 2 <= found.version <= step
    expected = (full + found.version).chunk(4, dim=1)[after.index(context.rank)]
    assert torch.equal(found["w"].to_local(), expected)
    assert found["position"] == found.version


CASES = [killed_at_random if SEED else killed_in_a_refresh]
