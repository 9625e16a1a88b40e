"""remesh: the state of a training job, from the ranks that had it to the ranks that go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ..errors import LayoutError, MeshcastError
from ..groups.parent import parent_group, seconds
from ..groups.telling import raise_refused
from ..layout import Box
from ..resharding.state_arguments import Given
from ..resharding.state_dict import StateOptions
from ..resharding.state_entries import is_carried
from ..resharding.state_results import ReshardedState
from ..resharding.state_run import Conversation, Prepared, conversation
from ..resharding.state_specs import OP as MOVE
from ..resharding.tensor_map import TensorMap
from .places import OP, New, Old, Ranks, copies_of, destinations, old_layouts, read_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ..groups.parent import ParentGroup

__all__ = ["remesh"]


def remesh(
    state: Mapping[str, Any] | None,
    old: Old,
    new: New,
    lost: Iterable[int] = (),
    *,
    ranks: Mapping[int, int] | None = None,
    own: Iterable[str] | Callable[[str], bool] = (),
    loaded: Mapping[str, Sequence[tuple[Box, torch.Tensor]]] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    **options: Unpack[StateOptions],
) -> ReshardedState:
    """Moves the state of a training job from the ranks that had it to those that go on. Records no gradient.

    A collective of all ranks of `group`, but for those that are lost: ranks that stay, ranks that leave and
    live, and ranks that join. It is reshard_state_dict for a job whose ranks change.

    Args:
        state: {name: entry}, what this rank holds: DTensors of FSDP2 or tensor parallelism on the mesh of
            then, plain tensors, and what is no tensor (step counts, positions in the data, hyperparameters).
            The process groups of the mesh of then are not used and may be gone. None or {} on ranks that
            join.
        old: layouts of plain tensors that are shards, in the rank numbers of then: {name: place} or a
            function of the name, whose places are a Layout, (Layout, shape), (mesh, placements) or (mesh,
            placements, shape). None as a place, or for `old`: a DTensor tells its layout, other tensors are
            copies on every rank that has them.
        new: where each tensor goes, in the rank numbers of now: {name: place} or a function of the name,
            which is asked for all that any rank holds. Places are those of reshard_state_dict: (mesh,
            placements), Layout or (Layout, device). In a mapping they may be tensors, which are filled: a
            DTensor, or a plain tensor as a copy on every rank that gives one. A model's new state dict will
            do; what is no tensor in it is left out.
        lost: ranks that are dead or gone with what they held, by their numbers of then; the same on all
            ranks. What they held comes from copies on ranks that live.
        ranks: {rank of then: rank of now} of the ranks that live, where the process group was made anew. None
            where ranks kept their numbers.
        own: entries of which each rank has its own, such as the state of a random generator: names, or a
            function of the name. All ranks get that of the lowest rank of now that has one. Other entries
            must be alike on the ranks that have them.
        loaded: {name: [(box, tensor)]}, what this rank has read from a checkpoint in place of what is gone.
            Any rank may have read any box, by the names and boxes of `gone`.
        group: process group of now; None for the default one. timeout: of the whole call.
        options: those of reshard_state_dict, without `layouts`. digest is True unless given.

    Returns:
        {name: entry}: what `new` names here, then what is no tensor, from the lowest rank that has it.
        Tensors of `new` are filled and returned.

    Raises:
        LayoutError: on all ranks that call, before a tensor moves: a rank in `lost` that held nothing, that
            `ranks` or `new` have as well, or that calls; a name without destination. Where a box lives on no
            rank any more, the field `gone` lists each (name, box, ranks of then that had it): load just these
            from a checkpoint and call again with `loaded`.
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
    except Exception as error:
        raise_refused(error, OP, (), group, timeout)
    deadline = time.monotonic() + limit
    talk = conversation(parent, read.silent)
    try:
        given = _given(parent, talk, deadline, state, old, new, read, options, own=own, loaded=loaded)
        return _run(parent, talk, deadline, given)
    except MeshcastError as error:
        text = str(error).replace(MOVE, OP)
        error.args = (text if text.startswith(OP) else f"{OP}: {text}",)
        error.op = OP if error.op in (None, MOVE) else error.op
        raise


def _given(
    parent: ParentGroup,
    talk: Conversation,
    deadline: float,
    state: Any,
    old: Any,
    new: Any,
    read: Ranks,
    options: Any,
    **more: Any,
) -> Given | Exception:
    """The arguments of reshard_state_dict, or what is wrong with those of this rank. All ranks have told each
    other which names they hold: a rank that joins knows none."""
    said: Any = {"held": [], "copies": []}
    wrong: Exception | None = None
    maps: list[str] = []
    layouts: dict[str, Any] = {}
    try:
        if "layouts" in options:
            raise LayoutError(f"{OP}: layouts are given by `old`")
        held = {} if state is None else state
        if not isinstance(held, Mapping):
            raise LayoutError(f"{OP}: state must be a mapping by name, found {type(held).__name__}")
        layouts = old_layouts(held, old, read.then(parent.rank))
        maps = _targets(options.get("maps", ()))
        renamed = _renaming(options.get("rename"))
        names = [renamed(name) for name, value in held.items() if not is_carried(value)]
        said = {"held": [name for name in names if name is not None], "copies": copies_of(new)}
    except Exception as error:
        wrong = error
    names_given = wrong or Given({str(parent.rank): said}, None, lost=read.lost)
    told = _run(parent, talk, deadline, names_given)
    try:
        known = dict.fromkeys(name for rank in sorted(told, key=int) for name in told[rank]["held"])
        copies: dict[str, list[int]] = {}
        for rank, theirs in told.items():
            for name in theirs["copies"]:
                copies.setdefault(name, []).append(int(rank))
        where, outs = destinations(new, [*known, *maps], copies)
        return Given(
            state,
            where,
            outs,
            layouts=layouts,
            lost=read.lost,
            numbers=read.numbers,
            **{"digest": True, **options, **more},
        )
    except Exception as error:
        return error


def _run(
    parent: ParentGroup, talk: Conversation, deadline: float, given: Given | Exception
) -> ReshardedState:
    """One call among all ranks. An error in place of arguments is raised here, and told to the others."""
    wrong = given if isinstance(given, Exception) else None
    arguments = Given(None, None) if isinstance(given, Exception) else given
    result = ReshardedState()
    talk.run(Prepared(parent.rank, arguments, None, wrong=wrong), deadline, result)
    return result


def _targets(maps: Any) -> list[str]:
    """Names that maps make; what is no map is refused later."""
    each = [maps] if isinstance(maps, TensorMap) else list(maps or ())
    return [name for one in each if isinstance(one, TensorMap) for name in one.targets]


def _renaming(rename: Any) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    table = rename if isinstance(rename, Mapping) else {}
    return lambda name: table.get(name, name)
