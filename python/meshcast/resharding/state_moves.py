"""The moves of a call of reshard_state_dict: agreed on by all ranks from what each of them said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..base import checks
from ..errors import LayoutError
from ..layout import Layout
from ..transfers.medium import DeviceTypes, device_types_of
from .meshes import Gone, gone, raise_gone
from .state_layouts import check_blocks, check_holds, mapped_layout, positive
from .state_sources import Goal, Origin, Said
from .state_specs import OP, Side
from .tensor_map import Block, TensorMap, mapped

__all__ = ["Agreed", "Move", "Target", "agree"]


@dataclass(frozen=True)
class Move:
    """The part of one source that goes into one target. shape: of the source; dst: what each rank gets of it,
    in the source's coordinates, and where that lies in the local tensor of the target. through_host: the
    transfer is between tensors on the host; those on GPUs are copied by torch, before and after."""

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    result_dtype: torch.dtype
    src: Layout
    dst: Layout
    device_types: DeviceTypes
    through_host: bool = False


@dataclass
class Target:
    """A tensor that arrives. alias: the name of another that it is, as at the source."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    alias: str | None = None
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks. values: destinations of entries that are no tensors. own: entries of which each
    rank has its own. twins: sources that several meshes hold, whose values have to be equal."""

    targets: dict[str, Target]
    values: frozenset[str]
    own: frozenset[str] = frozenset()
    twins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def moves(self) -> list[Move]:
        return [move for target in self.targets.values() for move in target.moves]


def agree(sides: Mapping[int, Side], maps: Sequence[TensorMap], rank: int) -> Agreed:
    """Returns the moves that all ranks agree on. Every rank has the same sides, so that all raise the same
    error: PlanMismatchError where ranks contradict each other, LayoutError where a name is missing, tensors
    do not fit, or a rank has no GPU where it needs one."""
    said = Said(sides, rank)
    said.check_options()
    said.check_lost()
    names = said.names()
    carried = {name for side in sides.values() for name in side.carried}
    values = frozenset(name for name in names if name in carried and not said.holders(name))
    if not names and not carried:
        raise LayoutError(
            f"{OP}: no destinations; give (mesh, placements) for at least one name, where it is received",
            rank=rank,
            op=OP,
        )
    goals = {name: said.goal(name) for name in names if name not in values}
    makers = {target: each for each in maps for target in each.target_names()}
    used: set[str] = set()
    made: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    for name in goals:
        if name in makers:
            if name not in made:
                made |= mapped(makers[name], _shapes(makers[name], said))
            used.update(makers[name].names())
        else:
            said.check_asked(name)
            used.add(name)
    targets = {}
    missing: dict[Gone, None] = {}
    for name, goal in goals.items():
        targets[name] = _target(name, goal, made.get(name), said, missing)
    raise_gone(list(missing), OP, rank)
    said.check_extra(used)
    _tie(targets, said, makers)
    _check_scales(targets, said)
    twins = {name: said.origin(name) for name in sorted(used) if said.origin(name).twins}
    return Agreed(targets, values, said.own, twins)


def _shapes(each: TensorMap, said: Said) -> dict[str, tuple[int, ...]]:
    return {name: said.origin(name).shape for name in each.names() if said.holders(name)}


def _target(
    name: str,
    goal: Goal,
    made: tuple[tuple[int, ...], list[Block]] | None,
    said: Said,
    missing: dict[Gone, None],
) -> Target:
    """missing: gets what it needs and no rank holds any more."""
    if made is None:
        origin = said.origin(name)
        layout = positive(goal.layout, len(origin.shape))
        dtype = _result_dtype(name, [origin], origin.shape, goal, layout, said)
        target = Target(name, origin.shape, dtype, layout, goal.device_type)
        if not _lives(name, origin, layout, said, missing):
            return target
        check_holds(name, origin.shape, origin.layout, layout)
        types = device_types_of(origin.device_type, goal.device_type, OP)
        _check_gpus(name, origin.layout, layout, types, said)
        target.moves.append(Move(name, name, origin.shape, origin.dtype, dtype, origin.layout, layout, types))
        return target
    shape, blocks = made
    layout = positive(goal.layout, len(shape))
    layout.shards(shape)  # raises where it does not fit
    by_source: dict[str, list[Block]] = {}
    for block in blocks:
        by_source.setdefault(block.source, []).append(block)
    origins = {source: said.origin(source) for source in by_source}
    dtype = _result_dtype(name, list(origins.values()), shape, goal, layout, said)
    target = Target(name, shape, dtype, layout, goal.device_type)
    devices = {origin.device_type for origin in origins.values()} | {goal.device_type}
    for source, parts in by_source.items():
        origin = origins[source]
        dst = mapped_layout(parts, shape, layout, len(origin.shape))
        if dst is None or not _lives(source, origin, dst, said, missing):
            continue
        check_holds(source, origin.shape, origin.layout, dst)
        types = device_types_of(origin.device_type, goal.device_type, OP)
        _check_gpus(name, origin.layout, layout, types, said)
        through_host = len(devices) > 1
        target.moves.append(
            Move(
                source,
                name,
                origin.shape,
                origin.dtype,
                dtype,
                origin.layout,
                dst,
                ("cpu", "cpu") if through_host else types,
                through_host,
            )
        )
    return target


def _lives(name: str, origin: Origin, wanted: Layout, said: Said, missing: dict[Gone, None]) -> bool:
    """Returns whether living ranks hold all that is wanted of a source, and anything of it at all."""
    if origin.had is None:
        return True
    found = gone(name, origin.shape, origin.had, said.lost, wanted)
    missing.update(dict.fromkeys(found))
    return not found and origin.layout is not origin.had


def _result_dtype(
    name: str, origins: Sequence[Origin], shape: tuple[int, ...], goal: Goal, layout: Layout, said: Said
) -> torch.dtype:
    """Returns the dtype of a result: the one asked for by name, or for all floating-point tensors; else that
    of the outputs where given, else that of the source."""
    rank = said.rank
    kinds = {origin.dtype for origin in origins}
    dtype = origins[0].dtype
    floating = all(kind.is_floating_point for kind in kinds)
    named = goal.dtype if floating or not goal.floats else None
    asked = named or (said.first.options["dtype"] if floating else None)
    result = dtype if asked is None else checks.dtype(asked)
    given = {other: side.outs[name] for other, side in said.sides.items() if name in side.outs}
    for index, (other, (out_shape, out_name, plain)) in enumerate(given.items()):
        out_dtype = checks.dtype(out_name)
        if index == 0 and asked is None and out_dtype.is_floating_point == dtype.is_floating_point:
            result = out_dtype
        expected = layout.local_shapes(shape)[other] if plain else shape
        if out_dtype != result or out_shape != expected:
            raise LayoutError(
                f"{OP}: the output of {name!r} on rank {other} has dtype {out_name} and shape {out_shape}; "
                f"expected {checks.dtype_name(result)} and {expected}",
                rank=rank,
                op=OP,
            )
    if asked is None and len(kinds) > 1 and not given:
        raise LayoutError(
            f"{OP}: {name!r} is made of tensors of unlike dtypes, {sorted(map(str, kinds))}; say which it "
            "gets (dtype=)",
            rank=rank,
            op=OP,
        )
    for kind in kinds:
        if result != kind and not (result.is_floating_point and kind.is_floating_point):
            raise LayoutError(
                f"{OP}: {name!r} is {kind}, its output {result}; only floating-point tensors are cast",
                rank=rank,
                op=OP,
            )
    return result


def _check_gpus(name: str, src: Layout, dst: Layout, types: DeviceTypes, said: Said) -> None:
    """Raises LayoutError where one of the tensor's ranks cannot use the GPU that it should be on."""
    for layout, device in zip((src, dst), types, strict=True):
        for other in layout.ranks if device == "cuda" else ():
            reason = said.sides[other].obstacles[types != ("cuda", "cuda")]
            if reason:
                raise LayoutError(
                    f"{OP}: {name!r} is to be on cuda on rank {other}, but there {reason}",
                    rank=said.rank,
                    peer=other,
                    op=OP,
                )


def _tie(targets: dict[str, Target], said: Said, makers: Mapping[str, TensorMap]) -> None:
    """Finds targets that are tied at the source and can be at the destination: they travel once. Raises
    LayoutError for outputs that are one tensor where the sources are not."""
    if not any(side.ties or side.out_ties for side in said.sides.values()):
        return
    for name, target in targets.items():
        holders = [rank for rank in said.holders(name) if rank in said.origin(name).layout.ranks]
        earlier = {said.sides[rank].ties.get(name) for rank in holders}
        tied = next(iter(earlier)) if len(earlier) == 1 else None
        other = targets.get(tied) if tied is not None else None
        if other is None or name in makers or tied in makers:
            continue
        same = (target.layout, target.dtype, target.device_type) == (
            other.layout,
            other.dtype,
            other.device_type,
        )
        if same and all(_outputs_agree(side, name, other.name) for side in said.sides.values()):
            target.alias = other.name
            target.moves.clear()
    for rank, side in said.sides.items():
        for name, earlier_name in side.out_ties.items():
            if _root(targets, name) != _root(targets, earlier_name):
                raise LayoutError(
                    f"{OP}: the outputs {earlier_name!r} and {name!r} share memory on rank {rank}, but the "
                    "tensors are not one at their source; give each its own",
                    rank=said.rank,
                    op=OP,
                )


def _root(targets: Mapping[str, Target], name: str) -> str:
    return targets[name].alias or name


def _outputs_agree(side: Side, name: str, other: str) -> bool:
    if (name in side.outs) != (other in side.outs):
        return False
    return name not in side.outs or side.out_ties.get(name, name) == side.out_ties.get(other, other)


def _check_scales(targets: Mapping[str, Target], said: Said) -> None:
    for name, (scale, block) in said.first.scales.items():
        chosen = any(side.selects for side in said.sides.values())
        if chosen and name not in targets and scale not in targets:
            continue
        for each in (name, scale):
            if each not in targets:
                raise LayoutError(
                    f"{OP}: {name!r} and its scales {scale!r} travel together, but no destination is given "
                    f"for {each!r}",
                    rank=said.rank,
                    op=OP,
                )
        tensor, scales = targets[name], targets[scale]
        check_blocks(name, scale, block, (tensor.shape, tensor.layout), (scales.shape, scales.layout))
