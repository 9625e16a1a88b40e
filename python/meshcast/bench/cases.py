"""The cases that are measured. Every process builds the same list."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..layout import Layout
from ..planning.plan import Plan, plan, plan_many
from ..topology import Topology

__all__ = ["CASES", "Case", "CaseSetting", "RANKS_PER_HOST", "Tensor", "find"]


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
    more: tuple[Tensor, ...] = ()  # further tensors, moved as one
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


_HOSTS = 5
_SEED = 2211_05322


def _layout(rng: random.Random, ranks: list[int], ndim: int) -> Layout:
    """Ranks in a mesh of one to three dimensions, each of which shards a tensor dimension or replicates."""
    shape = [len(ranks)]
    for _ in range(rng.randrange(3)):
        divisors = [n for n in range(2, shape[-1]) if shape[-1] % n == 0]
        if divisors:
            n = rng.choice(divisors)
            shape[-1:] = [n, shape[-1] // n]
    placements = [Replicate() if rng.random() < 0.35 else Shard(rng.randrange(ndim)) for _ in shape]
    mesh: list = ranks
    for n in reversed(shape[1:]):
        mesh = [mesh[i : i + n] for i in range(0, len(mesh), n)]
    return Layout(mesh, placements)


def _case(number: int, group: str) -> Case:
    rng = random.Random(_SEED + number)
    ndim = rng.randint(1, 3)
    while True:
        size = rng.choice([2, 3, 4, 5, 6, 7, 8, 12])
        other = rng.choice([2, 3, 4, 5, 6, 7, 8, 12])
        world = list(range(_HOSTS * RANKS_PER_HOST))
        rng.shuffle(world)
        if rng.random() < 0.5:  # in order, as jobs are mostly laid out
            world.sort()
        overlap = rng.choice([0, 0, 0, 1, 2])
        first, second = world[:size], world[size - min(overlap, size) :][:other]
        src, dst = _layout(rng, first, ndim), _layout(rng, second, ndim)
        shape = {1: (1 << 28,), 2: (1 << 14, 1 << 14), 3: (1000, 700, 380)}[ndim]
        notation = f"{src!r} to {dst!r}".replace("Layout", "")
        case = Case(f"random {number}", group, shape, src, dst, notation)
        traffic = plan((64,) * ndim, torch.int32, src, dst, Topology.uniform(RANKS_PER_HOST, 1))
        if any(traffic.nic_bytes(host)[0] for host in range(case.hosts)):
            return case


RANDOM_LAYOUTS = [_case(number, "random-tuned" if number < 60 else "random") for number in range(80)]


_CUBE = (1024, 1024, 512)
_UNEVEN = (1000, 700, 380)
_GIB = (1 << 28,)  # int32
_SUM = Partial("sum")


def _parsed(group: str, name: str, shape: tuple[int, ...], source: str, target: str, **more: Any) -> Case:
    src, dst = Layout.parse(source), Layout.parse(target)
    return Case(name, group, shape, src, dst, f"{source} to {target}", **more)


# Several senders, several receivers: the nine cases of arXiv 2211.05322, section 5.1.2. Cases 7 and 8 are one
# and the same in the code published with the paper; both are run, as there.
N_TO_M = [
    _parsed("n-to-m", f"n-to-m {number}", shape, source, target)
    for number, (shape, source, target) in enumerate([
        (_CUBE, "2x4:S0RR", "2x4@8:S0RR"),
        (_CUBE, "2x4:RRR", "2x4@8:S0RR"),
        (_CUBE, "2x4:RS0R", "2x4@8:S0RR"),
        (_CUBE, "2x4:RS01R", "2x4@8:S01RR"),
        (_CUBE, "2x4:S1RR", "2x4@8:S0RR"),
        ((3072, 1024, 170), "2x4:S0RR", "3x4@8:S0RR"),
        (_CUBE, "1x4:S1RR", "2x4@4:RRR"),
        (_CUBE, "1x4:S1RR", "2x4@4:RRR"),
        (_CUBE, "2x4:RS0R", "2x4@8:RRS0"),
    ], 1)
]  # fmt: skip


def _one_to_m(hosts: int, per_host: int) -> Case:
    """One sender, on a host of its own, several receivers that each need everything: section 5.1.1."""
    rows = [[(1 + host) * RANKS_PER_HOST + index for index in range(per_host)] for host in range(hosts)]
    src, dst = Layout([0], [Replicate()]), Layout(rows, [Replicate(), Replicate()])
    return Case(f"1-to-{hosts}x{per_host}", "1-to-m", _GIB, src, dst, f"1 to {hosts}x{per_host} replicas")


ONE_TO_M = [_one_to_m(*shape) for shape in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2)]]

# Layouts that do not divide: uneven and empty shards, meshes of different size, overlapping or identical.
ODD = [
    _parsed("odd", "3 to 5 ranks", _UNEVEN, "3:S0RR", "5@4:RS0R"),
    _parsed("odd", "7 to 2x3 ranks", _UNEVEN, "7:S0RR", "2x3@8:RS1S0"),
    _parsed("odd", "more ranks than rows", (6, 1 << 25), "8:S0R", "2x4@8:S01R"),
    _parsed("odd", "overlapping in half of the ranks", _UNEVEN, "2x4:S01RR", "2x4@4:RS01R"),
    _parsed("odd", "identical meshes", _UNEVEN, "2x4:S0S1R", "2x4:RRS01"),
    _parsed("odd", "one mesh inside the other", _UNEVEN, "4x4:S01RR", "1x4:RS1R"),
]


def _partial(name: str, src: list[Placement], dst: list[Placement], notation: str) -> Case:
    """Values that are still to be added up, as gradients are, while they move to another mesh."""
    meshes = [[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]
    return Case(name, "partial", (1 << 14,) * 2, Layout(meshes[0], src), Layout(meshes[1], dst), notation)


PARTIAL = [
    _partial("sum over hosts to shards", [_SUM, Shard(0)], [Replicate(), Shard(0)], "2x4:+S0 to 2x4@8:RS0"),
    _partial("sum over hosts to replicas", [_SUM, Shard(0)], [Replicate()] * 2, "2x4:+S0 to 2x4@8:RR"),
    _partial("sum inside hosts to shards", [Shard(0), _SUM], [Shard(0), Shard(1)], "2x4:S0+ to 2x4@8:S0S1"),
]

# The same layouts over 1, 2 and 4 NICs per host. All NICs together have the rate of one link: the same bytes
# should take the same time, whatever their number.
NICS = [
    _parsed("nics", f"{name}, {nics} NIC{'s' * (nics > 1)}", _CUBE, source, target,
            setting=CaseSetting(nics=nics, rates=(1 / nics,) * 4))
    for nics in (1, 2, 4)
    for name, source, target in [("shards", "2x4:S1RR", "2x4@8:S0RR"), ("replicas", "1x4:S0RR", "2x4@4:RRR")]
]  # fmt: skip

# Hosts with links of different rate: which rank sends what, and which comes last in a chain, then decides.
UNEQUAL = [
    _parsed("unequal", name, _CUBE, source, target, setting=CaseSetting(rates=rates))
    for name, source, target, rates in [
        ("one source at half the rate", "2x4:RS0R", "2x4@8:S0RR", (1.0, 0.5, 1.0, 1.0)),
        ("one target at half the rate", "1x4:S0RR", "3x4@4:RRR", (1.0, 1.0, 1.0, 0.5)),
        ("fast sources, slow targets", "2x4:RRR", "2x4@8:S0RR", (1.0, 1.0, 0.25, 0.5)),
    ]
]


def _state_dict() -> Case:
    """A state dict as one call: the tensors of a GPT with 1.3 billion parameters (24 layers, hidden size
    2048), every dimension but the number of layers divided by 21, from four tensor-parallel ranks with two
    replicas to two with four."""
    layers, hidden, vocabulary, positions = 24, 96, 2400, 96
    columns, rows, whole = Shard(0), Shard(1), Replicate()  # of a weight (outputs, inputs)
    norm: list[tuple[tuple[int, ...], Placement]] = [((hidden,), whole), ((hidden,), whole)]
    layer: list[tuple[tuple[int, ...], Placement]] = [
        *norm,
        ((3 * hidden, hidden), columns), ((3 * hidden,), columns),  # query, key, value
        ((hidden, hidden), rows), ((hidden,), whole),  # projection
        *norm,
        ((4 * hidden, hidden), columns), ((4 * hidden,), columns),
        ((hidden, 4 * hidden), rows), ((hidden,), whole),
    ]  # fmt: skip
    outside: list[tuple[tuple[int, ...], Placement]] = [
        ((vocabulary, hidden), columns), ((positions, hidden), whole), *norm, ((vocabulary, hidden), columns),
    ]  # fmt: skip
    src, dst = [[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]
    first, *rest = [
        Tensor(shape, Layout(src, [Replicate(), split]), Layout(dst, [Replicate(), split]))
        for shape, split in (*outside, *layer * layers)
    ]
    notation = f"{len(rest) + 1} tensors, 2x4 to 4x2@8, tensor parallel"
    return Case("state dict", "state-dict", *first, notation, fixed=True, more=tuple(rest))


STATE_DICT = [_state_dict()]


def _size(nbytes: int, space: str = " ") -> str:
    return f"{nbytes >> 20}{space}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}{space}KiB"


_OFTEN = {"fixed": True, "least_repeats": 20}
# The cost of calls apart from their bytes. Their ratios to the bound mean little: look at the times.
SMALL = [
    _parsed(
        "small", f"{name} of {_size(nbytes)}", (nbytes // 4,), source, target, fixed=True, least_repeats=20
    )
    for name, source, target in [("shards", "4:S0", "4@4:S0"), ("replicas", "1:R", "2x2@4:R")]
    for nbytes in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
]


def _message(nbytes: int) -> Case:
    """One sender and two hosts of two replicas. Only bytes over rate matter: 64 MiB on links of 250
    Mbit/s are as 1 GiB on links of 4 Gbit/s."""
    rows = [[host * RANKS_PER_HOST, host * RANKS_PER_HOST + 1] for host in (1, 2)]
    src, dst = Layout([0], [Replicate()]), Layout(rows, [Replicate(), Replicate()])
    return Case(_size(nbytes, ""), "sizes", (nbytes // 4,), src, dst, "1 to 2x2 replicas", fixed=True)


SIZES = [_message(nbytes) for nbytes in (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)]


def _backend(hosts: int, per_host: int) -> Case:
    """torch.distributed.broadcast itself: on a group with the backend meshcast, compared with gloo's own and
    a reshard to replicas."""
    ranks = [host * RANKS_PER_HOST + index for host in range(hosts) for index in range(per_host)]
    return Case(
        f"broadcast, {hosts} hosts of {per_host}", "backend", _GIB, Layout([0], [Replicate()]),
        Layout(ranks, [Replicate()]), f"1 to {hosts}x{per_host} replicas, itself among them",
        methods=("auto", "multicast", "broadcast", "backend broadcast", "gloo broadcasts", "Open MPI bcast",
                 "Open MPI pipeline", "MPICH bcast"),
    )  # fmt: skip


BACKEND = [_backend(2, 4), _backend(4, 1), _backend(4, 2)]


def _scaling(group: str, name: str, hosts: int, per_host: int, rate: float) -> Case:
    """Returns a case that shows how the ratio to the bound changes with the number of hosts, and with the
    ranks of a host: one host of shards to replicas on all the others. Rates fall with the number of hosts, so
    that the cores can drive all links."""
    rows = [[host * per_host + index for index in range(per_host)] for host in range(hosts)]
    src, dst = Layout(rows[0], [Shard(0)]), Layout(rows[1:], [Replicate(), Replicate()])
    return Case(
        name, group, _GIB, src, dst, f"{per_host} shards to {hosts - 1}x{per_host} replicas",
        setting=CaseSetting(per_host, rates=(rate,) * hosts),
    )  # fmt: skip


SCALING = [
    *(_scaling("hosts", f"{hosts} hosts", hosts, 2, min(1.0, 4 / hosts)) for hosts in (2, 4, 8, 16)),
    *(_scaling("ranks", f"3 hosts of {ranks}", 3, ranks, 1.0) for ranks in (1, 2, 4, 8)),
]

# Inside one host, where memory and not a link is the limit: 64 MiB between four ranks.
IN_HOST = [
    _parsed("in-host", name, (4096, 4096), source, target, fixed=True, setting=CaseSetting(own_cores=False))
    for name, source, target in [
        ("rows to columns", "4:S0R", "4:RS0"),
        ("shards to replicas", "4:S0R", "4:RR"),
        ("two ranks to the other two", "2:S0R", "2@2:S0R"),
        ("one rank to three", "1:RR", "3@1:RR"),
    ]
]


CASES: list[Case] = [
    *N_TO_M, *ONE_TO_M, *RANDOM_LAYOUTS, *ODD, *PARTIAL, *NICS,
    *UNEQUAL, *STATE_DICT, *SMALL, *SIZES, *BACKEND, *SCALING,
    *IN_HOST,
]  # fmt: skip


def find(names: list[str]) -> list[Case]:
    """Cases by name, or by group name (all of the group). Raises ValueError naming what is known."""
    chosen: list[Case] = []
    for name in names:
        found = [case for case in CASES if name in (case.name, case.group)]
        if not found:
            groups = sorted({case.group for case in CASES})
            raise ValueError(f"unknown case {name!r}; known are the groups {', '.join(groups)}, and "
                             "their cases, which python -m meshcast bench lists")  # fmt: skip
        chosen += [case for case in found if case not in chosen]
    return chosen
