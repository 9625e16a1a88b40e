"""Layouts: which boxes of a global tensor each rank holds. The rules are DTensor's."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import checks
from .base.boxes import Box, HeldBoxes, held_in_order, read_boxes, read_held
from .base.checks import Reader, typed_arguments
from .errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from . import _C

__all__ = ["Box", "Layout"]

# (kind, dim, split factor, reduce op): a torch placement for the planner.
_Placement = tuple[str, int, int, str]
_REPLICATE: _Placement = ("replicate", 0, 1, "")

_MAX_MESH_DIMS = 5
_DIMS = (-(1 << 31), (1 << 31) - 1)  # valid in a placement; the tensor's own are checked with its shape
_MAX_RANKS = 1 << 20  # a mesh above this is a typing error; nothing is allocated for it
_REDUCE_OPS = ("sum", "avg", "min", "max", "product")
# Which parts of a _Placement its JSON form has, by kind.
_WIRE_FIELDS = {"replicate": (), "shard": (1,), "strided_shard": (1, 2), "partial": (3,)}
_MESH = re.compile(r"(?P<mesh>[0-9]{1,7}(?:x[0-9]{1,7})*)(?:@(?P<first>[0-9]{1,7}))?:(?P<rest>.*)", re.DOTALL)
_DIMENSIONS = re.compile(r"(?:R|S[0-9]+)*")  # of the tensor
_PLACEMENT = re.compile(
    r"\s*(?:(?P<replicate>Replicate(?:\(\))?(?![\w(]))|Shard\((?:dim=)?(?P<shard>-?[0-9]{1,9})\)"
    r"|(?P<partial>Partial)\([\"']?(?P<op>[a-z]*)[\"']?\)"
    r"|_StridedShard\((?:dim=)?(?P<strided>-?[0-9]{1,9}), ?(?:split_factor|sf)=(?P<factor>[0-9]{1,18})\))"
    r"\s*(?:,|$)"
)
_TORCH_WORDS = re.compile(r"[a-z]{2}|[(\[]")  # in no text of the notation by tensor dimension
_NOTATION_HELP = (
    "allowed: <mesh>[@first_rank]: and a placement for each mesh dimension, for example "
    "2x4:Shard(0),Replicate() or 4@8:Partial(sum); or a letter for each tensor dimension, R or S with "
    "the mesh dimensions that shard it: 2x4:S1R shards tensor dimension 0 over mesh dimension 1, in "
    "torch's words 2x4:Replicate(),Shard(0)"
)


class Layout:
    """A mesh of global ranks and one placement for each of its dimensions.

    Args:
        mesh: nested list or integer tensor of global ranks, or a `DeviceMesh`; 1 to 5 dimensions, every rank
            once.
        placements: one per mesh dimension: `Shard(d)`, `Replicate()`, `Partial(op)` or `_StridedShard` of
            torch.distributed.tensor. They apply left to right; a negative `d` counts from the last tensor
            dimension.

    Layouts are immutable, compare and hash by value, and can be pickled. `from_boxes` makes those that
    placements cannot say.

    Raises:
        LayoutError: naming the rank, mesh or placement that is wrong and what is allowed.

    Example::

        grid = meshcast.Layout([[0, 1], [2, 3]], [Shard(0), Replicate()])
        assert grid.local_shapes((5, 2)) == {0: (3, 2), 1: (3, 2), 2: (2, 2), 3: (2, 2)}
        assert grid.shards((5, 2))[3] == [((3, 5), (0, 2))]
        assert meshcast.Layout.parse("2x2:S0R").local_shapes((5, 2)) == grid.local_shapes((5, 2))
    """

    __slots__ = ("__dict__", "_hash", "_held", "_mesh_shape", "_ndim", "_placements", "_ranks")

    @typed_arguments()
    def __init__(self, mesh: Any, placements: Sequence[Placement]) -> None:
        mesh_shape, ranks = _read_mesh(mesh)
        if isinstance(placements, str) or not isinstance(placements, Iterable):
            raise LayoutError(
                f"placements {checks.shown(placements)}: expected a sequence with one placement per mesh "
                "dimension"
            )
        self._set(mesh_shape, ranks, tuple(_read_placement(i, p) for i, p in enumerate(placements)))

    def _set(
        self,
        mesh_shape: tuple[int, ...],
        ranks: Iterable[int] | bytes,
        placements: tuple[_Placement, ...],
        ndim: int | None = None,
        held: tuple[HeldBoxes, ...] = (),
    ) -> None:
        packed = array("i", ranks)
        if not 1 <= len(mesh_shape) <= _MAX_MESH_DIMS:
            raise LayoutError(f"a mesh of {len(mesh_shape)} dimensions: allowed are 1 to {_MAX_MESH_DIMS}")
        if len(held) != (len(packed) if held else 0) or (held and (placements or len(mesh_shape) > 1)):
            raise LayoutError("a layout by boxes has a list of boxes for each rank, and no placements")
        if not held and len(placements) != len(mesh_shape):
            raise LayoutError(
                f"{len(placements)} placements for a mesh of {len(mesh_shape)} dimensions "
                f"({'x'.join(map(str, mesh_shape))}): give one per mesh dimension"
            )
        self._mesh_shape = mesh_shape
        self._ranks = packed.tobytes()
        self._placements = placements
        self._ndim = ndim  # tensor dimensions, where the notation or boxes fixed them
        self._held = held  # the boxes that each rank holds; else empty
        self._hash = hash((mesh_shape, self._ranks, placements, ndim, held))

    @classmethod
    @typed_arguments()
    def from_boxes(cls, boxes: Mapping[int, Sequence[Box]]) -> Layout:
        """A layout that says box by box what each rank holds: heads, segments, interleaved rows.

        Args:
            boxes: {rank: [((lo, hi), ...), ...]}, a half-open interval for each tensor dimension. Boxes of
                one rank do not overlap. Boxes of several ranks may: those ranks then hold copies. Elements
                that no rank holds can be asked of no source.

        The local tensor of a rank holds its boxes in the order given. A single box is the local tensor.
        Several that agree in all but one dimension are joined along it, as torch.cat does. Others lie one
        after the other in a tensor of one dimension, each row-major. A rank without boxes has an empty one.

        Raises:
            LayoutError: naming the rank and the box: overlaps inside a rank, bounds that are no (lo, hi),
                different numbers of dimensions; and, once a shape is known, a box outside of it.

        Example: rows of 4 query heads and 2 key heads of size 8, fused, over two ranks::

            qk = meshcast.Layout.from_boxes({
                0: [((0, 16), (0, 64)), ((32, 40), (0, 64))],
                1: [((16, 32), (0, 64)), ((40, 48), (0, 64))],
            })
            assert qk.local_shapes((48, 64)) == {0: (24, 64), 1: (24, 64)}
        """
        ndim, read = read_boxes(boxes)
        return cls._of_held(tuple(read), tuple(held_in_order(each, ndim) for each in read.values()), ndim)

    @classmethod
    def _of_held(cls, ranks: Sequence[int], held: tuple[HeldBoxes, ...], ndim: int) -> Layout:
        """A layout by boxes that lie anywhere in the local tensors."""
        return _rebuild((len(ranks),), ranks, (), ndim, held)

    @property
    def by_boxes(self) -> bool:
        """True for a layout from `from_boxes`; it has no placements."""
        return bool(self._held)

    @typed_arguments()
    def pieces(self, shape: Sequence[int]) -> dict[int, HeldBoxes]:
        """Returns what each rank holds of a tensor of `shape`: its local shape, and where each box lies in
        it."""
        sizes = checks.shape(shape)
        if self._held:
            self._core(sizes).shards(sizes)  # checks them against the shape
            return dict(zip(self.ranks, self._held, strict=True))
        return {
            rank: (local, tuple((box, at, (), ()) for box, at in found))
            for rank, local, found in self._core(sizes).shards(sizes)
        }

    @classmethod
    def parse(cls, text: str, first_rank: int = 0) -> Layout:
        """Reads a layout from text, for example "2x4:Shard(0),Replicate()" or "4@8:Shard(1)".

        Before the colon is the mesh, whose ranks count up in row-major order from `first_rank`, or from the
        number after @. After it is a placement for each mesh dimension, in torch's words: ``Shard(d)``,
        ``Replicate()``, ``Partial()``, ``Partial(max)``, ``_StridedShard(d, split_factor=n)``. The brackets
        and ``dim=`` that Python prints of a tuple of them are read too.

        The notation of arXiv 2211.05322 is read too: for each *tensor* dimension R (not sharded) or S with
        the mesh dimensions that shard it. "2x4:S0RR" is "2x4:Shard(0),Replicate()" for tensors of three
        dimensions, and "2x4:RS01" is "2x4:Shard(1),Shard(1)" for those of two.

        Raises:
            LayoutError: text that cannot be read, with what is allowed.

        Example::

            layout = meshcast.Layout.parse("2x2@4:Shard(0),Replicate()")
            assert layout == meshcast.Layout([[4, 5], [6, 7]], [Shard(0), Replicate()])
        """
        found = _MESH.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise LayoutError(f"layout {checks.shown(text)} cannot be read; {_NOTATION_HELP}")
        mesh_shape = tuple(int(n) for n in found["mesh"].split("x"))
        first = (
            int(found["first"])
            if found["first"] is not None
            else checks.integer("first_rank", first_rank, 0, _MAX_RANKS)
        )
        if len(mesh_shape) > _MAX_MESH_DIMS:
            raise LayoutError(
                f"layout {checks.shown(text)}: {len(mesh_shape)} mesh dimensions; "
                f"allowed are 1 to {_MAX_MESH_DIMS}"
            )
        size = math.prod(mesh_shape)
        if not 1 <= size <= _MAX_RANKS:
            raise LayoutError(
                f"layout {checks.shown(text)}: a mesh of {size} ranks; allowed are 1 to {_MAX_RANKS}"
            )
        ranks = range(first, first + size)
        if _TORCH_WORDS.search(found["rest"]):
            return _rebuild(mesh_shape, ranks, _read_placements(text, found["rest"]))
        placements, ndim = _read_dimensions(text, found["rest"], len(mesh_shape))
        return _rebuild(mesh_shape, ranks, placements, ndim)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in row-major mesh order; ascending in a layout by boxes."""
        return tuple(memoryview(self._ranks).cast("i"))

    @cached_property
    def _max_rank(self) -> int:
        return max(self.ranks)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Size of each mesh dimension."""
        return self._mesh_shape

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements as torch.distributed.tensor objects, one per mesh dimension; none by boxes."""
        return tuple(_torch_placement(p) for p in self._placements)

    @property
    def placement_texts(self) -> tuple[str, ...]:
        """The placements as text, without importing torch.distributed.tensor; by boxes: how many there
        are."""
        if self._held:
            return (self._boxes_text(),)
        return tuple(map(_text, self._placements))

    @property
    def has_partial(self) -> bool:
        """True if values are pending reduction over some mesh dimension."""
        return any(p[0] == "partial" for p in self._placements)

    @property
    def reduce_ops(self) -> frozenset[str]:
        """The operations of its Partial placements."""
        return frozenset(p[3] for p in self._placements if p[0] == "partial")

    @typed_arguments()
    def shards(self, shape: Sequence[int]) -> dict[int, list[Box]]:
        """Boxes that each rank holds of a tensor of `shape`, in the order in which its local tensor holds
        them.

        A rank has several boxes only under `_StridedShard` and `from_boxes`, and none if its shard is empty.
        Uneven sizes follow torch.chunk.
        """
        sizes = checks.shape(shape)
        return {rank: [box for box, _ in pieces] for rank, _, pieces in self._core(sizes).shards(sizes)}

    @typed_arguments()
    def local_shapes(self, shape: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Shape of each rank's local tensor; an empty shard has a zero in it."""
        sizes = checks.shape(shape)
        return {rank: local for rank, local, _ in self._core(sizes).shards(sizes)}

    def to_wire(self) -> dict[str, Any]:
        """The JSON form: {"mesh_shape": [...], "ranks": [...], "placements": [["shard", 0], ["replicate"],
        ...]}, and "ndim" where the notation fixed it. By boxes: no placements, "ndim", and "held", for each
        rank its local shape and its boxes, each with its place there."""
        wire: dict[str, Any] = {
            "mesh_shape": list(self._mesh_shape),
            "ranks": list(self.ranks),
            "placements": [[p[0], *(p[at] for at in _WIRE_FIELDS[p[0]])] for p in self._placements],
        }
        if self._held:
            wire["held"] = [[list(local), _lists(pieces)] for local, pieces in self._held]
        return wire if self._ndim is None else wire | {"ndim": self._ndim}

    @classmethod
    def from_wire(cls, reader: Reader) -> Layout:
        """Makes a layout from what to_wire() made. Raises LayoutError naming the field that is wrong."""
        mesh_shape = tuple(reader.integers("mesh_shape", 1, _MAX_RANKS))
        ranks = reader.integers("ranks", 0, (1 << 31) - 1)
        if math.prod(mesh_shape) != len(ranks):
            raise LayoutError(
                f"{reader.where}: {len(ranks)} ranks for a mesh of {'x'.join(map(str, mesh_shape))}"
            )
        if len(set(ranks)) != len(ranks):
            raise LayoutError(f"{reader.where}.ranks: a rank appears twice")
        placements = tuple(
            _placement_of_wire(f"{reader.where}.placements[{i}]", p)
            for i, p in enumerate(reader.items("placements"))
        )
        held: tuple[HeldBoxes, ...] = ()
        if reader.has("held"):
            held = tuple(
                read_held(f"{reader.where}.held[{i}]", value) for i, value in enumerate(reader.items("held"))
            )
        ndim = reader.integer("ndim", 0, checks.MAX_DIMS) if held or reader.has("ndim") else None
        reader.finish()
        return _rebuild(mesh_shape, ranks, placements, ndim, held)

    def _core(self, shape: Sequence[int]) -> _C.Layout:
        """The C++ layout for tensors of as many dimensions as `shape`: negative dimensions resolved, all in
        range."""
        ndim = len(shape)
        cores: dict[int, _C.Layout] = self.__dict__.setdefault("_cores", {})
        core = cores.get(ndim)
        if core is None:
            from . import _C

            if self._ndim is not None and ndim != self._ndim:
                each = "" if self._held else "; the notation of S and R has a letter for each of them"
                raise LayoutError(
                    f"{self} describes tensors of {self._ndim} dimensions, but the shape is "
                    f"{tuple(shape)}{each}"
                )
            resolved = [self._resolve(i, p, ndim) for i, p in enumerate(self._placements)]
            core = cores[ndim] = _C.Layout(list(self._mesh_shape), self._ranks, resolved, list(self._held))
        return core

    def _resolve(self, index: int, placement: _Placement, ndim: int) -> _Placement:
        kind, dim, split_factor, op = placement
        if kind not in ("shard", "strided_shard"):
            return placement
        if not -ndim <= dim < ndim:
            allowed = (
                f"allowed are {-ndim} to {ndim - 1}" if ndim else "a scalar can only be replicated or partial"
            )
            raise LayoutError(
                f"placement {index}, {_text(placement)}: the tensor has {ndim} dimensions; {allowed}"
            )
        return kind, dim % ndim, split_factor, op

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return (
            self._hash == other._hash
            and self._ranks == other._ranks
            and self._mesh_shape == other._mesh_shape
            and self._placements == other._placements
            and self._ndim == other._ndim
            and self._held == other._held
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        ranks = self.ranks
        if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            listed = f"{ranks[0]}..{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        elif len(ranks) <= 16:
            listed = ",".join(map(str, ranks))
        else:
            listed = f"{','.join(map(str, ranks[:8]))},... {len(ranks)} ranks"
        if self._held:
            return f"Layout({self._boxes_text()} on ranks [{listed}])"
        mesh = "x".join(map(str, self._mesh_shape))
        return f"Layout({mesh} ranks [{listed}], ({', '.join(self.placement_texts)}))"

    def _boxes_text(self) -> str:
        count = sum(len(pieces) for _, pieces in self._held)
        return f"{count} box{'es' * (count != 1)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._mesh_shape, self._ranks, self._placements, self._ndim, self._held)


def _rebuild(
    mesh_shape: tuple[int, ...],
    ranks: Iterable[int] | bytes,
    placements: tuple[_Placement, ...],
    ndim: int | None = None,
    held: tuple[HeldBoxes, ...] = (),
) -> Layout:
    layout = Layout.__new__(Layout)
    layout._set(mesh_shape, ranks, placements, ndim, held)
    return layout


def on_ranks(layout: Layout, ranks: Sequence[int]) -> Layout:
    """The same layout on other ranks, in the order of those that it has."""
    return _rebuild(layout._mesh_shape, ranks, layout._placements, layout._ndim, layout._held)


def _lists(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _read_mesh(mesh: Any) -> tuple[tuple[int, ...], list[int]]:
    """Shape and ranks of a nested list, tensor, array or DeviceMesh."""
    values = mesh.mesh if hasattr(mesh, "mesh_dim_names") else mesh  # a DeviceMesh keeps its ranks in .mesh
    if hasattr(values, "tolist"):
        values = values.tolist()
    shape: list[int] = []
    level = [values]
    # Level by level, so that a ragged or endlessly nested list is found without recursion.
    while isinstance(level[0], list | tuple):
        if len(shape) == _MAX_MESH_DIMS:
            raise LayoutError(
                f"a mesh of more than {_MAX_MESH_DIMS} dimensions: allowed are 1 to {_MAX_MESH_DIMS}"
            )
        size = len(level[0])
        if size == 0:
            raise LayoutError("the mesh has no ranks: give at least one")
        for row in level:
            if not isinstance(row, list | tuple) or len(row) != size:
                raise LayoutError(f"the mesh is ragged: {checks.shown(row)} is next to rows of {size}")
        shape.append(size)
        level = [item for row in level for item in row]
    if not shape:
        raise LayoutError(
            f"mesh {checks.shown(mesh)}: expected a nested list or tensor of global ranks, or a DeviceMesh"
        )
    if len(level) > _MAX_RANKS:
        raise LayoutError(f"a mesh of {len(level)} ranks; allowed are 1 to {_MAX_RANKS}")
    ranks = [checks.integer("mesh rank", rank, 0, (1 << 31) - 1) for rank in level]
    if len(set(ranks)) != len(ranks):
        seen: set[int] = set()
        twice = next(rank for rank in ranks if rank in seen or seen.add(rank))  # type: ignore[func-returns-value]
        raise LayoutError(f"rank {twice} appears twice in the mesh: every rank may appear once")
    return tuple(shape), ranks


def _read_placement(index: int, placement: Any) -> _Placement:
    # The holder of a placement object has imported torch.distributed.tensor already, so this costs a lookup.
    from torch.distributed.tensor import placement_types as torch_types

    if isinstance(placement, torch_types._StridedShard):
        where = f"placement {index}, _StridedShard"
        split_factor = checks.integer(f"{where}: split_factor", placement.split_factor, 1, checks.MAX_INT64)
        return "strided_shard", checks.integer(where, placement.dim, *_DIMS), split_factor, ""
    if isinstance(placement, torch_types.Shard):
        return "shard", checks.integer(f"placement {index}, Shard", placement.dim, *_DIMS), 1, ""
    if isinstance(placement, torch_types.Replicate):
        return _REPLICATE
    if type(placement) is torch_types.Partial:
        if placement.reduce_op not in _REDUCE_OPS:
            raise LayoutError(
                f"placement {index}, Partial({placement.reduce_op!r}): allowed are {', '.join(_REDUCE_OPS)}"
            )
        return "partial", 0, 1, placement.reduce_op
    raise LayoutError(
        f"placement {index}, {checks.shown(placement)}: "
        "allowed are Shard(dim), Replicate(), Partial(op) and _StridedShard"
    )


def _read_placements(text: str, rest: str) -> tuple[_Placement, ...]:
    """The placements that are written in `rest`, which is a part of `text`; also in the brackets that Python
    prints around a list or tuple of them."""
    rest = rest.strip()
    if rest[:1] + rest[-1:] in ("[]", "()"):
        rest = rest[1:-1].strip()
    placements: list[_Placement] = []
    at = 0
    while at < len(rest):
        found = _PLACEMENT.match(rest, at)
        op = found["op"] or "sum" if found else ""
        if found is None or (found["partial"] and op not in _REDUCE_OPS):
            raise LayoutError(
                f"layout {checks.shown(text)}: {checks.shown(rest[at:].strip())} is no list of Shard(dim), "
                f"Replicate(), Partial(op) with op one of {', '.join(_REDUCE_OPS)}, or _StridedShard(dim, "
                "split_factor=n); write one for each mesh dimension, for example 2x4:Shard(0),Replicate()"
            )
        if found["replicate"]:
            placements.append(_REPLICATE)
        elif found["partial"]:
            placements.append(("partial", 0, 1, op))
        elif found["shard"]:
            placements.append(("shard", int(found["shard"]), 1, ""))
        else:
            factor = checks.integer("split_factor", int(found["factor"]), 1, checks.MAX_INT64)
            placements.append(("strided_shard", int(found["strided"]), factor, ""))
        at = found.end()
    return tuple(placements)


def _read_dimensions(text: str, rest: str, mesh_dims: int) -> tuple[tuple[_Placement, ...], int]:
    """Returns the placements that `rest`, which is a part of `text`, says by tensor dimension, and how many
    dimensions there are."""
    if _DIMENSIONS.fullmatch(rest) is None:
        raise LayoutError(f"layout {checks.shown(text)} cannot be read; {_NOTATION_HELP}")
    dims = re.findall(r"R|S[0-9]+", rest)
    if len(dims) > checks.MAX_DIMS:
        raise LayoutError(
            f"layout {checks.shown(text)}: {len(dims)} tensor dimensions; allowed are 0 to {checks.MAX_DIMS}"
        )
    placements = [_REPLICATE] * mesh_dims
    for dim, letters in enumerate(dims):
        axes = [int(digit) for digit in letters[1:]]
        if axes != sorted(axes):
            raise LayoutError(
                f"layout {text!r}: {letters} lists mesh axes out of order; write them ascending, "
                "or build the Layout with _StridedShard for the other order"
            )
        for axis in axes:
            if axis >= mesh_dims:
                raise LayoutError(
                    f"layout {text!r}: {letters} names mesh axis {axis}; allowed are 0 to {mesh_dims - 1}"
                )
            if placements[axis] != _REPLICATE:
                raise LayoutError(
                    f"layout {text!r}: mesh axis {axis} shards twice; every axis may appear once"
                )
            placements[axis] = ("shard", dim, 1, "")
    return tuple(placements), len(dims)


def _placement_of_wire(where: str, value: Any) -> _Placement:
    known = isinstance(value, list) and value and isinstance(value[0], str) and value[0] in _WIRE_FIELDS
    if not known:
        raise LayoutError(
            f"{where} {checks.shown(value)}: allowed are [{'], ['.join(_WIRE_FIELDS)}] with their values"
        )
    kind, *fields = value
    if len(fields) != len(_WIRE_FIELDS[kind]):
        raise LayoutError(f"{where}: {kind} takes {len(_WIRE_FIELDS[kind])} values, found {len(fields)}")
    dim, split_factor, op = 0, 1, ""
    if kind == "partial":
        op = checks.choice(where, fields[0], _REDUCE_OPS)
    elif fields:
        dim = checks.integer(f"{where}: dimension", fields[0], -checks.MAX_DIMS, checks.MAX_DIMS - 1)
    if kind == "strided_shard":
        split_factor = checks.integer(f"{where}: split factor", fields[1], 1, checks.MAX_INT64)
    return kind, dim, split_factor, op


def _torch_placement(placement: _Placement) -> Placement:
    from torch.distributed.tensor import placement_types as torch_types

    kind, dim, split_factor, op = placement
    if kind == "shard":
        return torch_types.Shard(dim)
    if kind == "strided_shard":
        return torch_types._StridedShard(dim, split_factor=split_factor)
    if kind == "partial":
        return torch_types.Partial(op)
    return torch_types.Replicate()


def _text(placement: _Placement) -> str:
    kind, dim, split_factor, op = placement
    return {
        "shard": f"Shard({dim})",
        "strided_shard": f"_StridedShard({dim}, split_factor={split_factor})",
        "partial": f"Partial({op!r})",
    }.get(kind, "Replicate()")
