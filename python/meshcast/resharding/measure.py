"""Topology of a running job by the rates that transfers between its hosts reach, on their CPUs or GPUs."""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..base import checks, settings
from ..base.observe import log
from ..base.settings import host_identity
from ..errors import LayoutError, MeshcastError, PlanMismatchError
from ..groups.parent import ParentGroup, parent_group
from ..layout import Layout
from ..planning.plan import Problem
from ..topology import (
    GpuFigures,
    Host,
    Nic,
    Topology,
    figures_slot,
    forget_figures,
    gather_facts,
    keep_figures,
    ranks_by_host,
)
from ..transfers.medium import require_gpu
from ..transfers.transfer import PersistentTransfer, PlanOptions
from ..transfers.transfer import seconds as seconds_of
from .reshard import reshard_local

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["measure_topology"]

_OP = "measure_topology"
_PROBE_BYTES = 1 << 20  # first transfer, which connects and gives a first idea of the rate
_MOST_BYTES = 1 << 30  # of one measured transfer, over all ranks
_REPEATS = 3
_SHORTEST = 1e-9  # seconds; a clock may show none
_PINGS = 20
_TAG = 0x6D63
_DEVICES = ("cpu", "cuda")
# Of GPUs. Messages of that size are never joined into one; all of them are to be rounds of their own.
_ROUND_BYTES, _ROUNDS, _ROUND_REPEATS = 64 << 10, 33, 5
_PART_OF_MEMORY = 8  # of what is free on the GPU
_ALIKE = 2  # pairs of GPUs with rates within that factor of the best are of one domain


def measure_topology(
    group: dist.ProcessGroup | None = None, *, seconds: float = 0.2, device: str = "cpu"
) -> Topology:
    """The hosts of a group's ranks with the rates that transfers between them reach.

    A collective of all ranks of `group` (None: the default group), to be called while the network is
    otherwise idle. Host after host sends to all others and receives from all others, all its ranks at once,
    so that a rate is that of the whole host; then all hosts move data between their own ranks. Each figure is
    the median of three transfers of about `seconds` (at most 1 GiB each). All ranks get an equal result.

    The NICs of a host are measured together and reported as one. Between two hosts the slower end is what is
    seen of both. A host with a single rank gets its network rate as its internal rate, which nothing uses.

    With ``device="cuda"`` tensors on the current GPU of each rank travel as those of other calls do, over
    NCCL or CUDA IPC, and are timed on the GPU. The ranks whose GPUs reach each other by NVLink count as one
    host, also across machines that NVLink connects; NVML says which those are, or else measured rates. So a
    machine whose GPUs have no common NVLinks is several hosts. The latency is what a round of messages costs
    apart from its bytes. The figures are kept in a file for later jobs on the same machines, see
    docs/cuda.md.

    Args:
        group: of all ranks that are measured; None for the default group.
        seconds: about how long a transfer takes that is measured.
        device: "cpu" or "cuda", where the tensors are.

    Raises:
        LayoutError: `seconds` is not positive, or a rank has no GPU to measure; the other ranks raise
            PlanMismatchError.
        PlanMismatchError: ranks ask for different things.
        MeshcastError: no process group, a rank that cannot use its GPU, or the errors of
            meshcast.reshard_local.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        topology = meshcast.measure_topology(seconds=0.01)
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = meshcast.reshard(x, target, [Shard(1)], topology=topology)
    """

    def check() -> None:
        checks.positive("seconds", seconds)
        if device not in _DEVICES:
            raise LayoutError(f"device {checks.shown(device)}: expected one of {', '.join(_DEVICES)}")
        if device == "cuda":
            require_gpu()
        else:
            _require_messages(group)

    facts = gather_facts((host_identity(), str(device), repr(seconds)), group, check)
    first = min(facts)
    for rank, fact in sorted(facts.items()):
        if fact[1:] != facts[first][1:]:
            raise PlanMismatchError(
                f"rank {first} measures {facts[first][1]} for {facts[first][2]} s, rank {rank} {fact[1]} for "
                f"{fact[2]} s: call measure_topology with the same arguments on all ranks",
                peer=rank,
            )
    hosts = ranks_by_host({rank: identity for rank, (identity, _, _) in facts.items()})
    if device == "cuda":
        return _of_gpus(group, hosts, seconds)
    everybody = _joined(hosts)
    measured = _measured(hosts, _HostProbe(group), seconds)
    return Topology(_described(hosts, measured), 1e6 * _latency([r[0] for r in hosts], everybody, group))


def _require_messages(group: dist.ProcessGroup | None) -> None:
    """The latency is that of messages of the group itself."""
    known: Any = group or dist.group.WORLD
    try:
        known._get_backend(torch.device("cpu"))
    except RuntimeError:
        raise LayoutError(
            "the process group has no backend for tensors on the CPU, so they cannot be measured: give "
            'init_process_group or new_group the backends cpu:gloo,cuda:nccl, or measure device="cuda"'
        ) from None


class _Rates(NamedTuple):
    """Rates of one host, bytes/s; 0 where it has no other to exchange data with."""

    out: int
    in_: int
    local: int


def _joined(hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(rank for ranks in hosts for rank in ranks))


def _measured(hosts: Sequence[tuple[int, ...]], probe: _Probe, seconds: float) -> list[_Rates]:
    """The rates of each host. Called by every rank of the group."""
    sending, receiving = [0] * len(hosts), [0] * len(hosts)
    for index, ranks in enumerate(hosts):
        others = tuple(rank for rank in _joined(hosts) if rank not in ranks)
        if others:
            sending[index] = _rates_of([(ranks, others)], probe, seconds)[0]
            receiving[index] = _rates_of([(others, ranks)], probe, seconds)[0]
    inside = [(ranks, pair) for ranks in hosts for pair in probe.neighbours(ranks)]
    rates = _rates_of([pair for _, pair in inside], probe, seconds)
    local: dict[tuple[int, ...], int] = {}
    for (ranks, _), rate in zip(inside, rates, strict=True):
        local[ranks] = min(rate, local.get(ranks, rate))
    return [_Rates(*each) for each in zip(sending, receiving, (local.get(r, 0) for r in hosts), strict=True)]


def _described(hosts: Sequence[tuple[int, ...]], measured: Sequence[_Rates]) -> list[Host]:
    """A single host has no network to measure, a single rank no neighbour."""
    found = []
    for ranks, rates in zip(hosts, measured, strict=True):
        out_rate, in_rate = rates.out or rates.local or 1, rates.in_ or rates.local or 1
        found.append(Host(ranks, (Nic(out_rate, in_rate),), rates.local or min(out_rate, in_rate)))
    return found


class _Flow(NamedTuple):
    """Bytes from the ranks of one side, each an equal part, to those of the other."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    nbytes: int


_Pair = tuple[tuple[int, ...], tuple[int, ...]]  # senders, receivers


class _Probe(ABC):
    """Transfers of a group that are timed. most_bytes: of one move."""

    most_bytes = _MOST_BYTES

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    @abstractmethod
    def neighbours(self, ranks: tuple[int, ...]) -> list[_Pair]:
        """Returns the pairs of a host's ranks by which its local rate is measured, all at once."""

    @abstractmethod
    def ready(self, moves: Sequence[_Flow]) -> Callable[[], float]:
        """Returns a function that makes the moves, all at once, and returns the seconds they took here; both
        are collectives of the group."""

    def timed(self, run: Callable[[], float]) -> dict[int, float]:
        """The seconds that a function of `ready` took, by rank. A collective of the group."""
        dist.barrier(self.group)
        return {rank: taken for rank, (taken,) in gather_facts((run(),), self.group).items()}


class _HostProbe(_Probe):
    """Tensors on the CPU, by the clock of the host."""

    def neighbours(self, ranks: tuple[int, ...]) -> list[_Pair]:
        return [(ranks[:1], ranks[1:2])] if len(ranks) > 1 else []

    def ready(self, moves: Sequence[_Flow]) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            for move in moves:
                self._move(move)
            return time.perf_counter() - begin

        return run

    def _move(self, move: _Flow) -> None:
        rank = dist.get_rank()
        if rank not in move.senders and rank not in move.receivers:
            return
        problem = _problem(move)
        data = _shard(problem.src, problem.shape, rank, "cpu")
        reshard_local(
            data, problem.src, None, problem.dst, shape=problem.shape, dtype=problem.dtype, group=self.group,
            strategy="send_recv",
        )  # fmt: skip


def _problem(move: _Flow) -> Problem:
    # Equal parts on both sides that few pairs of ranks exchange: rank i sends to rank i, or to its
    # neighbours.
    senders = len(move.senders)
    shape = (move.nbytes // senders * senders,)
    return Problem(shape, torch.uint8, _row(move.senders), _row(move.receivers))


def _row(ranks: Sequence[int]) -> Layout:
    from torch.distributed.tensor.placement_types import Shard

    placements: list[Placement] = [Shard(0)]
    return Layout(list(ranks), placements)


def _shard(layout: Layout, shape: tuple[int, ...], rank: int, device: str) -> torch.Tensor | None:
    local = layout.local_shapes(shape).get(rank)
    return None if local is None else torch.zeros(local, dtype=torch.uint8, device=device)


def _rates_of(pairs: Sequence[_Pair], probe: _Probe, seconds: float) -> list[int]:
    """Bytes/s of each pair, all pairs at once. Called by every rank of the group."""
    if not pairs:
        return []
    moves = [_Flow(*pair, _PROBE_BYTES) for pair in pairs]
    taken: list[list[float]] = [[] for _ in pairs]
    run = probe.ready(moves)
    for repeat in range(-2, _REPEATS):
        ended = probe.timed(run)
        # A pair is complete when its last receiver is.
        last = [max(ended[rank] for rank in move.receivers) for move in moves]
        if repeat >= 0:
            for times, now in zip(taken, last, strict=True):
                times.append(now)
        elif repeat == -1:  # the first transfer connected, this one sets the size of the measured ones
            rates = [move.nbytes / max(now, _SHORTEST) for move, now in zip(moves, last, strict=True)]
            sizes = [int(min(max(rate * seconds, _PROBE_BYTES), probe.most_bytes)) for rate in rates]
            moves = [move._replace(nbytes=size) for move, size in zip(moves, sizes, strict=True)]
            run = probe.ready(moves)
    found = zip(moves, taken, strict=True)
    return [max(int(move.nbytes / max(statistics.median(times), _SHORTEST)), 1) for move, times in found]


def _latency(leaders: Sequence[int], everybody: Sequence[int], group: dist.ProcessGroup | None) -> float:
    """Seconds one way of a small message between two hosts, or between two ranks of the only host."""
    pair = leaders[:2] if len(leaders) > 1 else everybody[:2]
    if len(pair) < 2:
        return 0.0
    rank, message = dist.get_rank(), torch.zeros(8, dtype=torch.uint8)
    dist.barrier(group)
    times = []
    if rank == pair[0]:
        for _ in range(_PINGS):
            begin = time.perf_counter()
            dist.send(message, pair[1], group, _TAG)
            dist.recv(message, pair[1], group, _TAG)
            times.append(time.perf_counter() - begin)
    elif rank == pair[1]:
        for _ in range(_PINGS):
            dist.recv(message, pair[0], group, _TAG)
            dist.send(message, pair[0], group, _TAG)
    found = gather_facts((statistics.median(times) / 2 if times else 0.0,), group)
    return float(found[pair[0]][0])


# ---- GPUs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Card:
    """A rank's GPU. free: bytes of its memory; fabric: of settings.GpuMachine; links: the GPUs of its machine
    that it reaches by NVLink, None where NVML is missing; seen: the GPUs that NVML shows to the rank, perhaps
    not all of its machine."""

    uuid: str
    free: int
    fabric: str
    links: tuple[str, ...] | None
    seen: frozenset[str] = frozenset()


def _own_card(machine: settings.GpuMachine | None) -> _Card | str:
    """Returns the GPU, or why CUDA does not tell: the other ranks must learn of it."""
    try:
        index = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        free = torch.cuda.mem_get_info(index)[0]
    except Exception as error:
        return str(error)
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if machine is None or uuid not in dict(machine.gpus):  # a part of one has no links of its own
        return _Card(uuid, free, "", None)
    return _Card(
        uuid, free, machine.fabrics.get(uuid, ""), machine.linked(uuid), frozenset(dict(machine.gpus))
    )


def _of_gpus(group: dist.ProcessGroup | None, hosts: Sequence[tuple[int, ...]], seconds: float) -> Topology:
    machine = settings.gpu_machine()
    # A name for the private group, which no measurement had before.
    said = gather_facts((_own_card(machine), os.urandom(8).hex()), group)
    cards: dict[int, _Card] = {}
    for rank, (card, _) in sorted(said.items()):
        if isinstance(card, str):
            raise MeshcastError(f"rank {rank} cannot use its GPU: {card}", peer=rank)
        cards[rank] = card
    everybody = tuple(sorted(cards))
    if len(everybody) == 1:
        return Topology([Host(everybody, (Nic(1, 1),), 1)])
    parent, name = parent_group(group, _OP), f"{_OP}/{said[everybody[0]][1]}"
    sharing = Counter(card.uuid for card in cards.values())
    free = min(card.free // sharing[card.uuid] for card in cards.values())
    probe = _GpuProbe(group, parent.twin(name), everybody, free)
    try:
        return _topology_of_gpus(machine, hosts, cards, probe, seconds)
    finally:  # its communicators take room on the GPU
        parent.drop_twin(name, time.monotonic())


def _topology_of_gpus(
    machine: settings.GpuMachine | None,
    hosts: Sequence[tuple[int, ...]],
    cards: Mapping[int, _Card],
    probe: _GpuProbe,
    seconds: float,
) -> Topology:
    domains = _domains(hosts, cards, probe, seconds)
    rates = _measured(domains, probe, seconds)
    leaders = [ranks[0] for ranks in domains]
    round_ns = probe.round_ns(leaders[:2] if len(leaders) > 1 else sorted(cards)[:2])
    _keep(machine, hosts, cards, domains, rates, round_ns, probe)
    found = _described(domains, rates)
    if not round_ns:
        log.warning("the cost of a round of messages is lost in noise: a guess takes its place")
    return Topology(found, round_ns / 1e3) if round_ns else Topology(found)


class _GpuProbe(_Probe):
    """Tensors on the current GPU, by its own clock. All moves are calls of one private group, that of all
    ranks: communicators of NCCL are few. It is none of those that other calls use, which have yet to meet
    and take the figures."""

    # The same plan whatever is known of rates: nothing is forwarded, so staging alone cuts it into rounds.
    _PLANNED = PlanOptions("send_recv", Topology.uniform(1, nic_gbps=10.0))

    def __init__(
        self, group: dist.ProcessGroup | None, parent: ParentGroup, everybody: tuple[int, ...], free: int
    ) -> None:
        super().__init__(group)
        self._parent = parent
        self._everybody = everybody
        self._limit = seconds_of(None, self._parent.timeout)
        self.most_bytes = max(min(_MOST_BYTES, free // _PART_OF_MEMORY), _PROBE_BYTES)

    def neighbours(self, ranks: tuple[int, ...]) -> list[_Pair]:
        """A ring, so that each rank sends and receives, as in a plan."""
        if len(ranks) < 2:
            return []
        return [((one,), (other,)) for one, other in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]

    def ready(self, moves: Sequence[_Flow], *, hop_by_hop: bool = False) -> Callable[[], float]:
        # A byte that each rank copies to itself makes all of them part of the call.
        row = _row(self._everybody)
        problems = [*map(_problem, moves), Problem((len(self._everybody),), torch.uint8, row, row)]
        transfer = PersistentTransfer(
            self._parent, problems, _OP, self._PLANNED, device_types=("cuda", "cuda"), hop_by_hop=hop_by_hop
        )
        rank = dist.get_rank()
        src: list[torch.Tensor | None] = []
        dst: list[torch.Tensor | None] = []

        def allocate() -> float:
            src.extend(_shard(each.src, each.shape, rank, _MEMORY) for each in problems)
            dst.extend(_shard(each.dst, each.shape, rank, _MEMORY) for each in problems)
            return 0.0

        def run() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            transfer.start(src, dst, timeout=self._limit).wait()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        self._on_all(allocate)
        return run

    def timed(self, run: Callable[[], float]) -> dict[int, float]:
        dist.barrier(self.group)
        return self._on_all(run)

    def _on_all(self, act: Callable[[], float]) -> dict[int, float]:
        """The result of `act` by rank. Where it raises on one, as without enough memory, all raise."""
        taken, failed = 0.0, None
        try:
            taken = act()
        except Exception as error:
            failed = error
            # The others may wait for this rank in the transfer.
            self._parent.abort(f"rank {dist.get_rank()} failed in {_OP}: {error}")
        said = gather_facts((taken, None if failed is None else str(failed)), self.group)
        if failed is not None:
            raise failed
        for rank, (_, why) in sorted(said.items()):
            if why is not None:
                raise MeshcastError(f"rank {rank} failed in {_OP}: {why}", peer=rank)
        return {rank: taken for rank, (taken, _) in said.items()}

    def round_ns(self, pair: Sequence[int]) -> int:
        """Nanoseconds of a round between two ranks, apart from its bytes: the same messages in a round each,
        and in one. 0 where noise is larger."""
        moves = [_Flow((pair[0],), (pair[1],), _ROUND_BYTES)] * _ROUNDS
        apart, together = self.ready(moves, hop_by_hop=True), self.ready(moves)
        taken: list[float] = []
        for repeat in range(-1, _ROUND_REPEATS):  # the first connects
            times = [self.timed(run)[pair[1]] for run in (apart, together)]
            if repeat >= 0:
                taken.append(times[0] - times[1])
        return max(round(1e9 * statistics.median(taken) / (_ROUNDS - 1)), 0)

    def transport(self) -> str:
        """Name of what connects the ranks, once they are connected."""
        from ..transfers.gpu import gpu_of

        gpu = gpu_of(self._parent.private(self._everybody))
        assert gpu is not None
        return gpu.transport


_MEMORY = "cuda"  # where the tensors of a measurement are


def _domains(
    hosts: Sequence[tuple[int, ...]], cards: Mapping[int, _Card], probe: _GpuProbe, seconds: float
) -> list[tuple[int, ...]]:
    """The ranks whose GPUs reach each other by NVLink, or, where a host has none or does not know, at about
    the best rate of the host; ordered by lowest rank."""
    unsure = [ranks for ranks in hosts if not all(_knows_links(rank, ranks, cards) for rank in ranks)]
    fast = _fast_pairs([_first_of_each(ranks, cards) for ranks in unsure], probe, seconds)
    joined: list[tuple[int, int]] = []
    for number, ranks in enumerate(hosts):
        linked = [
            (one, other)
            for one, other in combinations(ranks, 2)
            if cards[one].uuid == cards[other].uuid or cards[other].uuid in (cards[one].links or ())
        ]
        no_links = ranks not in unsure and not any(cards[rank].links for rank in ranks)
        joined += linked + (list(pairwise(ranks)) if no_links else [])
        joined += [pair for pair in fast if set(pair) <= set(hosts[number])]
    for one, other in combinations(sorted(cards), 2):
        if cards[one].fabric and cards[one].fabric == cards[other].fabric:
            joined.append((one, other))
    return _connected(sorted(cards), joined)


def _knows_links(rank: int, ranks: Sequence[int], cards: Mapping[int, _Card]) -> bool:
    """Returns whether NVML says how the GPU of a rank reaches those of all `ranks`, its host's."""
    card = cards[rank]
    return card.links is not None and card.seen.issuperset(cards[other].uuid for other in ranks)


def _first_of_each(ranks: Sequence[int], cards: Mapping[int, _Card]) -> list[int]:
    """One rank for each GPU."""
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(cards[rank].uuid, rank)
    return list(first.values())


def _fast_pairs(hosts: Sequence[Sequence[int]], probe: _GpuProbe, seconds: float) -> list[tuple[int, int]]:
    """The pairs of each host with about its best rate. Each rank is in one pair at a time."""
    rates: dict[tuple[int, int], int] = {}
    turns = [_turns(ranks) for ranks in hosts]
    for turn in range(max(map(len, turns), default=0)):
        pairs = [pair for each in turns if turn < len(each) for pair in each[turn]]
        found = _rates_of([((one,), (other,)) for one, other in pairs], probe, seconds)
        rates.update(zip(pairs, found, strict=True))
    fast = []
    for each in turns:
        pairs = [pair for turn in each for pair in turn]
        best = max((rates[pair] for pair in pairs), default=0)
        fast += [pair for pair in pairs if _ALIKE * rates[pair] >= best]
    return fast


def _turns(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in turns in which no rank is twice: one stays, the others go around."""
    around: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    turns = []
    for _ in range(len(around) - 1):
        half = len(around) // 2
        opposite = zip(around[:half], reversed(around[half:]), strict=True)
        turns.append([(one, two) for one, two in opposite if one is not None and two is not None])
        around[1:] = [around[-1], *around[1:-1]]
    return [turn for turn in turns if turn]


def _connected(ranks: Sequence[int], pairs: Collection[tuple[int, int]]) -> list[tuple[int, ...]]:
    root = {rank: rank for rank in ranks}
    for one, other in pairs:
        low, high = sorted((root[one], root[other]))
        root = {rank: low if of == high else of for rank, of in root.items()}
    return [tuple(r for r in ranks if root[r] == first) for first in sorted(set(root.values()))]


def _keep(
    machine: settings.GpuMachine | None,
    hosts: Sequence[tuple[int, ...]],
    cards: Mapping[int, _Card],
    domains: Sequence[tuple[int, ...]],
    rates: Sequence[_Rates],
    round_ns: int,
    probe: _GpuProbe,
) -> None:
    """Has the first rank of each host write what was measured there, and the next groups of all read it."""
    mine = next(ranks for ranks in hosts if dist.get_rank() in ranks)
    own = [(ranks, of) for ranks, of in zip(domains, rates, strict=True) if set(ranks) & set(mine)]
    # Of several domains the way between them counts: each rank has its part of that of its domain.
    each = [of.local for _, of in own if of.local]
    if len(own) > 1:
        each += [min(of.out, of.in_) // len(ranks) for ranks, of in own]
    alone = len(own) == 1 and own[0][0] == mine
    figures = GpuFigures(
        local_rate=min(each, default=0),
        out_rate=own[0][1].out if alone else 0,
        in_rate=own[0][1].in_ if alone else 0,
        round_ns=round_ns,
        ranks=len(mine),
        measured=int(time.time()),
        domains=tuple(
            tuple(sorted({cards[rank].uuid for rank in ranks if rank in mine})) for ranks, _ in own
        ),
    )
    slot = figures_slot(probe.transport(), _any_shared(hosts, cards))
    if dist.get_rank() == mine[0] and (problem := keep_figures(machine, slot, figures)):
        log.warning("figures of the GPUs of this host could not be kept: %s", problem)
    gather_facts((True,), probe.group)  # all are written
    forget_figures()


def _any_shared(hosts: Sequence[tuple[int, ...]], cards: Mapping[int, Any]) -> bool:
    return any(len({cards[rank].uuid for rank in ranks}) < len(ranks) for ranks in hosts)
