"""The memory that tensors occupy: transfers write behind the back of autograd.

The test for addresses that strided elements have in common is exact, in integers alone: whether steps, each
taken at most so many times, can add up to a total. From the widest step to the narrowest, what may still be
missing is kept, as far as the narrower steps can make up for it. With the strides of views that is a handful
of numbers. With others it may be very many: then there is no answer.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..transfers.medium import settled

__all__ = [
    "Collected",
    "Owner",
    "Region",
    "check_outs",
    "check_storage",
    "meet",
    "memory_key",
    "near",
    "note_written",
    "overlaps",
    "owners_of",
    "repeats",
    "storage_of",
    "tensor_of",
]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():  # nearly always; adding up strides takes several times as long
        return first, first + tensor.nbytes
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (elements + 1) * tensor.element_size()


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether address ranges of two tensors overlap. Interleaved ones count: a copy does no harm."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_first, a_end = _extent(settled(a))
    b_first, b_end = _extent(settled(b))
    return a_first < b_end and b_first < a_end


def near(sources: Mapping[str, torch.Tensor], outs: Iterable[torch.Tensor]) -> set[str]:
    """Names of the sources that overlap one of the outs, as `overlaps` says, without trying each pair."""
    firsts: list[int] = []
    ends: list[int] = []
    for first, end in sorted(_extent(settled(out)) for out in outs if out.numel()):
        if ends and first < ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            firsts.append(first)
            ends.append(end)
    found = set()
    for name, source in sources.items():
        if source.numel():
            first, end = _extent(settled(source))
            before = bisect_left(firsts, end)  # ranges that begin before the source ends
            if before and ends[before - 1] > first:
                found.add(name)
    return found


def check_storage(tensor: torch.Tensor) -> None:
    """Raises LayoutError for an output that has several elements at one address, as expand() and unfold()
    make them, and for one without strides. Contiguous ones cost a fraction of a microsecond."""
    tensor = settled(tensor)
    if tensor.layout is not torch.strided:
        raise LayoutError(
            f"expected a dense output, of layout torch.strided, found one of {tensor.layout}; give a "
            "dense tensor",
        )
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    found = repeats(tensor.shape, tensor.stride())
    if found:
        raise LayoutError(
            f"the output of {_strides_text(tensor)} holds several elements at one address; give one "
            "with memory for each element, for example a clone()",
        )
    if found is None:
        raise LayoutError(
            f"whether elements of the output of {_strides_text(tensor)} share an address takes too "
            "long to find out; give a contiguous one",
        )


def check_outs(outs: Mapping[str, torch.Tensor]) -> None:
    """Raises LayoutError where results would be written over themselves or each other. Interleaved outputs,
    such as the columns of one matrix, are right."""
    for out in outs.values():
        check_storage(out)
    regions = [(_region(settled(out)), name) for name, out in outs.items() if out.numel()]
    still: list[tuple[Region, str]] = []  # those that have not ended where the next begins
    for region, name in sorted(regions):
        still = [(other, its) for other, its in still if other.end > region.first]
        for other, its in still:
            found = meet(other, region)
            if found:
                raise LayoutError(f"the outputs {its!r} and {name!r} share memory; give each its own")
            if found is None:
                raise LayoutError(
                    f"whether the outputs {its!r} ({_strides_text(outs[its])}) and {name!r} "
                    f"({_strides_text(outs[name])}) share memory takes too long to find out; give each its "
                    "own",
                )
        still.append((region, name))


class Collected:
    """Tensors that come one after the other, and are to keep their values."""

    def __init__(self) -> None:
        # By storage, whose views count together what is written to them: what came, and that count then.
        self._tensors: dict[int, list[tuple[str, torch.Tensor, int]]] = {}

    def add(self, what: str, name: str, tensor: torch.Tensor) -> None:
        """Raises LayoutError where `what`, which makes the tensors, has written over one that came before.
        Other parts of one buffer, and one tensor under several names, are right."""
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if not plain or tensor.is_inference() or not tensor.numel():
            return
        before = self._tensors.setdefault(tensor.untyped_storage()._cdata, [])
        for other, its, version in before:
            if its._version != version and meet(_region(its), _region(tensor)):
                raise LayoutError(
                    f"{what} has filled the memory of {other!r} again for {name!r}, while both are needed; "
                    "give each its own, for example a clone()"
                )
        before.append((name, tensor, tensor._version))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage. Tensors of different storages have version counters of their own; views of
    one have one, which counts what is written to any of them."""
    tensor = settled(tensor)
    # Tensors without a storage of their own are refused, but maybe later.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def note_written(*tensors: torch.Tensor) -> None:
    """Lets autograd know that these were written, so that a graph that saved an old value raises."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride())


def _strides_text(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"


_MOST_SUMS = 1 << 15  # looked at; some 20 ms


class Region(NamedTuple):
    """The elements of a tensor that has some. first: address; item: bytes of an element; strides: in
    elements, 0 or more."""

    first: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.first + (_reach(self.shape, self.strides) + 1) * self.item


def meet(a: Region, b: Region) -> bool | None:
    """Returns whether a byte belongs to both regions. None: it would take too long to find out."""
    if a.end <= b.first or b.end <= a.first:
        return False
    return _meet(a.item, a.shape, a.strides, b.item, b.shape, b.strides, b.first - a.first)


@functools.lru_cache(4096)  # shards of one buffer lie the same way, as a rule
def _meet(
    item: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_item: int,
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
    distance: int,
) -> bool | None:
    """distance: bytes from the first of the one to the first of the other."""
    unit = math.gcd(item, other_item, distance)
    steps = [(1, item // unit - 1), (1, other_item // unit - 1)]
    steps += [(item // unit * stride, size - 1) for size, stride in zip(shape, strides, strict=True)]
    steps += [
        (other_item // unit * stride, size - 1)
        for size, stride in zip(other_shape, other_strides, strict=True)
    ]
    # A byte of the one, counted from its first, and a byte of the other, counted back from its last, add up
    # to this where they are the same. Within a unit, all bytes are the same.
    other_bytes = (_reach(other_shape, other_strides) + 1) * other_item
    return _adds_up(steps, (distance + other_bytes - 1) // unit)


@functools.lru_cache(4096)
def repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool | None:
    """Returns whether two of the elements, of which there are some, have the same address. strides: 0 or
    more. None: it would take too long to find out."""
    dims = sorted((stride, size - 1) for size, stride in zip(shape, strides, strict=True) if size > 1)
    narrower: list[tuple[int, int]] = []
    reach, undecided = 0, False
    for stride, last in dims:
        if stride <= reach:  # never with the strides of views but expand()'s, which are 0
            # Do 1 to `last` strides of this dimension come to a difference inside the narrower ones? Those
            # are from -reach to reach; counted from the lowest, and with this dimension's from its end:
            both_ways = [(step, 2 * times) for step, times in narrower]
            found = _adds_up([*both_ways, (stride, last - 1)], reach + stride * last)
            if found:
                return True
            undecided = undecided or found is None
        narrower.append((stride, last))
        reach += stride * last
    return None if undecided else False


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class _Narrower(NamedTuple):
    """The totals that the steps narrower than a given one can add up to: multiples of `divisor`, from 0 to
    `reach`; every one of them if `every`."""

    reach: int = 0
    divisor: int = 1
    every: bool = True

    def joined(self, step: int, most: int) -> _Narrower:
        if self.reach == 0:
            return _Narrower(step * most, step, True)
        every = self.every and step % self.divisor == 0 and step <= self.reach + self.divisor
        return _Narrower(self.reach + step * most, math.gcd(self.divisor, step), every)


def _adds_up(steps: Iterable[tuple[int, int]], total: int) -> bool | None:
    """Returns whether taking each (step, most) 0 to `most` times can come to `total`. None: too many sums."""
    most: dict[int, int] = {}
    for step, times in steps:
        if step and times:
            most[step] = most.get(step, 0) + times
    below = [_Narrower()]  # one for each step, narrowest first
    for step in sorted(most):
        below.append(below[-1].joined(step, most[step]))
    missing, looked_at = {total}, 0
    for step, narrower in zip(sorted(most, reverse=True), below[-2::-1], strict=True):
        # The rest must be a multiple of the divisor: one count of the step in each period makes it so.
        common = math.gcd(step, narrower.divisor)
        period = narrower.divisor // common
        inverse = pow(step // common, -1, period)
        left: set[int] = set()
        for rest in missing:
            if rest % common:
                continue
            fewest = max(0, -((narrower.reach - rest) // step))
            fewest += (rest // common * inverse - fewest) % period
            counts = range(fewest, min(most[step], rest // step) + 1, period)
            if narrower.every and counts:
                return True
            looked_at += len(counts)
            if looked_at > _MOST_SUMS:
                return None
            left.update(rest - step * count for count in counts)
        missing = left
    return 0 in missing


_PLAIN = (torch.Tensor, torch.nn.Parameter)
Owner = tuple[weakref.ref[Any], str]  # an object, and its attribute or the name of its parameter or buffer


def tensor_of(owner: Owner) -> torch.Tensor | None:
    """The tensor that an owner has now."""
    holder, name = owner[0](), owner[1]
    if isinstance(holder, torch.nn.Module):
        found: Any = holder._parameters.get(name)
        found = holder._buffers.get(name) if found is None else found
    else:
        found = getattr(holder, name, None)
    return found if isinstance(found, torch.Tensor) else None


def memory_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one piece of memory; None for those without memory of their own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or local.layout is not torch.strided:
        return None
    first = local.data_ptr()  # 0 without elements, and on the meta device
    return (first, local.dtype, local.shape, local.stride()) if first else None


def owners_of(entries: Mapping[str, Any], memories: Mapping[str, Any]) -> dict[str, list[Owner]]:
    """Returns what has the entries' memory as its own, by name. Reads all objects of the process once."""
    names: dict[Any, list[str]] = {}
    for name, memory in memories.items():
        if memory is not None:
            names.setdefault(memory, []).append(name)
    found: dict[str, list[Owner]] = {}
    if names:
        for holder, attribute, tensor in _held():
            for name in names.get(memory_key(tensor), ()):
                if isinstance(tensor, DTensor) == isinstance(entries[name], DTensor):
                    found.setdefault(name, []).append((weakref.ref(holder), attribute))
    return found


def _held() -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The parameters and buffers of all modules, then the shards that FSDP2 keeps of parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kept = (fsdp.FSDPParam,) if fsdp is not None else ()
    sharded = []
    for each in gc.get_objects():
        kind = type(each)  # isinstance() would ask proxies, which may do anything
        if issubclass(kind, torch.nn.Module):
            for tensors in (each.__dict__.get("_parameters"), each.__dict__.get("_buffers")):
                for name, tensor in (tensors or {}).items():
                    if isinstance(tensor, torch.Tensor):
                        yield each, name, tensor
        elif issubclass(kind, kept):
            sharded.append(each)
    for each in sharded:
        tensor = getattr(each, "sharded_param", None)
        if isinstance(tensor, torch.Tensor):
            yield each, "sharded_param", tensor
