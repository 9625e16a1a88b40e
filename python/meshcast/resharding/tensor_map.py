"""TensorMap: tensors that are joined, cut, stacked or transposed while they travel; declared once, planned as
boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..base import checks
from ..base.checks import Reader
from ..errors import LayoutError

__all__ = ["Block", "TensorMap", "mapped", "maps_of"]

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A map of tensors of the source to the tensors of the destination that they make. Nothing is joined in
    memory: each box travels from where it is to where it belongs.

    Args:
        sources: name of a tensor of the state_dict, or several; a TensorMap without targets stands for what
            it joins.
        targets: name of a tensor of the destinations, or several; a TensorMap without targets stands for what
            it joins, and is cut into these again.
        dim: along which several sources are joined, as torch.cat does, and several targets are cut.
        sizes: of several targets along `dim`; None: equal ones. In a map that is a target, of its parts.
        stack: several sources become slices along a new dimension `dim`, as torch.stack does; or several
            targets are the slices of one source along it.
        groups: each of several sources (or targets) is cut into so many equal parts along `dim`, and the
            parts take turns: first those of the first group, in the order of the names. So are q, k and v
            interleaved by key heads.
        permute: the dimensions of every source in the order in which the target has them, as torch.permute.
            In a map that is a target, of each part in the order in which what it joins has them.

    Maps are the same on every rank. Raises LayoutError for arguments that are wrong by themselves; whether
    they fit the tensors is seen in the call.

    Example::

        qkv = meshcast.TensorMap(["q.weight", "k.weight", "v.weight"], "qkv.weight")
        experts = meshcast.TensorMap([f"experts.{i}.w" for i in range(8)], "experts.w", stack=True)
        turned = meshcast.TensorMap("proj.weight", "proj.kernel", permute=(1, 0))
        back = meshcast.TensorMap("gate_up", ["gate", "up"], sizes=[1024, 1024])
        each = [meshcast.TensorMap([f"experts.{i}.gate", f"experts.{i}.up"]) for i in range(8)]
        there = meshcast.TensorMap(each, "experts.w13", stack=True)
        apart = meshcast.TensorMap("experts.w13", each, stack=True)
    """

    sources: str | TensorMap | Sequence[str | TensorMap]
    targets: str | TensorMap | Sequence[str | TensorMap] = ()
    dim: int = 0
    sizes: Sequence[int] | None = None
    stack: bool = False
    groups: int = 1
    permute: Sequence[int] | None = None

    def __post_init__(self) -> None:
        sources = _listed("sources", self.sources, (str, TensorMap))
        targets = _listed("targets", self.targets, (str, TensorMap))
        if not sources:
            raise LayoutError("TensorMap: sources is empty; name at least one tensor")
        for what, each in [*(("source", s) for s in sources), *(("target", t) for t in targets)]:
            if isinstance(each, TensorMap) and each.targets:
                raise LayoutError(f"TensorMap: {each} is a {what} of another map, and has targets of its own")
            if isinstance(each, TensorMap) and each.sizes is not None and what == "source":
                raise LayoutError(f"TensorMap: {each} is a source of another map; its parts have sizes")
        names = _names(targets)
        if len(set(names)) != len(names):
            raise LayoutError(f"TensorMap: targets {names} name a tensor twice")
        groups = checks.integer("TensorMap: groups", self.groups, 1, 1 << 20)
        if len(sources) > 1 and len(targets) > 1 and (self.stack or groups > 1):
            raise LayoutError("TensorMap: stack and groups need one source or one target")
        if self.stack and groups > 1:
            raise LayoutError("TensorMap: slices of a new dimension take no turns; leave out stack or groups")
        sizes = self.sizes
        if sizes is not None:
            sizes = tuple(
                checks.integer("TensorMap: size", size, 0, checks.MAX_INT64)
                for size in checks.listed("TensorMap: sizes", sizes)
            )
            parts = targets or sources  # without targets it may be a target itself
            if len(sizes) != len(parts) or self.stack:
                raise LayoutError(f"TensorMap: {len(sizes)} sizes for {len(parts)} targets along `dim`")
        permute = self.permute
        if permute is not None:
            permute = tuple(
                checks.integer("TensorMap: permute", dim, 0, checks.MAX_DIMS - 1)
                for dim in checks.listed("TensorMap: permute", permute)
            )
            if sorted(permute) != list(range(len(permute))):
                raise LayoutError(f"TensorMap: permute {permute} does not name every dimension once")
        dim = checks.integer("TensorMap: dim", self.dim, -checks.MAX_DIMS, checks.MAX_DIMS)
        checked = {"sources": sources, "targets": targets, "dim": dim, "sizes": sizes}
        checked |= {"stack": bool(self.stack), "groups": groups, "permute": permute}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _sources(self) -> tuple[str | TensorMap, ...]:
        return self.sources  # type: ignore[return-value]  # of any kind only until it is checked

    def _targets(self) -> tuple[str | TensorMap, ...]:
        return self.targets  # type: ignore[return-value]  # the same

    def names(self) -> list[str]:
        """Names of all sources, also of those of maps in it."""
        return _names(self._sources())

    def target_names(self) -> list[str]:
        """Names of all targets, also of those that maps in it stand for."""
        return _names(self._targets())

    def to_wire(self) -> dict[str, Any]:
        """Returns its form in JSON: what differs from the defaults."""
        given = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        said = {name: value for name, value, default in given if value != default}
        for side in said.keys() & {"sources", "targets"}:
            said[side] = [each.to_wire() if isinstance(each, TensorMap) else each for each in said[side]]
        return said

    @classmethod
    def from_wire(cls, reader: Reader) -> TensorMap:
        """Undoes `to_wire`."""
        said = {each.name: reader.value(each.name) for each in fields(cls) if reader.has(each.name)}
        for side in said.keys() & {"sources", "targets"}:
            said[side] = [
                each if isinstance(each, str) else cls.from_wire(Reader(each, side)) for each in said[side]
            ]
        return cls(**said)


def _names(side: Sequence[str | TensorMap]) -> list[str]:
    return [name for each in side for name in (each.names() if isinstance(each, TensorMap) else [each])]


def _listed(name: str, value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    listed = (value,) if isinstance(value, kinds) else checks.listed(f"TensorMap: {name}", value)
    for each in listed:
        if not isinstance(each, kinds):
            raise LayoutError(f"TensorMap: {name} has {checks.shown(each)}: expected names of tensors")
    return listed


class Block(NamedTuple):
    """A box of a source, and where it lies in something that sources make. axes: for each dimension of the
    source the one that it lies along there; None: a dimension of one element that was removed."""

    source: str
    low: _Shape  # of the box, in the source
    sizes: _Shape  # the same
    axes: tuple[int | None, ...]
    at: _Shape  # of its first element, there

    def clipped(self, dim: int, low: int, high: int) -> Block | None:
        """Its part in [low, high) of a dimension there."""
        if dim not in self.axes:
            return self if low <= self.at[dim] < high else None
        own = self.axes.index(dim)
        begin, end = max(low, self.at[dim]), min(high, self.at[dim] + self.sizes[own])
        if begin >= end:
            return None
        return self._replace(
            low=_with(self.low, own, self.low[own] + begin - self.at[dim]),
            sizes=_with(self.sizes, own, end - begin),
            at=_with(self.at, dim, begin),
        )

    def moved(self, dim: int, by: int) -> Block:
        return self._replace(at=_with(self.at, dim, self.at[dim] + by))

    def without(self, dim: int) -> Block:
        """Returns the block without that dimension, in which it has one element."""
        axes = tuple(None if axis is None or axis == dim else axis - (axis > dim) for axis in self.axes)
        return self._replace(axes=axes, at=self.at[:dim] + self.at[dim + 1 :])

    def beside(self, dim: int, index: int) -> Block:
        """In slice `index` of a new dimension."""
        axes = tuple(None if axis is None else axis + (axis >= dim) for axis in self.axes)
        return self._replace(axes=axes, at=(*self.at[:dim], index, *self.at[dim:]))

    def permuted(self, order: Sequence[int]) -> Block:
        axes = tuple(None if axis is None else order.index(axis) for axis in self.axes)
        return self._replace(axes=axes, at=tuple(self.at[dim] for dim in order))


def mapped(each: TensorMap, shapes: Mapping[str, _Shape]) -> dict[str, tuple[_Shape, list[Block]]]:
    """For each target its shape and the blocks that make it. Raises LayoutError where the map does not fit
    the shapes of the sources."""
    shape, blocks = _joined(each, shapes)
    found: dict[str, tuple[_Shape, list[Block]]] = {}
    _cut(each, each._targets(), shape, blocks, found)
    return found


def _cut(
    each: TensorMap,
    parts: Sequence[str | TensorMap],
    shape: _Shape,
    blocks: list[Block],
    found: dict[str, tuple[_Shape, list[Block]]],
) -> None:
    """Adds to `found` what of a tensor goes into each of the parts that it is cut into."""
    for part, (rest, own) in zip(parts, _pieces(each, len(parts), shape, blocks), strict=True):
        if parts is not each.targets and each.permute is not None:  # a map that is a target: the way back
            if len(rest) != len(each.permute):
                raise _unfit(each, f"permute has {len(each.permute)} dimensions, a part has shape {rest}")
            order = [each.permute.index(dim) for dim in range(len(rest))]
            rest = tuple(rest[dim] for dim in order)
            own = [block.permuted(order) for block in own]
        if isinstance(part, TensorMap):
            _cut(part, part._sources(), rest, own, found)
        else:
            found[part] = rest, own


def _pieces(
    each: TensorMap, count: int, shape: _Shape, blocks: list[Block]
) -> list[tuple[_Shape, list[Block]]]:
    """So many parts along `dim`, or slices of it."""
    slices = each.stack and not _stacks(each)
    if count == 1 and not slices:
        return [(shape, blocks)]
    dim = _dimension(each, len(shape))
    if slices:
        if shape[dim] != count:
            raise _unfit(each, f"{count} slices are named, but there are {shape[dim]} of {shape}")
        rest = shape[:dim] + shape[dim + 1 :]
        return [
            (rest, [part.without(dim) for part in _within(blocks, dim, index, index + 1)])
            for index in range(count)
        ]
    sizes = each.sizes
    if sizes is None:
        if shape[dim] % count:
            raise _unfit(each, f"{shape[dim]} of {shape} cannot be cut into {count} equal parts")
        sizes = (shape[dim] // count,) * count
    if sum(sizes) != shape[dim]:
        raise _unfit(each, f"the sizes add up to {sum(sizes)}, but there are {shape[dim]} of {shape}")
    return [
        (
            _with(shape, dim, size),
            [
                part.moved(dim, to - begin)
                for begin, end, to in places
                for part in _within(blocks, dim, begin, end)
            ],
        )
        for size, places in zip(sizes, _turns(each, sizes), strict=True)
    ]


def _stacks(each: TensorMap) -> bool:
    """Returns whether the sources of a map become slices; else its targets are slices. With one source and
    one target, the source does, unless the target is a map; a map that is a target has no targets, and stands
    for slices."""
    targets = each._targets()
    return each.stack and len(targets) == 1 and (len(each._sources()) > 1 or isinstance(targets[0], str))


def _joined(each: TensorMap, shapes: Mapping[str, _Shape]) -> tuple[_Shape, list[Block]]:
    """Returns the shape and the blocks that the sources of a map make together."""
    items = [_item(source, shapes, each) for source in each._sources()]
    if each.permute is not None:
        for shape, _ in items:
            if len(shape) != len(each.permute):
                raise _unfit(each, f"permute has {len(each.permute)} dimensions, a source has shape {shape}")
        order = each.permute
        items = [
            (tuple(shape[d] for d in order), [block.permuted(order) for block in blocks])
            for shape, blocks in items
        ]
    first = items[0][0]
    slices = each.stack and (not each.targets or _stacks(each))
    if len(items) == 1 and not slices:
        return items[0]
    dim = _dimension(each, len(first) + slices)
    for shape, _ in items[1:]:
        same = shape == first if slices else _with(shape, dim, 0) == _with(first, dim, 0)
        if len(shape) != len(first) or not same:
            raise _unfit(
                each, f"sources of shapes {first} and {shape} cannot be joined along dimension {dim}"
            )
    joined: list[Block] = []
    if slices:
        for index, (_, blocks) in enumerate(items):
            joined += [block.beside(dim, index) for block in blocks]
        return (*first[:dim], len(items), *first[dim:]), joined
    sizes = [shape[dim] for shape, _ in items]
    for (_, blocks), places in zip(items, _turns(each, sizes), strict=True):
        for to, end, begin in places:
            joined += [part.moved(dim, to - begin) for part in _within(blocks, dim, begin, begin + end - to)]
    return _with(first, dim, sum(sizes)), joined


def _item(
    source: str | TensorMap, shapes: Mapping[str, _Shape], each: TensorMap
) -> tuple[_Shape, list[Block]]:
    if isinstance(source, TensorMap):
        return _joined(source, shapes)
    if source not in shapes:
        raise _unfit(each, f"no rank's state_dict has the key {source!r}")
    shape = tuple(shapes[source])
    zeros = (0,) * len(shape)
    return shape, [Block(source, zeros, shape, tuple(range(len(shape))), zeros)]


def _turns(each: TensorMap, sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each of the parts that lie along one dimension: [(begin, end, begin in the part)]."""
    for size in sizes:
        if size % each.groups:
            raise _unfit(each, f"{size} elements cannot be cut into {each.groups} groups")
    places: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    at = 0
    for group in range(each.groups):
        for part, size in enumerate(sizes):
            step = size // each.groups
            if step:
                places[part].append((at, at + step, group * step))
            at += step
    return places


def _within(blocks: Sequence[Block], dim: int, low: int, high: int) -> list[Block]:
    clipped = (block.clipped(dim, low, high) for block in blocks)
    return [block for block in clipped if block is not None]


def _dimension(each: TensorMap, ndim: int) -> int:
    if not -ndim <= each.dim < ndim:
        raise _unfit(each, f"there is no dimension {each.dim} of {ndim}")
    return each.dim % ndim


def _with(values: _Shape, index: int, value: int) -> _Shape:
    return (*values[:index], value, *values[index + 1 :])


def _unfit(each: TensorMap, reason: str) -> LayoutError:
    return LayoutError(f"the map of {each.names()[:4]} to {each.target_names()[:4]} does not fit: {reason}")


def maps_of(given: Any) -> tuple[TensorMap, ...]:
    """Reads one map or several. Raises LayoutError where two make one tensor."""
    maps = (given,) if isinstance(given, TensorMap) else checks.listed("maps", given or ())
    made: set[str] = set()
    for each in maps:
        if not isinstance(each, TensorMap):
            raise LayoutError(f"maps has {checks.shown(each)}: expected a meshcast.TensorMap")
        for name in each.target_names():
            if name in made:
                raise LayoutError(f"two maps make {name!r}")
            made.add(name)
        if not each.targets:
            raise LayoutError(f"{each} has no targets")
    return maps
