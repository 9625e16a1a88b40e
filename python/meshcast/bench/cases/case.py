"""A case: one tensor, where it lies and where it has to go."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from meshcast.layout import Layout
from meshcast.plan import plan
from meshcast.topology import Topology

RANKS_PER_HOST = 4


@dataclass(frozen=True)
class Case:
    """One reshard of an int32 tensor on hosts of RANKS_PER_HOST ranks each, rank r on host r // 4."""

    name: str
    group: str  # the table it belongs to
    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    notation: str  # both layouts as people write them
    fixed: bool = False  # the size is the point: it is not scaled

    @property
    def hosts(self) -> int:
        """How many hosts of RANKS_PER_HOST ranks it takes."""
        return max(*self.src.ranks, *self.dst.ranks) // RANKS_PER_HOST + 1

    @property
    def nbytes(self) -> int:
        n = 4
        for size in self.shape:
            n *= size
        return n

    def scaled(self, topology: Topology, seconds: float) -> Case:
        """The case with its largest dimension cut so that the lower bound is about `seconds`.

        The layouts stay, so the unit tasks stay the same parts of the whole. Boxes keep at least 4 elements
        of the dimension that is cut.
        """
        if self.fixed:
            return self
        bound = plan(self.shape, torch.int32, self.src, self.dst, topology).lower_bound
        if bound <= seconds:
            return self
        dim = max(range(len(self.shape)), key=lambda d: (self.shape[d], d))
        least = 4 * max(len(self.src.ranks), len(self.dst.ranks))
        size = max(round(self.shape[dim] * seconds / bound), least)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self if size >= self.shape[dim] else replace(self, shape=shape).scaled(topology, seconds)
