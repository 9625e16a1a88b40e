"""Wrong and disagreeing arguments, in four processes. Every case uses groups of its own, so that what it
breaks stays there."""

from __future__ import annotations

import contextlib
import functools
import time

import meshcast
import torch
import torch.distributed as dist
from fault.bad_values import spoiled
from fault.calls_of_four import SOON, A, B, fresh_group, in_time, raises, send, works
from fault.refusal_order import (
    a_backward_before_a_refused_call,
    a_call_before_a_refused_one,
    a_call_in_flight_before_a_refused_one,
    a_refused_backward_before_another,
)
from meshcast import AbortedError, DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 20.0


def control(context) -> None:
    """The calls that the other cases spoil, unspoiled: no error, well within the limits that they wait
    for."""
    works(context)  # torch loads much of itself at the first DTensor
    group = fresh_group()
    for _ in range(3):
        in_time(lambda: works(context, group), 10.0)
    send(context, group, gradient=True, timeout=10)


def placement_count(context) -> None:
    group = fresh_group()
    for wrong in ([], [Shard(0), Replicate()]):
        in_time(
            lambda wrong=wrong: raises(
                LayoutError, lambda: send(context, group, placements=wrong), "placements"
            ),
            5.0,
        )
    works(context, group)


def shard_dimension(context) -> None:
    group = fresh_group()
    for wrong in (2, -3):
        in_time(
            lambda wrong=wrong: raises(
                LayoutError, lambda: send(context, group, placements=[Shard(wrong)]), "dimensions"
            ),
            5.0,
        )
    works(context, group)


def partial_destination(context) -> None:
    from torch.distributed.tensor import Partial

    group = fresh_group()
    raises(LayoutError, lambda: send(context, group, placements=[Partial()]), "Partial")
    works(context, group)


def ranks_outside_the_group(context) -> None:
    group = dist.new_group([0, 1, 2])
    in_time(lambda: raises(LayoutError, lambda: send(context, group), "group"), 5.0)


def wrong_types(context) -> None:
    """No rank can tell the others here, but each raises at once."""
    group = fresh_group()
    mesh = quiet_mesh(B)
    raises(LayoutError, lambda: meshcast.reshard(torch.zeros(3), mesh, [Shard(0)], group=group), "DTensor")
    x = sharded(torch.zeros(4, 4), quiet_mesh(A), [Shard(0)], context.rank)
    raises(LayoutError, lambda: meshcast.reshard(x, B, [Shard(0)], group=group), "DeviceMesh")
    raises(LayoutError, lambda: meshcast.reshard(x, mesh, [Shard(0)], group=group, timeout=-1), "timeout")
    works(context, group)


def unknown_strategy(context) -> None:
    group = fresh_group()
    x = sharded(torch.zeros(4, 4), quiet_mesh(A), [Shard(0)], context.rank)
    raises(
        LayoutError,
        lambda: meshcast.reshard(x, quiet_mesh(B), [Shard(0)], group=group, strategy="fastest"),
        "strategy",
    )
    works(context, group)


def one_rank_refuses(context) -> None:
    """One rank's arguments are wrong: it raises LayoutError, and the others learn of it at once."""
    group = fresh_group()
    if context.rank == 2:
        raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
    else:
        in_time(lambda: raises(PlanMismatchError, lambda: send(context, group), "rank 2", "placements"), 10.0)
    works(context, group)  # nothing was moved, so nothing is broken


def one_rank_refuses_known(context) -> None:
    """The same where the plan is known and nothing is exchanged: whoever waits for the rank raises; rank 3,
    whose data all comes from ranks 0 and 1, may have it already. The group goes on."""
    group = fresh_group()
    for _ in range(3):
        works(context, group)
        if context.rank == 2:
            raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
        elif context.rank == 3:
            with contextlib.suppress(PlanMismatchError):
                works(context, group)
        else:
            call = lambda: raises(PlanMismatchError, lambda: send(context, group), "rank 2", "placements")  # noqa: E731
            in_time(call, SOON)
        works(context, group)
        context.wait_for_all(f"turn {_}")


def one_rank_refuses_at_once_again(context) -> None:
    """Known calls: the rank that refuses goes on at once, and refuses again, before the others have heard."""
    group = fresh_group()
    works(context, group)
    for _ in range(3):
        if context.rank == 1:
            for _ in range(2):
                raises(LayoutError, lambda: send(context, group, placements=[]), "placements")
        else:
            for _ in range(2):
                raises(PlanMismatchError, lambda: send(context, group), "rank 1")
        works(context, group)


def one_rank_refuses_without_ranks(context) -> None:
    """The arguments of rank 1 do not say who else is in the call: in the first call of a group, and where a
    kind is known."""
    group = fresh_group()
    for turn in range(3):
        if context.rank == 1:
            x = sharded(torch.zeros(6, 6), quiet_mesh(A), [Shard(0)], context.rank)
            wrong = functools.partial(meshcast.reshard, x, "a mesh", [Shard(1)], group=group)
            in_time(functools.partial(raises, LayoutError, wrong, "DeviceMesh"), SOON)
        else:
            call = lambda: raises(PlanMismatchError, lambda: send(context, group), "rank 1", "DeviceMesh")  # noqa: E731
            in_time(call, SOON)
        works(context, group)
        context.wait_for_all(f"turn {turn}")


def one_rank_refuses_without_ranks_long_before(context) -> None:
    """Nobody waits yet, and two groups of ranks may be meant: it is the one that the rank uses next."""
    group = fresh_group()
    works(context, group)
    if context.rank != 3:
        send(context, group, mesh=[1, 2])
    if context.rank == 1:
        x = sharded(torch.zeros(6, 6), quiet_mesh(A), [Shard(0)], context.rank)
        raises(LayoutError, lambda: meshcast.reshard(x, "a mesh", [Shard(1)], group=group), "DeviceMesh")
    context.wait_for_all("refused")
    if context.rank != 1:
        time.sleep(0.5)  # its next call comes first
        raises(PlanMismatchError, lambda: send(context, group), "rank 1", "DeviceMesh")
    works(context, group)


def all_refuse_without_ranks(context) -> None:
    """No rank's arguments say who else is in the call, and nobody waits: later calls are not harmed."""
    group = fresh_group()
    x = sharded(torch.zeros(6, 6), quiet_mesh(A), [Shard(0)], context.rank)
    for _ in range(3):
        raises(LayoutError, lambda: meshcast.reshard(x, "a mesh", [Shard(1)], group=group), "DeviceMesh")
        works(context, group)


def one_rank_refuses_to_prepare(context) -> None:
    group = fresh_group()
    meshes = "no meshes" if context.rank == 0 else [0, 1, 2, 3]
    kind, text = (LayoutError, "ranks") if context.rank == 0 else (PlanMismatchError, "rank 0")
    in_time(lambda: raises(kind, lambda: meshcast.prepare(meshes, group=group), text), SOON)
    meshcast.prepare([0, 1, 2, 3], group=group)
    works(context, group)


def one_rank_gives_a_wrong_group(context) -> None:
    group = fresh_group()
    works(context, group)
    if context.rank == 3:
        in_time(lambda: raises(LayoutError, lambda: send(context, "a group"), "process group"), SOON)
    elif context.rank == 2:
        with contextlib.suppress(PlanMismatchError):
            works(context, group)
    else:
        in_time(lambda: raises(PlanMismatchError, lambda: send(context, group), "rank 3"), SOON)
    works(context, group)


def a_sparse_shard_on_one_rank(context) -> None:
    """What is seen only as the call starts, or before it: the others are in it by then."""
    group = fresh_group()
    for turn in range(4):
        x = sharded(torch.arange(36.0).reshape(6, 6), quiet_mesh(A), [Shard(0)], context.rank)
        call = lambda: meshcast.reshard(x, quiet_mesh(B), [Shard(1)], group=group)  # noqa: E731, B023
        if context.rank == 0:
            spoiled(x, ("sparse", "freed", "mkldnn", "cut")[turn])
            in_time(lambda: raises(LayoutError, call), SOON)  # noqa: B023
        else:
            in_time(lambda: raises(PlanMismatchError, call, "rank 0"), SOON)  # noqa: B023
        works(context, group)
        context.wait_for_all(f"turn {turn}")


def _broken(context, group) -> None:
    """Once every rank is through, the group fails each further call, at once where the failure was seen
    here."""
    context.wait_for_all("through")
    in_time(lambda: raises(MeshcastError, lambda: send(context, group, timeout=2)), 4.0)


def wrong_local_size(context) -> None:
    """A DTensor whose local tensor does not fit its layout, on one rank."""
    group = fresh_group()
    full = torch.zeros(6, 4)
    x = sharded(full, quiet_mesh(A), [Shard(0)], context.rank)
    if context.rank == 1:
        x = sharded(torch.zeros(4, 4), quiet_mesh(A), [Shard(0)], context.rank)
        x = type(x).from_local(
            x.to_local(), quiet_mesh(A), [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        raises(
            LayoutError,
            lambda: meshcast.reshard(x, quiet_mesh(B), [Shard(0)], group=group),
            "(3, 4)",
            "(2, 4)",
            "expected",
        )
    else:
        raises(
            PlanMismatchError, lambda: meshcast.reshard(x, quiet_mesh(B), [Shard(0)], group=group), "rank 1"
        )


def _disagree(context, known: bool = False, **other) -> None:
    """Rank 3 calls with other arguments. It and all that wait for it raise and show both sides; other groups
    go on.

    known: both kinds of call have run before, so that nothing is exchanged any more, and no message of one
    may match the other. Then rank 2, whose data comes from ranks 0 and 1, may have it all already; without
    `known` everybody raises.
    """
    group, limit = fresh_group(), 8.0
    if known:
        for _ in range(2):
            works(context, group)
            send(context, group, **other)
    if known and context.rank == 2:
        with contextlib.suppress(PlanMismatchError):
            works(context, group)
    else:
        arguments = other if context.rank == 3 else {}
        error: list[Exception] = []
        call = lambda: send(context, group, timeout=limit, **arguments)  # noqa: E731
        in_time(lambda: error.append(raises(PlanMismatchError, call, "rank 3")), limit - 0.5)
        assert str(error[0]).count("->") >= 2, f"the message must show both sides: {error[0]}"
    if known:
        _broken(context, group)


def shapes_disagree(context) -> None:
    _disagree(context, shape=(4, 9))


def dtypes_disagree(context) -> None:
    _disagree(context, dtype=torch.float64)


def placements_disagree(context) -> None:
    _disagree(context, placements=[Shard(0)])


def gradients_disagree(context) -> None:
    _disagree(context, gradient=True)


def known_shapes_disagree(context) -> None:
    _disagree(context, known=True, shape=(3, 12))


def known_dtypes_disagree(context) -> None:
    _disagree(context, known=True, dtype=torch.int8)


def known_placements_disagree(context) -> None:
    _disagree(context, known=True, placements=[Replicate()])


def never_calls(context) -> None:
    """Rank 3 stays away from the first call of a group: the others raise at their deadline, neither sooner
    nor much later."""
    group = fresh_group()
    if context.rank != 3:

        def call() -> None:
            error = raises(DeadlineExceededError, lambda: send(context, group, timeout=1.0), "[3]")
            assert isinstance(error, TimeoutError)

        in_time(call, 2.5, at_least=0.95)
        # The group is gone, and says so at once.
        in_time(lambda: raises(AbortedError, lambda: send(context, group), "[3]"), 0.5)
    context.wait_for_all("over")
    if context.rank == 3:
        in_time(lambda: raises(AbortedError, lambda: send(context, group), "[3]"), 2.0)  # too late


def never_calls_known(context) -> None:
    """The same where the plan is known: ranks that need rank 3 raise at the deadline; rank 2 may have all its
    data."""
    group = fresh_group()
    for _ in range(2):
        works(context, group)
    if context.rank in (0, 1):
        call = lambda: raises(DeadlineExceededError, lambda: send(context, group, timeout=1.0), "3")  # noqa: E731
        in_time(call, 3.0, at_least=0.95)
    elif context.rank == 2:
        with contextlib.suppress(DeadlineExceededError):
            works(context, group)
    _broken(context, group)


def isolated(case):
    """Afterwards, however the case ended, the default group must work on every rank."""

    @functools.wraps(case)
    def run(context) -> None:
        try:
            case(context)
        finally:
            works(context)

    return run


CASES = [
    isolated(case)
    for case in (
        control,
        placement_count,
        shard_dimension,
        partial_destination,
        ranks_outside_the_group,
        wrong_types,
        unknown_strategy,
        one_rank_refuses,
        one_rank_refuses_known,
        one_rank_refuses_at_once_again,
        one_rank_refuses_without_ranks,
        one_rank_refuses_without_ranks_long_before,
        all_refuse_without_ranks,
        one_rank_refuses_to_prepare,
        one_rank_gives_a_wrong_group,
        a_sparse_shard_on_one_rank,
        a_call_before_a_refused_one,
        a_call_in_flight_before_a_refused_one,
        a_backward_before_a_refused_call,
        a_refused_backward_before_another,
        wrong_local_size,
        shapes_disagree,
        dtypes_disagree,
        placements_disagree,
        gradients_disagree,
        known_shapes_disagree,
        known_dtypes_disagree,
        known_placements_disagree,
        never_calls,
        never_calls_known,
    )
]
