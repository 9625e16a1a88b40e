"""Decides exactly, in integers alone, whether strided elements have addresses in common.

Both questions are whether steps, each taken at most so many times, can add up to a total. From the widest
step to the narrowest, what may still be missing is kept, as far as the narrower steps can make up for it.
With the strides of views that is a handful of numbers. With others it may be very many: then there is no
answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Region", "meet", "repeats"]

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


@functools.lru_cache(4096)  # shards of one buffer lie alike, as a rule
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
    # to this where they are the same. Within a unit, all bytes are alike.
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
