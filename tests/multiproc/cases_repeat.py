"""Runs of one Resharder, plain ones and others, good ones and bad ones. In three processes."""

from __future__ import annotations

import threading
import time

import meshcast
import torch
import torch.distributed as dist
from meshcast.resharding.compiled import as_dtensor
from multiproc.cases_many import check, fresh, raises
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from multiproc.oracle import unique_fill
from patience import patient
from torch.distributed.tensor import DTensor, Shard

GROUP_TIMEOUT = 30.0
A, B = [0, 1], [2]
SHAPE = (6, 5)


def made(group: dist.ProcessGroup, **options) -> meshcast.Resharder:
    specs = [meshcast.TensorSpec(SHAPE, torch.float32, quiet_mesh(ranks), [Shard(0)]) for ranks in (A, B)]
    return resharder_between(*specs, group, **{"reuse_output": True, **options})


def given(context, step: int) -> DTensor | None:
    return sharded(full(step), quiet_mesh(A), [Shard(0)], context.rank) if context.rank in A else None


def full(step: int) -> torch.Tensor:
    return unique_fill(SHAPE, torch.float32, step)


def written_again_and_again(context) -> None:
    """Results, the version counter that autograd looks at, and the flight record."""
    call = made(fresh(context))
    first = call.run(given(context, 0))
    for step in range(1, 40):
        before = first._version, first.to_local()._version
        x = given(context, step)
        if step % 3 == 0:  # of the same calls, on all ranks
            assert call.start(x).wait() is first
        else:
            assert call.run(x) is first
        check(first, full(step), context.rank)
        if context.rank in B:
            assert first._version > before[0]
            assert first.to_local()._version > before[1]
    calls = meshcast.flight_record()[-40:]
    assert [entry["op"] for entry in calls] == ["Resharder"] * 40
    assert [entry["state"] for entry in calls] == ["ended"] * 40
    assert [entry["run"] for entry in calls] == list(range(40))
    assert [entry["position"] for entry in calls] == list(range(40))
    assert all(entry["seconds"] > 0 for entry in calls)


def unlike_runs(context) -> None:
    """An output of one's own, profiled runs, sources that need work first, and what tracks a gradient."""
    call = made(fresh(context))
    x = given(context, 1)
    call.run(x)
    check(call.run(x), full(1), context.rank)
    if context.rank in B:
        out = sharded(torch.zeros(SHAPE), quiet_mesh(B), [Shard(0)], context.rank)
        assert call.run(out=out) is out
        check(out, full(1), context.rank)
    else:
        call.run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call.run(x)
    assert {"meshcast::Resharder launch", "meshcast::Resharder wait"} <= {e.name for e in profile.events()}
    negated = None if x is None else as_dtensor(torch._neg_view(x._local_tensor), x._spec)
    check(call.run(negated), -full(1), context.rank)
    strided = None if x is None else as_dtensor(x._local_tensor.t().contiguous().t(), x._spec)
    check(call.run(strided), full(1), context.rank)
    with torch.no_grad():
        check(call.run(None if x is None else x.detach().requires_grad_()), full(1), context.rank)
    again = made(fresh(context))
    if context.rank in A:
        raises(meshcast.LayoutError, "requires_grad", lambda: again.run(x.detach().requires_grad_()))
    else:
        raises(meshcast.PlanMismatchError, "requires_grad", again.run)


def refused_after_good_runs(context) -> None:
    for reuse_output in (True, False):
        refused(context, made(fresh(context), timeout=4.0, reuse_output=reuse_output))


def refused(context, call: meshcast.Resharder) -> None:
    """One rank's source does not fit: the rank that waits for it raises, and never gets what is meant for the
    next call instead. The group goes on."""
    for step in range(3):
        call.run(given(context, step))
    x = given(context, 3)
    begin = time.monotonic()
    if context.rank == 0:
        call.run(x)
    elif context.rank == 1:
        raises(meshcast.LayoutError, "float64", lambda: call.run(x.double()))
    else:
        raises(meshcast.PlanMismatchError, "rank 1", call.run)
    assert time.monotonic() - begin < patient(5.0)
    context.wait_for_all(f"refused {call.plan.hash} {call._kept is None}")
    for step in range(4, 8):
        check(call.run(given(context, step)), full(step), context.rank)


def cast_kept_or_new(context) -> None:
    mesh_a, mesh_b, both = quiet_mesh(A), quiet_mesh(B), quiet_mesh([1, 2])
    spec = meshcast.TensorSpec(SHAPE, torch.float32, mesh_a, [Shard(0)])
    group = fresh(context)
    for destination, options in [
        (meshcast.TensorSpec(SHAPE, torch.float64, mesh_b, [Shard(0)]), {"reuse_output": True}),
        (meshcast.TensorSpec(SHAPE, torch.float32, both, [Shard(0)]), {"reuse_output": True}),
        (meshcast.TensorSpec(SHAPE, torch.float32, mesh_b, [Shard(0)]), {}),
    ]:
        call = resharder_between(spec, destination, group, **options)
        for step in range(3):
            check(call.run(given(context, step)), full(step).to(destination.dtype), context.rank)


def a_failure_has_its_type(context) -> None:
    """Rank 0 stays away: rank 2 raises in time, and the next call at once."""
    call = made(fresh(context), timeout=2.0)
    for step in range(3):
        call.run(given(context, step))
    if context.rank == 1:
        call.run(given(context, 3))  # which is over once rank 2 has it
    if context.rank == 2:
        begin = time.monotonic()
        raises(meshcast.DeadlineExceededError, "ranks [0", call.run)
        assert time.monotonic() - begin < 1.5 * 2.0 + patient(5.0)
        last = meshcast.flight_record()[-1]
        assert (last["op"], last["state"]) == ("Resharder", "failed")
        begin = time.monotonic()
        raises(meshcast.AbortedError, "", call.run)
        assert time.monotonic() - begin < 1.5  # not until the limit
    context.wait_for_all("failed")


def seen_while_it_waits(context) -> None:
    """A run that waits is in the record as unfinished."""
    call = made(fresh(context))
    call.run(given(context, 0))
    if context.rank == 0:
        context.wait_for_all("looked")
        call.run(given(context, 1))
        return
    found: list[str] = []

    def look() -> None:
        time.sleep(0.3)
        found.append(meshcast.flight_record()[-1]["state"])
        context.wait_for_all("looked")

    watcher = threading.Thread(target=look)
    watcher.start()
    check(call.run(given(context, 1)), full(1), context.rank)
    watcher.join()
    # Rank 1 only sends: its part is over once rank 2 has it, whoever else is late.
    assert found == ["unfinished" if context.rank == 2 else "ended"]


CASES = [
    written_again_and_again,
    unlike_runs,
    refused_after_good_runs,
    cast_kept_or_new,
    seen_while_it_waits,
    a_failure_has_its_type,
]
