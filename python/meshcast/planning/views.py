"""The parts of a plan, as Python values made on access: a plan of a million hops stays as small as its C++
arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

from ..layout import Box

if TYPE_CHECKING:
    from .. import _C

T = TypeVar("T")


class Task(NamedTuple):
    """The unit of communication (paper, section 3): one box, the ranks that hold it, and those that need it
    and do not hold it."""

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    nbytes: int
    tensor: int = 0
    """Position of the tensor in `plan_many`."""
    reduce: str | None = None
    """With a Partial source: how the values of the holders combine. The receivers are then all ranks that
    need the box."""
    contribution: tuple[int, ...] = ()
    """With a Partial source: which partial value each holder has; replicas of one value share a number."""


class LocalCopy(NamedTuple):
    """A box that a rank both holds and needs: copied inside the rank, never sent."""

    rank: int
    box: Box
    tensor: int = 0


class Transfer(NamedTuple):
    """One hop: `box` travels from rank `src` to rank `dst` once all transfers in `after` are done.

    With `reduce`, dst combines what arrives with the value it carries, which starts as its own partial value;
    after the transfer marked `last_reduce` that value is complete ("avg" divides it there). `task` is the
    position in `plan.tasks`, `start` and `finish` are seconds of the simulated timeline. Transfers of one
    message share them.
    """

    id: int
    src: int
    dst: int
    box: Box
    nbytes: int
    after: tuple[int, ...]
    reduce: str | None
    last_reduce: bool
    tensor: int
    task: int
    start: float
    finish: float


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose items are made when they are asked for."""

    __slots__ = ("_item", "_length")

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            picked = range(self._length)[index]
            return LazySequence(len(picked), lambda i: self._item(picked[i]))
        try:
            position = range(self._length)[index]
        except IndexError:
            raise IndexError(f"index {index} of a sequence of {self._length}") from None
        return self._item(position)

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self[:3]))
        return f"[{head}]" if self._length <= 3 else f"[{head}, ... {self._length} items]"


def tasks(core: _C.Plan) -> Sequence[Task]:
    """The tasks of a plan."""

    def task(index: int) -> Task:
        tensor, box, nbytes, holders, receivers, reduce, contribution = core.task(index)
        return Task(box, holders, receivers, nbytes, tensor, reduce, contribution)

    return LazySequence(core.num_tasks, task)


def local_copies(core: _C.Plan) -> Sequence[LocalCopy]:
    """The local copies of a plan."""

    def local_copy(index: int) -> LocalCopy:
        rank, tensor, box = core.local_copy(index)
        return LocalCopy(rank, box, tensor)

    return LazySequence(core.num_local_copies, local_copy)


def transfers(core: _C.Plan) -> Sequence[Transfer]:
    """The hops of a plan, one transfer per box.

    A message of several boxes (small ones with the same holders and receivers travel together) becomes as
    many transfers in a row; along a chain the pieces of a message keep their order, so piece k waits for
    piece k of the message before.
    """
    first = memoryview(core.column("chunk_begin"))
    end = memoryview(core.column("chunk_end"))
    if core.num_pieces == core.num_chunks:  # the usual case: every message is one box
        return LazySequence(core.num_hops, lambda index: _transfer(core, index, index, 0, lambda hop: hop))
    starts = [0, *accumulate(end[chunk] - first[chunk] for chunk in memoryview(core.column("hop_chunk")))]

    def transfer(index: int) -> Transfer:
        hop = bisect_right(starts, index) - 1
        return _transfer(core, index, hop, index - starts[hop], starts.__getitem__)

    return LazySequence(starts[-1], transfer)


def _transfer(core: _C.Plan, index: int, hop: int, piece: int, start_of: Callable[[int], int]) -> Transfer:
    src, dst, first, after, reduce, last_reduce, start_ns, finish_ns = core.hop(hop)
    tensor, task, box, nbytes = core.piece(first + piece)
    waits = () if after < 0 else (start_of(after) + piece,)
    return Transfer(
        index,
        src,
        dst,
        box,
        nbytes,
        waits,
        reduce,
        last_reduce,
        tensor,
        task,
        start_ns / 1e9,
        finish_ns / 1e9,
    )
