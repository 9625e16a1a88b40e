"""The values that a step is given, flattened by pytree, and their parts.

All are cut by samples, except those that a chunk spec declares whole and those without samples: numbers,
text, tensors of 0 dimensions. A BlockMask has samples as a tensor does, unless it has one row for all.

Other names of torch.distributed.pipelining.microbatch are found here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from ..base.checks import dtype_name
from ..errors import LayoutError
from ..transfers.digest import pieces_digest
from ._utils import names_of_torch
from .parallel import Placements, StageMesh

__all__ = [
    "Leaf",
    "Pieces",
    "Values",
    "check_shard",
    "cut",
    "digest_of",
    "divided",
    "extent",
    "is_mask",
    "local_shard",
    "narrowed",
    "sizes_of_parts",
    "picked",
]


_DEEP = 4  # levels of an object in which tensors are looked for
_MASK_PARTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arguments, keyword arguments and targets that come as micro-batches already; None where they come
    whole. local: each rank gives its own samples only."""

    args: Sequence[Any] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None
    local: bool = False

    @property
    def given(self) -> bool:
        return not (self.args is None and self.kwargs is None and self.targets is None)

    def check(self, microbatches: int) -> None:
        """Raises LayoutError naming the one that does not have a piece for each micro-batch."""
        for name, given in (
            ("arg_mbs", self.args),
            ("kwarg_mbs", self.kwargs),
            ("target_mbs", self.targets),
        ):
            if given is not None and len(given) != microbatches:
                raise LayoutError(
                    f"{name} must have one entry for each of the {microbatches} micro-batches, "
                    f"found {len(given)}"
                )


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that pytree finds.

    top: the number of the argument that it is, or is in (nested). dim: the dimension of its samples; None: it
    is whole, the same for all samples. declared: a chunk spec says so.
    """

    value: Any
    top: int
    nested: bool
    dim: int | None
    declared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a tensor; of a BlockMask those of its rows of blocks; () of anything else."""
        if isinstance(self.value, BlockMask):
            return tuple(self.value.kv_num_blocks.shape)
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor) else ()

    @property
    def rows(self) -> int:
        assert self.dim is not None
        return self.shape[self.dim]


class Values:
    """Arguments (a tuple), keyword arguments (a dict) or a target (a tuple of one), flattened.

    Args:
        kind: "args", "kwargs" or "target".
        specs: chunk specs by number or name, as torch.distributed.pipelining takes them. That of a nested
            value counts for all that is in it.
        may_be_empty: a tensor may have no samples: there are more on other ranks, or in other micro-batches.

    Raises:
        LayoutError: a chunk spec that does not fit, or a tensor without the dimension that it names.
    """

    def __init__(self, kind: str, values: Any, specs: Any, where: str, *, may_be_empty: bool = False) -> None:
        self.kind, self._where, self._may_be_empty = kind, where, may_be_empty
        self._keys = list(values) if isinstance(values, Mapping) else None
        self._given = list(values.values()) if isinstance(values, Mapping) else list(values)
        self._trees: list[TreeSpec | None] = []
        self.leaves: list[Leaf] = []
        for top, value in enumerate(self._given):
            spec = self._spec(top, specs) if specs is not None else None
            if isinstance(value, torch.Tensor):
                self._trees.append(None)
                flat, wanted = [value], [spec]
            else:
                flat, tree = tree_flatten(value, is_leaf=is_mask)
                self._trees.append(tree)
                wanted = [None] * len(flat) if spec is None else list(_spread(value, spec, self._top(top)))
            nested = len(flat) != 1 or flat[0] is not value
            for each, way in zip(flat, wanted, strict=True):
                self.leaves.append(Leaf(each, top, nested, self._dim(each, way, top), _is_whole(way)))

    @property
    def count(self) -> int:
        """Returns how many values, nested ones as one."""
        return len(self._given)

    @property
    def names(self) -> list[str]:
        """Names of keyword arguments."""
        return list(self._keys or ())

    def _spec(self, top: int, specs: Any) -> Any:
        if self._keys is None:
            if len(specs) != len(self._given):
                raise LayoutError(
                    f"{self._where}: args_chunk_spec has {len(specs)} entries, there are {len(self._given)} "
                    "arguments"
                )
            return specs[top]
        unknown = [name for name in specs if name not in self._keys]
        if unknown:
            raise LayoutError(
                f"{self._where}: kwargs_chunk_spec names {unknown[0]!r}, the keyword arguments are "
                f"{self._keys}"
            )
        return specs.get(self._keys[top])

    def _dim(self, value: Any, spec: Any, top: int) -> int | None:
        if spec is not None and not _is_spec(spec):
            raise LayoutError(
                f"{self._where}: the chunk spec of {self._top(top)} must be a TensorChunkSpec or _Replicate, "
                f"found {type(spec).__name__}"
            )
        if _is_whole(spec):
            return None
        dim = 0 if spec is None else spec.split_dim
        if isinstance(value, BlockMask):
            if dim != 0:
                raise LayoutError(
                    f"{self._where}: {self._top(top)} is a BlockMask, which is cut in dimension 0"
                )
            return None if value.kv_num_blocks.shape[0] == 1 else 0
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and spec is None):
            return None
        fits = -value.dim() <= dim < value.dim()
        if not fits or (value.shape[dim] == 0 and not self._may_be_empty):
            raise LayoutError(
                f"{self._where}: a tensor of shape {tuple(value.shape)} has no samples in dimension "
                f"{dim} to cut into micro-batches; give at least one, or a chunk spec",
                op="pipeline",
            )
        return dim % value.dim()

    def _top(self, top: int) -> str:
        if self.kind == "target":
            return "target"
        return f"argument {top}" if self._keys is None else f"keyword argument {self._keys[top]!r}"

    def name(self, number: int) -> str:
        """Returns what errors call a leaf."""
        leaf = self.leaves[number]
        name = self._top(leaf.top)
        if not leaf.nested:
            return name
        within = number - next(i for i, each in enumerate(self.leaves) if each.top == leaf.top)
        try:
            path = tree_flatten_with_path(self._given[leaf.top], is_leaf=is_mask)[0][within][0]
        except ValueError:  # a type that was registered without names of its parts
            return f"{name}, value {within}"
        return name + keystr(path)

    def remedy(self, number: int) -> str:
        """Returns how to declare a leaf whole."""
        if self.kind == "target":
            return "Give what all samples share to loss_fn by loss_kwargs"
        leaf = self.leaves[number]
        specs = f"kwargs_chunk_spec={{{self._keys[leaf.top]!r}: _Replicate()}}" if self._keys else (
            f"an args_chunk_spec with _Replicate() in place {leaf.top}"
        )  # fmt: skip
        return (
            f"If all samples share it, declare it whole: {specs} of the schedule "
            "(meshcast.pipelining.microbatch has _Replicate)"
        )

    def rebuilt(self, flat: Sequence[Any]) -> Any:
        """The same arguments with other leaves."""
        found, at = [], 0
        for tree in self._trees:
            if tree is None:
                found.append(flat[at])
                at += 1
            else:
                found.append(tree_unflatten(list(flat[at : at + tree.num_leaves]), tree))
                at += tree.num_leaves
        return tuple(found) if self._keys is None else dict(zip(self._keys, found, strict=True))

    def shapes(self, part: tuple[int, int] | None, *, but_for_samples: bool = False) -> list[Any]:
        """The size of each tensor in all dimensions, and its dtype. part: its number, and in how many all are
        cut."""
        found: list[Any] = []
        for leaf in self.by_name():
            shape = list(leaf.shape)
            if leaf.dim is not None and part is not None:
                shape[leaf.dim] = sizes_of_parts(leaf.rows, part[1])[part[0]]
            if leaf.dim is not None and but_for_samples:
                del shape[leaf.dim]
            if isinstance(leaf.value, torch.Tensor):
                found.append([*shape, dtype_name(leaf.value.dtype)])
            elif isinstance(leaf.value, BlockMask):
                found.append([*shape, leaf.value.kv_indices.shape[-1], "BlockMask"])
        return found

    def objects(self) -> list[tuple[int, str, int]]:
        """Tensors inside of values that pytree does not see into: leaf, path and first size, one for each
        size."""
        found: dict[tuple[int, int], str] = {}
        for number, leaf in enumerate(self.leaves):
            if not leaf.declared and not isinstance(leaf.value, (torch.Tensor, BlockMask, *_PLAIN)):
                for path, tensor in _tensors_in(leaf.value, _DEEP):
                    if tensor.dim():
                        found.setdefault((number, int(tensor.shape[0])), path)
        return [(number, path, size) for (number, size), path in found.items()]

    def by_name(self) -> list[Leaf]:
        """The leaves; those of keyword arguments in the order of their names."""
        keys = self._keys
        return self.leaves if keys is None else sorted(self.leaves, key=lambda leaf: keys[leaf.top])


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.nn.Module, type)


def is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask)


def _is_whole(spec: Any) -> bool:
    return spec is _Replicate or isinstance(spec, _Replicate)


def _is_spec(spec: Any) -> bool:
    return _is_whole(spec) or isinstance(spec, TensorChunkSpec)


def _children(value: Any) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(value, is_leaf=lambda each: each is not value)


def _spread(value: Any, spec: Any, what: str) -> Iterator[Any]:
    """The chunk spec of each leaf: that of the value, or of the part of it that a tree of specs names."""
    if _is_spec(spec) or spec is None:
        for _ in tree_flatten(value, is_leaf=is_mask)[0]:
            yield spec
        return
    parts, tree = _children(value)
    if is_mask(value) or tree.is_leaf():
        yield spec  # which is refused
        return
    if isinstance(value, Mapping) and isinstance(spec, Mapping):
        names = _children({name: name for name in value})[0] if type(value) is dict else list(value)
        given: list[Any] = [spec.get(name) for name in names]
        fits = all(name in value for name in spec)
    else:
        given = _children(spec)[0]
        fits = len(given) == len(parts)
    if not fits:
        raise LayoutError(f"the chunk spec of {what} does not have its structure: {spec}")
    for part, each in zip(parts, given, strict=True):
        yield from _spread(part, each, what)


def _tensors_in(value: Any, deep: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    if isinstance(value, _PLAIN) or deep == 0:
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts += [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts += [(f"[{index}]", each) for index, each in enumerate(value)]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(value, "__dict__", ()), *slots]:
        if not name.startswith("__"):
            parts.append((f".{name}", getattr(value, name, None)))
    for name, part in parts:
        for path, tensor in _tensors_in(part, deep - 1):
            yield name + path, tensor


def digest_of(value: Any) -> list[Any]:
    """A digest of all values of a tensor, which is read once, where it is; or of another value."""
    if isinstance(value, torch.Tensor):
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        if local.layout != torch.strided or local.is_quantized or local.is_meta:
            return [dtype_name(local.dtype), str(tuple(local.shape))]
        box = tuple((0, size) for size in local.shape)
        piece = (box, (0,) * local.dim(), (), ())
        digest = pieces_digest(local, [piece], local.shape) if local.numel() else 0
        return [dtype_name(local.dtype), *local.shape, digest]
    if isinstance(value, BlockMask):
        return [digest_of(getattr(value, name)) for name in _MASK_PARTS]
    return [repr(value) if isinstance(value, (int, float, complex, str, bytes, type(None))) else ""]


def sizes_of_parts(total: int, count: int) -> list[int]:
    """Sizes of so many parts, as torch.tensor_split has them."""
    return [total // count + (part < total % count) for part in range(count)]


def narrowed(value: Any, dim: int, begin: int, size: int) -> Any:
    """A part of a tensor or BlockMask, a view. A BlockMask without rows has one, which counts for any number
    of samples, none included."""
    if not isinstance(value, BlockMask):
        return value.narrow(dim, begin, size)
    if not size:
        # No sum: torch.vmap cannot add to a batch of none, which torch 2.11 does not show on fake tensors.
        return _mask_of(value, slice(0, 1), lambda b: torch.zeros((), dtype=b.dtype, device=b.device))
    return value if _has_one_row(value) else _mask_of(value, slice(begin, begin + size), lambda b: b + begin)


def picked(value: Any, dim: int, index: torch.Tensor) -> Any:
    """The samples of a tensor or BlockMask that `index` lists, a copy."""
    if not isinstance(value, BlockMask):
        return value.index_select(dim, index.to(value.device))
    index = index.to(value.kv_num_blocks.device)
    return value if _has_one_row(value) else _mask_of(value, index, lambda b: index[b])


def _has_one_row(mask: BlockMask) -> bool:
    return mask.kv_num_blocks.shape[0] == 1


def _mask_of(mask: BlockMask, rows: Any, row_of: Any) -> BlockMask:
    """Cuts a mask as torch.distributed.pipelining does: mask_mod sees the row that it was made for."""
    made_for = mask.mask_mod

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return made_for(row_of(b), h, q_idx, kv_idx)

    def part(name: str) -> Any:
        whole = getattr(mask, name)
        return None if whole is None else whole[rows]

    kv_num, kv, full_num, full = map(part, _MASK_PARTS)
    return BlockMask.from_kv_blocks(
        kv_num,
        kv,
        full_num,
        full,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def extent(value: Any, dim: int) -> int:
    """The size of a tensor or BlockMask in a dimension."""
    return int((value.kv_num_blocks if isinstance(value, BlockMask) else value).shape[dim])


def check_shard(shape: Sequence[int], placements: Placements) -> None:
    """Raises LayoutError for placements that an argument of step of this shape cannot have."""
    for placement in placements:
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise LayoutError(f"an argument of step can be placed by Shard and Replicate, found {placement}")
        if not -len(shape) <= placement.dim < len(shape):
            raise LayoutError(
                f"{placement} of an argument of step with shape {tuple(shape)}: there is no such dimension"
            )


def local_shard(value: Any, mesh: StageMesh, placements: Placements) -> Any:
    """This rank's part of a tensor or BlockMask that every rank has whole: a view, no copy. Cuts follow
    torch.chunk; a shard may be empty. A BlockMask is cut by samples alone."""
    if not is_mask(value):
        check_shard(value.shape, placements)
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard) or (is_mask(value) and placement.dim != 0):
            continue
        total = extent(value, placement.dim)
        parts, index = mesh.shape[mesh_dim], mesh.coordinate[mesh_dim]
        size, offset = Shard.local_shard_size_and_offset(total, parts, index)
        value = narrowed(value, placement.dim, min(offset, total), size)
    return value


def divided(value: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """Parts of these sizes, which follow each other."""
    if isinstance(value, DTensor):  # torch divides each rank's part
        parts = sum(size > 0 for size in sizes)
        pieces, _ = split_args_kwargs_into_chunks((value,), None, parts, (TensorChunkSpec(dim),))
        found = [each[0] for each in pieces]
        return [*found, *[found[0].narrow(dim, 0, 0)] * (len(sizes) - parts)]
    found, begin = [], 0
    for size in sizes:
        found.append(narrowed(value, dim, begin, size))
        begin += size
    return found


def cut(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, args_spec: Any, kwargs_spec: Any, what: str
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[int]]:
    """Micro-batches of whole values, as torch.distributed.pipelining makes them, and how many samples each
    has: those of the first tensor. If there are fewer samples than micro-batches, the last ones have none.

    Raises LayoutError naming a tensor without samples, or without the dimension that is to be cut.
    """
    if not args and not kwargs:
        return [], [], [1] * count
    parts: list[list[Any]] = []
    samples: list[int] | None = None
    for kind, given, spec in (("args", args, args_spec), ("kwargs", kwargs, kwargs_spec)):
        values = Values(kind, given, spec if given else None, what)
        columns = []
        for leaf in values.leaves:
            sizes = None if leaf.dim is None else sizes_of_parts(leaf.rows, count)
            samples = samples or sizes
            columns.append(
                [leaf.value] * count if sizes is None else divided(leaf.value, leaf.dim or 0, sizes)
            )
        parts.append([values.rebuilt([column[number] for column in columns]) for number in range(count)])
    return parts[0], parts[1], samples or [1] * count


__getattr__, __dir__ = names_of_torch("microbatch", globals())
