"""Groups of backend "meshcast" whose members change (torch's `_reconfigure`), in four processes. The last
case is what it is for: a rank dies, and the others go on in the same group."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, LayoutError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
LEAVE_UP = True  # one of its ranks is dead in the end
ALL = [0, 1, 2, 3]
LARGE = 600_000  # floats: more than a broadcast takes to be a multicast


def members_meet(context, group: dist.ProcessGroup | None, members: list[int], uuid: int) -> None:
    """These global ranks, in this order, become the members of the group. The others must not call."""
    place = f"{context.case}/{uuid}"
    context.store.set(f"{place}/{context.rank}", dist._get_reconfigure_handle(group))
    handles = [context.store.get(f"{place}/{rank}").decode() for rank in members]
    dist._reconfigure(uuid, handles, group, timeout=timedelta(seconds=20)).wait()


def all_is_right(group: dist.ProcessGroup | None, members: list[int], me: int) -> None:
    """Against what one process knows: the sum of all, what the first has, what the one before sent."""
    group = dist.group.WORLD if group is None else group
    at, size = members.index(me), len(members)
    assert (group.rank(), group.size()) == (at, size)
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.tensor([me + 1.0, 2.0 * me], dtype=dtype)
        group.allreduce([total]).wait()
        assert total.tolist() == [sum(r + 1.0 for r in members), sum(2.0 * r for r in members)]
    large = torch.full((LARGE,), float(me))
    group.broadcast(large, 0).wait()
    assert torch.equal(large, torch.full((LARGE,), float(members[0])))
    if size > 1:
        given, got = torch.full((5000,), float(me)), torch.empty(5000)
        works = [group.send([given], (at + 1) % size, 3), group.recv([got], (at - 1) % size, 3)]
        for work in works:
            work.wait()
        assert torch.equal(got, torch.full((5000,), float(members[at - 1])))


def a_group_takes_other_members_in_another_order(context) -> None:
    group = dist.new_group(ALL, backend="meshcast")
    assert group.supports_reconfigure
    all_is_right(group, ALL, context.rank)
    members = [3, 0, 2]
    if context.rank in members:
        members_meet(context, group, members, 1)
        all_is_right(group, members, context.rank)
    context.wait_for_all("three")
    if context.rank == 0:  # alone
        members_meet(context, group, [0], 2)
        all_is_right(group, [0], 0)
    context.wait_for_all("one")
    backend = group._get_backend(torch.device("cpu"))
    expected = (3,) if context.rank == 0 else (3, 5)  # whether it counts messages is gloo's affair
    assert backend._get_sequence_number_for_group() in expected


def a_message_that_waits_ends_with_the_old_members(context) -> None:
    """The message would come from a rank that is no member any more."""
    group = dist.new_group(ALL, backend="meshcast")
    all_is_right(group, ALL, context.rank)
    if context.rank == 1:
        return
    backend = group._get_backend(torch.device("cpu"))
    pending = group.recv([torch.empty(4)], 1, 9) if backend.point_to_point is not None else None
    members_meet(context, group, [0, 2, 3], 1)
    all_is_right(group, [0, 2, 3], context.rank)
    if pending is not None:
        with pytest.raises(AbortedError):
            pending.wait()


def a_handle_that_is_none_changes_nothing(context) -> None:
    group = dist.new_group(ALL, backend="meshcast")
    own = dist._get_reconfigure_handle(group)
    for handles, expected in ((["nothing"], "Invalid"), ([own, own], "must be unique"), ([], "at least one")):
        with pytest.raises(RuntimeError, match=expected):
            dist._reconfigure(7, handles, group)
    all_is_right(group, ALL, context.rank)


def reshards_need_the_ranks_that_torch_names(context) -> None:
    """Whether meshcast has met the group before or not."""
    met, new = dist.new_group(ALL, backend="meshcast"), dist.new_group(ALL, backend="meshcast")
    mesh = DeviceMesh("cpu", ALL, _init_backend=False, _rank=context.rank)
    full = torch.arange(8.0)
    x = DTensor.from_local(full.chunk(4)[context.rank].clone(), mesh, [Shard(0)], run_check=False)

    def gather(group: dist.ProcessGroup | None) -> torch.Tensor:
        return meshcast.reshard(x, mesh, [Replicate()], group=group).to_local()

    assert torch.equal(gather(met), full)
    for group in (met, new):
        if context.rank != 2:
            members_meet(context, group, [0, 1, 3], 1 + (group is new))
            with pytest.raises(LayoutError, match=r"was reconfigured: this process is rank \d of 3 in it"):
                gather(group)
            all_is_right(group, [0, 1, 3], context.rank)
    context.wait_for_all("refused")
    assert torch.equal(gather(None), full)


def hooks_around_collectives_are_torchs(context) -> None:
    group = dist.new_group(ALL, backend="meshcast")
    before, after = [], []
    group.register_pre_hook(1, lambda given: before.append(given.op_id))
    group.register_post_hook(1, lambda given: after.append(given.op_id))
    dist.all_reduce(torch.ones(2), group=group)
    dist.broadcast(torch.ones(LARGE), 0, group=group)
    assert len(before) == 2 and before == after
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    all_is_right(group, ALL, context.rank)
    assert len(before) == 2
    for name in ("supports_abort_hooks", "supports_completion_hooks"):  # torch 2.15 tells
        assert not getattr(group, name, False)  # as gloo


def a_limit_that_is_set_holds_for_all_calls(context) -> None:
    group = dist.new_group(ALL, backend="meshcast", timeout=timedelta(seconds=60))
    dist.set_timeout(timedelta(seconds=23), group)
    backend = group._get_backend(torch.device("cpu"))
    assert backend.timeout == backend.inner.options._timeout == timedelta(seconds=23)
    all_is_right(group, ALL, context.rank)


def members_that_come_later(context) -> None:
    """A group that connects nobody when it is made: half of the ranks come later."""
    dist.destroy_process_group()
    dist.init_process_group(
        "meshcast",
        store=dist.PrefixStore("later", context.store.clone()),
        rank=context.rank,
        world_size=4,
        timeout=timedelta(seconds=20),
        enable_reconfigure=True,
    )
    with pytest.raises(RuntimeError, match=r"(?i)initializ"):
        dist.group.WORLD.allreduce([torch.ones(1)]).wait()
    if context.rank < 2:
        members_meet(context, None, [1, 0], 1)
        all_is_right(None, [1, 0], context.rank)
    context.wait_for_all("two")
    members_meet(context, None, ALL, 2)
    all_is_right(None, ALL, context.rank)


def a_rank_dies_and_the_others_go_on(context) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    members_meet(context, None, [0, 2, 3], 3)
    all_is_right(None, [0, 2, 3], context.rank)


CASES = [
    a_group_takes_other_members_in_another_order,
    a_message_that_waits_ends_with_the_old_members,
    a_handle_that_is_none_changes_nothing,
    reshards_need_the_ranks_that_torch_names,
    hooks_around_collectives_are_torchs,
    a_limit_that_is_set_holds_for_all_calls,
    members_that_come_later,
    a_rank_dies_and_the_others_go_on,
]
