"""WeightSync: what is refused or torn, on all ranks, and what ends it. Ranks 0 and 1 train, the others
serve."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from multiproc.weight_job import TRAINERS, Job, raises
from patience import patient
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 40.0


def refusals(context) -> None:
    """Wrong pushes raise on all ranks, move nothing, and the next one succeeds."""
    job, count = Job(context), itertools.count()
    mismatch, layout = meshcast.PlanMismatchError, meshcast.LayoutError

    def all_raise(kind, text, version, told=(mismatch, "")) -> None:
        """told: what the other ranks get, where they are told by one."""
        if job.trains:
            error, op = raises(kind, text, lambda: job.sync.push(version)), "WeightSync.push"
        else:
            error, op = raises(*told, lambda: job.sync.pull(1000)), "WeightSync.pull"
        assert str(error).startswith(op), error
        assert error.op == op, error.op
        assert "reshard_state_dict" not in str(error), error
        if job.serves:
            # What a rank said of its own call stays that.
            refused = "refused its arguments: " in str(error)
            assert not refused or "refused its arguments: WeightSync.push" in str(error), error
            assert job.sync.version is None or job.sync.state.version == job.sync.version
        job.meet(f"refused {next(count)}")

    def whole(version) -> None:
        job.turn(version)
        job.meet(f"whole {version}")

    all_raise(mismatch, "the versions differ", 10 + context.rank, (mismatch, "the versions differ"))
    whole(12)
    all_raise(mismatch, "no newer", 12, (mismatch, "no newer"))
    for wrong in (None, "x", -1, True, 1.5):
        all_raise(layout, "version", wrong, (mismatch, "refused its arguments"))
    whole(13)
    if job.trains:
        job.held["more"] = job.held.pop("b")
    all_raise(layout, "'b'", 14, (layout, "'b'"))
    if job.trains:
        job.held["b"] = job.held.pop("more")
    whole(15)
    if job.serves:
        job.check(15)
        raises(layout, "version", lambda: job.sync.pull("x"))
        raises(layout, "gave no state", lambda: job.sync.push(16))
    whole(16)
    job.close()


def changed_on_the_way(context) -> None:
    """A state that is changed while it travels is no version: those that serve keep the old one, or know
    that what they have is torn."""
    for buffers in (2, 1):
        _change_on_the_way(Job(context, buffers=buffers), buffers)


def _change_on_the_way(job: Job, buffers: int) -> None:
    job.turn(1)
    job.meet(f"{buffers} one")
    if job.trains:
        job.become(2)
        calls = job.sync._side._conversation
        original = calls.run

        def run(*arguments):
            if job.rank == 0:
                job.held["w"].to_local().add_(1)
            return original(*arguments)

        calls.run = run
        raises(meshcast.MeshcastError, "changed 'w' in place", lambda: job.sync.push(2))
        calls.run = original
    else:
        raises(meshcast.MeshcastError, "changed 'w' in place", lambda: job.sync.pull(2))
        if buffers == 2:
            job.check(1)
        else:
            raises(meshcast.MeshcastError, "torn", lambda: job.sync.state)
            assert job.sync.version is None
    job.meet(f"{buffers} torn")
    job.turn(3)
    job.close()


def constructors_disagree(context) -> None:
    """One rank refuses its arguments, or has another destination: all hear of it."""
    rank = context.rank
    held = {"x": sharded(torch.arange(8.0), quiet_mesh(TRAINERS), [Shard(0)], rank)} if rank < 2 else None

    def calling(sync):
        return (lambda: sync.push(1)) if rank < 2 else (lambda: sync.pull(1))

    def refused(wrong: dict) -> None:
        where = {"x": (quiet_mesh([2, 3]), [Shard(0)])}
        if rank == 2:
            error = raises(meshcast.LayoutError, "", lambda: meshcast.WeightSync(held, where, **wrong))
            assert "WeightSync" in str(error), error
            assert "reshard_state_dict" not in str(error), error
            return
        sync = meshcast.WeightSync(held, where)
        raises(meshcast.PlanMismatchError, "rank 2 refused its arguments", calling(sync))
        raises(meshcast.MeshcastError, "rank 2 refused its arguments", calling(sync))
        sync.close()

    for wrong in ({"buffers": 3}, {"buffers": "2"}, {"timeout": -1}, {"out": {}}, {"maps": 7}):
        refused(wrong)
        context.wait_for_all(f"refused {wrong}")
    where = {"x": (quiet_mesh([2, 3]), [Replicate() if rank == 3 else Shard(0)])}
    sync = meshcast.WeightSync(held, where)
    raises(meshcast.PlanMismatchError, "the destination of 'x'", calling(sync))
    context.wait_for_all("close")
    sync.close()


def a_forked_child(context) -> None:
    """It gets an error, and its parent goes on."""
    job = Job(context)
    job.turn(1)
    job.meet("one")
    child = os.fork()
    if child == 0:
        try:
            call = (lambda: job.sync.push(2)) if job.trains else job.sync.pull
            raises(meshcast.AbortedError, "was forked from process", call)
            raises(meshcast.AbortedError, "was forked from process", job.sync.close)
        except BaseException as error:
            print(error, flush=True)
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.turn(2)
    job.close()


def group_is_destroyed(context) -> None:
    """The thread ends with the process group, and calls say why nothing comes any more."""
    ranks = list(range(context.world))
    group = dist.new_group(ranks)
    job = Job(context, group=group)
    job.turn(1)
    job.meet("destroy")
    begin = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begin < patient(5.0)
    assert not any(thread.name == "meshcast-weights" for thread in threading.enumerate())
    call = (lambda: job.sync.push(2)) if job.trains else (lambda: job.sync.pull(2))
    raises(meshcast.AbortedError, "destroyed", call)
    if job.serves:
        job.check(1)


def interrupted(context) -> None:
    """A handler of a signal ends a push that waits: its error comes unchanged, the others are told."""

    def handler(*_):
        raise ZeroDivisionError("from the handler")

    if context.rank > 1:
        context.wait_for_all("over")
    job = Job(context)
    if job.trains:
        begin = time.monotonic()
        if context.rank == 0:
            before = signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            raises(ZeroDivisionError, "from the handler", lambda: job.sync.push(1))
            signal.signal(signal.SIGALRM, before)
        else:
            raises(meshcast.AbortedError, "rank 0 was interrupted", lambda: job.sync.push(1))
        assert time.monotonic() - begin < 0.5 + patient(5.0)
        raises(meshcast.AbortedError, "rank 0 was interrupted", lambda: job.sync.push(2))
        context.wait_for_all("over")
    else:
        raises(meshcast.AbortedError, "rank 0 was interrupted", job.sync.pull)
    job.close()


CASES = [
    refusals,
    changed_on_the_way,
    constructors_disagree,
    interrupted,
    a_forked_child,
    group_is_destroyed,
]
