"""What of the calls and backwards around a refused one goes on, and what ends with it."""

from __future__ import annotations

import contextlib
import functools
import time

import meshcast
import torch
from fault.bad_values import spoiled
from fault.calls_of_four import SOON, A, B, fresh_group, in_time, raises, send, works
from meshcast import LayoutError, PlanMismatchError
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Replicate, Shard


def a_call_before_a_refused_one(context) -> None:
    """Rank 0 has sent its part of a known call and refuses the next, while another is late for the first or
    in it: that one goes on to its end, on every rank."""
    group = fresh_group()
    works(context, group)
    for late in (1, 2, 3):
        if context.rank == 0:
            works(context, group)
            raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
        else:
            time.sleep(0.7 * (context.rank == late))
            works(context, group)
            raises(PlanMismatchError, lambda: send(context, group), "rank 0", "placements")
        works(context, group)
        context.wait_for_all(f"turn {late}")


def a_call_in_flight_before_a_refused_one(context) -> None:
    """The same where the first has been started and is waited for later."""
    group = fresh_group()
    mesh, full = quiet_mesh(A), torch.arange(1 << 20).reshape(1 << 10, 1 << 10)
    x = sharded(full, mesh, [Shard(0)], context.rank)
    start = functools.partial(meshcast.reshard, x, quiet_mesh(B), [Replicate()], group=group, async_op=True)
    start().wait()
    for late in (1, 2, 3):
        time.sleep(0.7 * (context.rank == late))
        first = start()
        if context.rank == 0:
            raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
        else:
            raises(PlanMismatchError, lambda: start().wait(), "rank 0", "placements")
        result = first.wait()
        if context.rank in B:
            assert torch.equal(result.to_local(), full)
        start().wait()
        context.wait_for_all(f"turn {late}")


def a_backward_before_a_refused_call(context) -> None:
    """Rank 3 has sent its gradients and refuses the next call, while another is late for the backward."""
    group = fresh_group()
    values = torch.arange(36.0).reshape(6, 6)
    works(context, group)
    for late in (0, 1, 2):
        x = sharded(values, quiet_mesh(A), [Shard(0)], context.rank).detach().requires_grad_(True)
        y = meshcast.reshard(x, quiet_mesh(B), [Shard(1)], group=group)
        time.sleep(0.7 * (context.rank == late))
        weights = sharded(values, quiet_mesh(B), [Shard(1)], context.rank)
        y.backward(weights)
        if context.rank in A:
            assert torch.equal(x.grad.to_local(), values[3 * context.rank : 3 * context.rank + 3])
        if context.rank == 3:
            raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
        elif context.rank == 2:  # needs nothing from rank 3
            with contextlib.suppress(PlanMismatchError):
                works(context, group)
        else:
            raises(PlanMismatchError, lambda: send(context, group), "rank 3", "placements")
        works(context, group)
        context.wait_for_all(f"turn {late}")


def a_refused_backward_before_another(context) -> None:
    """Rank 3 refuses its gradient of the second of two calls, whose backward is the first. Rank 2, which only
    sends, is in both by then: the other one ends as well, long before its limit."""
    group = fresh_group()
    full = torch.arange(float(1 << 18)).reshape(1 << 9, 1 << 9)  # a send ends when its receivers have it

    for refuses in (False, True, True):
        x = sharded(full, quiet_mesh(A), [Shard(0)], context.rank).detach().requires_grad_(True)
        first, second = (meshcast.reshard(x, quiet_mesh(B), [Shard(1)], group=group) for _ in range(2))
        if refuses and context.rank == 3:
            second.register_hook(lambda gradient: spoiled(gradient, "one row more"))
        weights = sharded(full, quiet_mesh(B), [Shard(1)], context.rank)
        run = functools.partial((first + second).backward, weights)
        if not refuses:
            run()
            if context.rank in A:
                assert torch.equal(x.grad.to_local(), 2 * full.chunk(2)[context.rank])
            continue
        if context.rank == 2:
            run()
        elif context.rank == 3:
            raises(LayoutError, run, "does not fit its layout")
        else:
            call = functools.partial(raises, PlanMismatchError, run, "rank 3", "does not fit its layout")
            in_time(call, SOON)
        in_time(functools.partial(works, context, group), SOON)
