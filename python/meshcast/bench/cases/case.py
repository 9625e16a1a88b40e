"""A case: one tensor or many, where they lie and where they have to go, and the hosts it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from meshcast.layout import Layout
from meshcast.planning.plan import Plan, plan_many
from meshcast.topology import Topology

RANKS_PER_HOST = 4


class Tensor(NamedTuple):
    """An int32 tensor that moves from one layout to another."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)


@dataclass(frozen=True)
class CaseSetting:
    """The hosts of a case; cases of one setting share a cluster. rates: of the links of each host, as parts
    of the rate that the run was given; hosts beyond have 1. own_cores: each host keeps to its part of the
    cores; not where one host alone has work to do."""

    ranks_per_host: int = RANKS_PER_HOST
    nics: int = 1
    rates: tuple[float, ...] = ()
    own_cores: bool = True

    def mbit(self, rate: float, hosts: int) -> list[float]:
        """Mbit/s of each host's links."""
        parts = (*self.rates, *[1.0] * hosts)[:hosts]
        return [rate * part for part in parts]


@dataclass(frozen=True)
class Case:
    """One reshard; rank r is on host r // setting.ranks_per_host."""

    name: str
    group: str  # the table it belongs to
    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    notation: str  # both layouts as people write them
    fixed: bool = False  # the size is the point: it is not scaled
    more: tuple[Tensor, ...] = ()  # tensors beside the first, moved as one
    setting: CaseSetting = field(default=CaseSetting())
    least_repeats: int = 0  # short ones need more than others
    methods: tuple[str, ...] = ()  # the only ones that it is for; empty: all

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (Tensor(self.shape, self.src, self.dst), *self.more)

    @property
    def ranks(self) -> list[int]:
        """The ranks of all meshes, ascending."""
        return sorted({rank for tensor in self.tensors for rank in (*tensor.src.ranks, *tensor.dst.ranks)})

    @property
    def hosts(self) -> int:
        """The number of hosts of setting.ranks_per_host ranks that it takes."""
        return self.ranks[-1] // self.setting.ranks_per_host + 1

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def plan(self, topology: Topology, strategy: str = "auto") -> Plan:
        problems = [(tensor.shape, torch.int32, tensor.src, tensor.dst) for tensor in self.tensors]
        return plan_many(problems, topology, strategy)

    def scaled(self, topology: Topology, seconds: float) -> Case:
        """The case with its largest dimension cut so that the lower bound is about `seconds`.

        The layouts stay, so the unit tasks stay the same parts of the whole. Boxes keep at least 4 elements
        of the dimension that is cut.
        """
        if self.fixed:
            return self
        bound = self.plan(topology).lower_bound
        if bound <= seconds:
            return self
        dim = max(range(len(self.shape)), key=lambda d: (self.shape[d], d))
        least = 4 * max(len(self.src.ranks), len(self.dst.ranks))
        size = max(round(self.shape[dim] * seconds / bound), least)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self if size >= self.shape[dim] else replace(self, shape=shape).scaled(topology, seconds)
