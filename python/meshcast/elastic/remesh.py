"""remesh: the state of a training job, from the ranks that had it to the ranks that continue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from typing_extensions import Unpack

from ..base import checks
from ..base.values import is_carried
from ..base.wire import pack, unpack
from ..errors import LayoutError
from ..groups.parent import known_parents, parent_group, raise_refused, seconds
from ..layout import Box
from ..resharding.meshes import raise_gone
from ..resharding.state_arguments import Given
from ..resharding.state_dict import StateOptions
from ..resharding.state_run import Conversation, ReshardedState, conversation
from ..resharding.tensor_map import TensorMap
from .places import (
    OP,
    Inventory,
    New,
    Old,
    Ranks,
    called_by,
    copies_of,
    destinations,
    old_layouts,
    read_ranks,
    run,
)
from .replicas import Replicas

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup

__all__ = ["abort_groups", "forget_meshes", "leave_groups", "remesh"]


_NEVER_SENT = (1 << 31) - 1  # tag
_lock = threading.Lock()  # of the groups that torch knows


def abort_groups(reason: str) -> None:
    """Ends what this rank waits for in all groups, and their connections: its peers get errors too. From any
    thread; the groups are of no use after it."""
    with _lock:
        for parent in known_parents():
            parent.abort(reason)
        for group in list(c10d._world.pg_map):
            for device in group._device_types:
                with contextlib.suppress(RuntimeError):
                    _abort(group._get_backend(device), group.rank())


def _abort(backend: Any, rank: int) -> None:
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG
    backend = getattr(backend, "inner", backend)  # of backend meshcast
    if "gloo" not in backend.name():
        backend.abort()
        return
    # Gloo has no call for it. It closes all connections of a group when one message is late, but not when its
    # sender is already known to be gone: so one of each.
    for peer in set(range(backend.size())) - {rank}:
        with contextlib.suppress(RuntimeError):
            late = backend.recv([torch.empty(1)], peer, _NEVER_SENT)
            late.wait(timedelta(milliseconds=1))


def leave_groups(reason: str) -> None:
    """Aborts and destroys all process groups. Objects of torch that hold one may live on."""
    if not dist.is_initialized():
        return
    abort_groups(reason)
    with _lock:
        for parent in known_parents():
            parent.close(time.monotonic())
        dist.destroy_process_group()
    forget_meshes()


def forget_meshes() -> None:
    """Drops what DTensor keeps for the meshes that it has met. It finds that by meshes that are equal, and it
    has the names of the previous groups: they are of no group now, or of another one. References of other
    threads, such as those that run a backward on GPUs, stay."""
    _clear_sharding_prop_cache()


def remesh(
    state: Mapping[str, Any] | None,
    old: Old,
    new: New,
    lost: Iterable[int] = (),
    *,
    ranks: Mapping[int, int] | None = None,
    own: Iterable[str] | Callable[[str], bool] = (),
    loaded: Mapping[str, Sequence[tuple[Box, torch.Tensor]]] | None = None,
    replicas: Replicas | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[StateOptions],
) -> ReshardedState:
    """Moves the state of a training job from the ranks that had it to those that continue. Records no
    gradient.

    A collective of all ranks of `group`, except for those that are lost: ranks that stay, ranks that leave
    and live, and ranks that join. It is reshard_state_dict for a job whose ranks change.

    Args:
        state: {name: entry}, what this rank holds: DTensors of FSDP2 or tensor parallelism on the previous
            mesh, plain tensors, and what is no tensor (step counts, positions in the data, hyperparameters).
            The process groups of that mesh are not used and may no longer exist. None or {} on ranks that
            join.
        old: layouts of plain tensors that are shards, in the previous rank numbers: {name: place} or a
            function of the name, whose places are a Layout, (Layout, shape), (mesh, placements) or (mesh,
            placements, shape). None as a place, or for `old`: a DTensor has its layout, other tensors are
            copies on every rank that has them.
        new: where each tensor goes, in the present rank numbers: {name: place} or a function of the name,
            which is asked for all that any rank holds. Places are those of reshard_state_dict: (mesh,
            placements), Layout or (Layout, device). In a mapping they may be tensors, which are filled: a
            DTensor, or a plain tensor as a copy on every rank that gives one. A model's new state dict will
            do; what is no tensor in it is left out.
        lost: ranks that are dead or have left with what they held, by their previous numbers; the same on all
            ranks. Their boxes come from copies on ranks that live.
        ranks: {previous rank: rank now} of the ranks that live, where the process group was made again. None
            where ranks kept their numbers.
        own: entries of which each rank has its own, such as the state of a random generator: names, or a
            function of the name. All ranks get that of the lowest present rank that has one. Other entries
            must be the same on the ranks that have them.
        loaded: {name: [(box, tensor)]}, what this rank has read from a checkpoint to replace lost boxes.
            Any rank may have read any box, by the names and boxes of `gone`.
        replicas: the state is that of the newest step whose copies are whole on all ranks that had Replicas
            and live, instead of `state`, `old`, `own` and `loaded`. All of these ranks pass theirs; what
            they hold otherwise is not read. The result has the step as its `version`.
        group: current process group; None for the default one. timeout: of the whole call.
        options: those of reshard_state_dict, without `layouts`. digest is True unless given.

    Returns:
        {name: entry}: what `new` names here, then what is no tensor, from the lowest rank that has it.
        Tensors of `new` are filled and returned.

    Raises:
        LayoutError: on all ranks that call, before a tensor moves: a rank in `lost` that held nothing, that
            `ranks` or `new` have as well, or that calls; a name without destination; no step of which all
            `replicas` have whole copies. Where a box lives on no rank any longer, the field `gone` lists each
            (name, box, previous ranks that had it): load just these from a checkpoint and call again with
            `loaded`.
        PlanMismatchError: shapes, dtypes, layouts, entries or `lost` differ among ranks.
        MeshcastError: copies of a tensor differ among ranks, or what arrived is not what was sent; tensors of
            `new` are then undefined.
        Others as meshcast.reshard.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        # Rank 3 is lost, and rank 1 has a copy of what it held.
        from meshcast import elastic

        then = DeviceMesh("cpu", [[0, 1], [2, 3]])  # two replicas, each in two shards
        state = {"w": distribute_tensor(torch.arange(8.0), then, [Replicate(), Shard(0)]), "step": 7}
        now = DeviceMesh("cpu", [0, 1, 2])
        if dist.get_rank() != 3:
            state = elastic.remesh(state, None, lambda name: (now, [Shard(0)]), lost=[3])
            assert state["w"].full_tensor().tolist() == list(range(8))
            assert state["step"] == 7
    """
    try:
        parent = parent_group(group, OP)
        limit = seconds(timeout, parent.timeout)
        read = read_ranks(lost, ranks, parent.ranks, parent.rank)
        if read.numbers is not None:  # the process group was made again
            forget_meshes()
    except Exception as error:
        raise_refused(error, OP, (), group, timeout)
    deadline = time.monotonic() + limit
    among = conversation(parent, read.silent)
    with called_by(OP, parent.rank):
        more = {"own": own, "loaded": loaded}
        given, step = _given(parent, among, deadline, read, state, old, new, replicas, more, options)
        result = run(parent, among, deadline, given)
        result.version = step
        return result


def _given(
    parent: ParentGroup,
    among: Conversation,
    deadline: float,
    read: Ranks,
    state: Any,
    old: Any,
    new: Any,
    replicas: Replicas | None,
    more: dict[str, Any],
    options: Any,
) -> tuple[Given | Exception, int | None]:
    """Returns the arguments of reshard_state_dict, or what is wrong with those of this rank; and the step of
    the replicas that they are of. All ranks exchange which names they hold: a rank that joins knows none."""
    previous = read.previous(parent.rank)
    dead = [old for _, old in read.lost]
    mine: Given | Exception
    try:
        if "layouts" in options:
            raise LayoutError("layouts are given by `old`")
        held: Any = {} if state is None else state
        if not isinstance(held, Mapping):
            raise LayoutError(f"state must be a mapping by name, found {type(held).__name__}")
        if replicas is None:
            layouts = old_layouts(held, old, previous)
            side = Inventory([name for name, value in held.items() if not is_carried(value)])
        else:
            _check_alone(replicas, held, old, more, previous)
            side = replicas._offer(dead, deadline)
            more["own"] = replicas._own
        maps = _targets(options.get("maps", ()))
        renamed = [_renaming(options.get("rename"))(name) for name in side.held]
        side = side._replace(held=[name for name in renamed if name is not None], copies=copies_of(new))
        mine = Given({str(parent.rank): pack(side)}, None, lost=read.lost)
    except Exception as error:
        mine = error
    texts = run(parent, among, deadline, mine)
    try:
        sides = {rank: unpack(Inventory, texts[str(rank)]) for rank in sorted(map(int, texts))}
        step = _step(sides)
        if step is not None and replicas is not None:
            state, layouts = replicas._taken(step, dead)
        known = dict.fromkeys(name for side in sides.values() for name in side.held)
        copies: dict[str, list[int]] = {}
        for rank, side in sides.items():
            for name in side.copies:
                copies.setdefault(name, []).append(rank)
        where, outs = destinations(new, [*known, *maps], copies)
        idle = {rank for side in sides.values() for rank in side.idle}
        given = Given(
            state,
            where,
            outs,
            layouts=layouts,
            lost=tuple(each for each in read.lost if each[1] not in idle),
            numbers=read.numbers,
            **{"digest": True, **options, **more},
        )
    except Exception as error:
        return error, None
    return given, step


def _check_alone(replicas: Any, held: Any, old: Any, more: Mapping[str, Any], previous: int | None) -> None:
    """Raises LayoutError for replicas that are none, that come with what they stand for, or that are another
    rank's."""
    if not isinstance(replicas, Replicas):
        raise LayoutError(f"replicas {checks.shown(replicas)}: expected Replicas")
    if held or old or more["own"] or more["loaded"]:
        raise LayoutError("replicas stand for state, old, own and loaded; pass None, or no replicas")
    if replicas._rank != previous:
        raise LayoutError(f"the replicas are of rank {replicas._rank}, but this rank was {previous}")


def _step(sides: Mapping[int, Inventory]) -> int | None:
    """Returns the newest step of which all ranks that have replicas have whole copies; None where no rank has
    any. All ranks know the same sides, so all raise the same."""
    steps = {other: side.steps for other, side in sides.items() if side.steps is not None}
    if not steps:
        return None
    without = [other for other, side in sides.items() if side.held and other not in steps]
    if without:
        raise LayoutError(
            f"a state comes from rank {min(without)}, but replicas from rank {min(steps)}; all ranks that "
            "were there give the one or the other"
        )
    raise_gone(list(dict.fromkeys(each for side in sides.values() for each in side.gone)))
    common = set.intersection(*map(set, steps.values()))
    if not common:
        raise LayoutError(
            "no step has whole copies on all ranks: "
            + ", ".join(f"rank {other} has {found or 'none'}" for other, found in steps.items())
        )
    return max(common)


def _targets(maps: Any) -> list[str]:
    """Names that maps make; what is no map is refused later."""
    each = [maps] if isinstance(maps, TensorMap) else list(maps or ())
    return [name for one in each if isinstance(one, TensorMap) for name in one.target_names()]


def _renaming(rename: Any) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    table = rename if isinstance(rename, Mapping) else {}
    return lambda name: table.get(name, name)
