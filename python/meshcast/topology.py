"""Topology: which ranks share a host, the NICs of each host, and their rates; and the rates that were
measured between the GPUs of a machine, which are kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .base import checks, forks, settings
from .base.checks import Reader, read_json, typed_arguments
from .base.settings import host_identity, network_links
from .errors import Caller, LayoutError, MeshcastError, PlanMismatchError

if TYPE_CHECKING:
    from . import _C

__all__ = ["Host", "Nic", "Topology", "host_identity"]

_FORMAT = "meshcast.topology/1"
_MAX_RATE = 1 << 50  # bytes/s; about 9 Pbit/s
_MAX_LATENCY_NS = 1_000_000_000
_MAX_NICS = 1024  # of a host
_MAX_RANK = (1 << 31) - 1
_MAX_UNIFORM_RANK = (1 << 20) - 1  # hosts are listed up to the highest rank


@dataclass(frozen=True, slots=True)
class Nic:
    """One full-duplex network interface.

    Attributes:
        out_rate, in_rate: bytes/s, 1 or more.
    """

    out_rate: int
    in_rate: int


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks that share NICs.

    Attributes:
        ranks: global ranks.
        nics: at least one.
        local_rate: bytes/s at which each rank copies to its neighbours.
    """

    ranks: tuple[int, ...]
    nics: tuple[Nic, ...]
    local_rate: int


@dataclass(frozen=True, slots=True)
class _Uniform:
    ranks_per_host: int
    nic_rate: int
    nics_per_host: int
    local_rate: int


class Topology:
    """Hosts with their ranks and NICs, and the latency of one hop.

    Args:
        hosts: every rank of a plan must be on exactly one of them.
        latency_us: fixed cost of a hop in microseconds; a hop of n bytes takes latency + n / rate.

    Raises:
        LayoutError: naming the host, rank, NIC or rate that is wrong.

    Example: a host with two NICs of 25 Gbit/s, and one with a single NIC::

        nic = meshcast.Nic(out_rate=25 * 10**9 // 8, in_rate=25 * 10**9 // 8)
        hosts = [meshcast.Host((0, 1), (nic, nic), 10**10), meshcast.Host((2, 3), (nic,), 10**10)]
        topology = meshcast.Topology(hosts, latency_us=10)
        assert meshcast.Topology.from_json(topology.to_json()) == topology

    Topologies are immutable, compare and hash by value, and can be pickled.
    """

    __slots__ = ("_cores", "_hash", "_hosts", "_latency_ns", "_uniform")

    @typed_arguments()
    def __init__(self, hosts: Iterable[Host], latency_us: float = 20.0) -> None:
        self._set(tuple(_checked_host(i, h) for i, h in enumerate(hosts)), None, _latency_ns(latency_us))
        seen: dict[int, int] = {}
        for index, host in enumerate(self._hosts):
            for rank in host.ranks:
                if rank in seen:
                    raise LayoutError(
                        f"rank {rank} is on host {seen[rank]} and on host {index}: a rank has one host"
                    )
                seen[rank] = index
        if not self._hosts:
            raise LayoutError("a topology needs at least one host")

    def _set(self, hosts: tuple[Host, ...], uniform: _Uniform | None, latency_ns: int) -> None:
        self._hosts = hosts
        self._uniform = uniform
        self._latency_ns = latency_ns
        self._hash = hash((hosts, uniform, latency_ns))
        self._cores: dict[int, _C.Topology] = {}

    @classmethod
    @typed_arguments()
    def uniform(
        cls,
        ranks_per_host: int,
        nic_gbps: float,
        nics_per_host: int = 1,
        local_gbps: float = 80.0,
        latency_us: float = 20.0,
    ) -> Topology:
        """Equal hosts: rank r is on host r // ranks_per_host.

        Args:
            ranks_per_host: 1 or more.
            nic_gbps: of each NIC and direction, in Gbit/s.
            nics_per_host: 1 to 1024.
            local_gbps: of a rank to its neighbours on the host, in Gbit/s.
            latency_us: fixed cost of a hop, in microseconds.
        """
        uniform = _Uniform(
            checks.integer("ranks_per_host", ranks_per_host, 1, _MAX_UNIFORM_RANK + 1),
            _rate("nic_gbps", nic_gbps),
            checks.integer("nics_per_host", nics_per_host, 1, _MAX_NICS),
            _rate("local_gbps", local_gbps),
        )
        topology = cls.__new__(cls)
        topology._set((), uniform, _latency_ns(latency_us))
        return topology

    @classmethod
    @typed_arguments()
    def from_hosts(
        cls,
        hosts: Mapping[int, str],
        nic_gbps: float = 10.0,
        nics_per_host: int = 1,
        local_gbps: float = 80.0,
        latency_us: float = 20.0,
    ) -> Topology:
        """Hosts from who runs where, and rates that hold for all. Hosts are ordered by lowest rank.

        Args:
            hosts: {rank: host identity}.
            nic_gbps, nics_per_host, local_gbps, latency_us: as for `uniform`.
        """
        if not isinstance(hosts, Mapping):
            raise LayoutError(f"hosts {checks.shown(hosts)}: expected a mapping from rank to host identity")
        nic = Nic(_rate("nic_gbps", nic_gbps), _rate("nic_gbps", nic_gbps))
        nics = (nic,) * checks.integer("nics_per_host", nics_per_host, 1, _MAX_NICS)
        local_rate = _rate("local_gbps", local_gbps)
        return cls((Host(ranks, nics, local_rate) for ranks in ranks_by_host(hosts)), latency_us)

    @classmethod
    def discover(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        nic_gbps: float | None = None,
        local_gbps: float = 80.0,
        latency_us: float = 20.0,
    ) -> Topology:
        """The hosts of a group's ranks and the speed of their links as the operating system knows it.

        A collective of all ranks of `group`; moves a few hundred bytes. Links are the interfaces that
        GLOO_SOCKET_IFNAME names, else the machine's devices that are up.

        Args:
            group: whose ranks all call; None for the default group.
            nic_gbps: rate of links whose speed the operating system does not know, virtual ones for example.
            local_gbps: rate at which a rank copies to another one of its host; not discovered.
            latency_us: cost of a hop in addition to its bytes; not discovered.

        Raises:
            LayoutError: on every rank, where a speed is unknown and nic_gbps is not given. Where all
                ranks are on one host no link matters, and none is asked for.
        """

        def check() -> None:
            _latency_ns(latency_us)
            _rate("local_gbps", local_gbps)
            if nic_gbps is not None:
                _rate("nic_gbps", nic_gbps)

        with Caller("Topology.discover", dist.get_rank() if dist.is_initialized() else None):
            facts = gather_facts((host_identity(), network_links()), group, check)
            ranks_of = ranks_by_host({rank: identity for rank, (identity, _) in facts.items()})
            several = len(ranks_of) > 1
            hosts = [_discovered(each, facts[each[0]][1], several, nic_gbps, local_gbps) for each in ranks_of]
            return cls(hosts, latency_us)

    def striped(self) -> Topology:
        """The same with the NICs of each host as a single one, as many times as fast as the slowest of them.

        That is how transfers over gloo see hosts with several interfaces (`MESHCAST_IFNAMES`): messages
        take them in turns, whichever rank sends. Itself where every host has one NIC.
        """
        u = self._uniform
        if u is not None:
            if u.nics_per_host == 1:
                return self
            return _rebuild(
                (), replace(u, nic_rate=u.nic_rate * u.nics_per_host, nics_per_host=1), self._latency_ns
            )
        if all(len(host.nics) == 1 for host in self._hosts):
            return self
        return _rebuild(
            tuple(replace(host, nics=(_together(host.nics),)) for host in self._hosts), None, self._latency_ns
        )

    @property
    def latency(self) -> float:
        """Seconds that a hop costs in addition to its bytes."""
        return self._latency_ns / 1e9

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts; empty for a uniform topology, whose hosts follow from the ranks of each plan."""
        return self._hosts

    @classmethod
    def from_json(cls, source: str | Path) -> Topology:
        """Read what `to_json` wrote: a path, or the JSON text itself.

        The text is {"format": "meshcast.topology/1", "latency_ns": n} with either "hosts", a list of
        {"ranks": [...], "nics": [{"out_rate": bytes/s, "in_rate": bytes/s}, ...], "local_rate": bytes/s}, or
        "uniform", an object with "ranks_per_host", "nic_rate", "nics_per_host" and "local_rate".
        """
        return cls._read(Reader(read_json(source, "topology"), "topology"))

    @classmethod
    def _read(cls, reader: Reader) -> Topology:
        reader.expect_format(_FORMAT)
        latency_ns = reader.integer("latency_ns", 0, _MAX_LATENCY_NS)
        topology = cls.__new__(cls)
        if reader.has("uniform"):
            fields = reader.child("uniform")
            uniform = _Uniform(
                fields.integer("ranks_per_host", 1, _MAX_UNIFORM_RANK + 1),
                fields.integer("nic_rate", 1, _MAX_RATE),
                fields.integer("nics_per_host", 1, _MAX_NICS),
                fields.integer("local_rate", 1, _MAX_RATE),
            )
            fields.finish()
            topology._set((), uniform, latency_ns)
        else:
            topology.__init__([_read_host(host) for host in reader.children("hosts")], latency_ns / 1e3)  # type: ignore[misc]
        reader.finish()
        return topology

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal topology."""
        return json.dumps(self._to_dict(), indent=1)

    def _to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"format": _FORMAT, "latency_ns": self._latency_ns}
        if self._uniform is not None:
            out["uniform"] = {name: getattr(self._uniform, name) for name in _Uniform.__slots__}
        else:
            out["hosts"] = [
                {
                    "ranks": list(host.ranks),
                    "nics": [{"out_rate": nic.out_rate, "in_rate": nic.in_rate} for nic in host.nics],
                    "local_rate": host.local_rate,
                }
                for host in self._hosts
            ]
        return out

    def _host_of(self, rank: int) -> int:
        """The number of its host. Raises LayoutError for a rank that is on none."""
        if self._uniform is not None:
            return rank // self._uniform.ranks_per_host
        for index, host in enumerate(self._hosts):
            if rank in host.ranks:
                return index
        raise LayoutError(f"rank {rank} is on no host of the topology; list every rank")

    def _core(self, max_rank: int) -> _C.Topology:
        """The C++ topology for plans whose highest rank is `max_rank`."""
        key = max_rank if self._uniform is not None else 0
        core = self._cores.get(key)
        if core is None:
            from . import _C

            if self._uniform is not None:
                if max_rank > _MAX_UNIFORM_RANK:
                    raise LayoutError(
                        f"rank {max_rank}: a uniform topology covers ranks 0 to {_MAX_UNIFORM_RANK}; "
                        "list the hosts with Topology(hosts=...) instead"
                    )
                u = self._uniform
                core = _C.Topology.uniform(
                    max_rank, u.ranks_per_host, u.nic_rate, u.nics_per_host, u.local_rate, self._latency_ns
                )
            else:
                hosts = [
                    (list(h.ranks), [(n.out_rate, n.in_rate) for n in h.nics], h.local_rate)
                    for h in self._hosts
                ]
                core = _C.Topology(hosts, self._latency_ns)
            self._cores[key] = core
        return core

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Topology):
            return NotImplemented
        return (
            self._hash == other._hash
            and self._latency_ns == other._latency_ns
            and self._uniform == other._uniform
            and self._hosts == other._hosts
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        if self._uniform is not None:
            u = self._uniform
            return (
                f"Topology.uniform(ranks_per_host={u.ranks_per_host}, nic_gbps={u.nic_rate * 8e-9:g}, "
                f"nics_per_host={u.nics_per_host}, local_gbps={u.local_rate * 8e-9:g}, "
                f"latency_us={self._latency_ns / 1e3:g})"
            )
        ranks = sum(len(host.ranks) for host in self._hosts)
        nics = sum(len(host.nics) for host in self._hosts)
        latency_us = f"{self._latency_ns / 1e3:g}"
        return f"Topology({len(self._hosts)} hosts, {ranks} ranks, {nics} NICs, latency_us={latency_us})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._hosts, self._uniform, self._latency_ns)


def gather_facts(
    fact: tuple[Any, ...], group: dist.ProcessGroup | None, check: Callable[[], Any] = lambda: None
) -> dict[int, Any]:
    """Returns what every rank of `group` (None: the default one) says, by global rank; a collective of them.

    check(): of this rank's arguments. Where it raises, here or on another rank, all raise.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise MeshcastError("no process group; call torch.distributed.init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise LayoutError(f"group {checks.shown(group)}: expected a process group that this rank belongs to")
    forks.check_group(group or dist.group.WORLD, "measure_topology")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise LayoutError(f"rank {dist.get_rank()} is not in the group of ranks {ranks}")
    refused: MeshcastError | None = None
    try:
        check()
    except MeshcastError as error:
        refused = error
    facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(facts, (fact, None if refused is None else str(refused)), group)
    if refused is not None:
        raise refused
    for rank, (_, why) in zip(ranks, facts, strict=True):
        if why is not None:
            raise PlanMismatchError(f"rank {rank} refused its arguments: {why}", peer=rank)
    return {rank: said for rank, (said, _) in zip(ranks, facts, strict=True)}


def ranks_by_host(identities: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Ranks by host, hosts by their lowest rank, from {rank: host_identity()}."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(identities):
        ranks_of.setdefault(identities[rank], []).append(rank)
    return [tuple(ranks) for ranks in ranks_of.values()]


def _discovered(
    ranks: tuple[int, ...],
    links: Mapping[str, float | None],
    several: bool,
    nic_gbps: float | None,
    local_gbps: float,
) -> Host:
    """Returns the host of these ranks. several: there are other hosts, so the speeds of its links matter."""
    known = None if nic_gbps is None else float(nic_gbps)
    speeds = [known if speed is None else speed for speed in links.values()] or [known]
    if None in speeds:
        if several:
            unknown = [name for name, speed in links.items() if speed is None]
            raise LayoutError(
                f"the operating system does not know the speed of {', '.join(unknown) or 'any link'} on the "
                f"host of ranks {list(ranks)}; give nic_gbps=..., or use meshcast.measure_topology()"
            )
        speeds = [float(local_gbps)]
    rates = [_rate("nic_gbps", speed) for speed in speeds]
    return Host(ranks, tuple(Nic(rate, rate) for rate in rates), _rate("local_gbps", float(local_gbps)))


def _rebuild(hosts: tuple[Host, ...], uniform: _Uniform | None, latency_ns: int) -> Topology:
    topology = Topology.__new__(Topology)
    topology._set(hosts, uniform, latency_ns)
    return topology


def _together(nics: Sequence[Nic]) -> Nic:
    return Nic(len(nics) * min(nic.out_rate for nic in nics), len(nics) * min(nic.in_rate for nic in nics))


def _rate(name: str, gbps: Any) -> int:
    """Bytes per second of a rate in Gbit/s."""
    rate = round(checks.positive(name, gbps, high=_MAX_RATE * 8e-9) * 1e9 / 8)
    if rate < 1:
        raise LayoutError(f"{name} {gbps}: less than one byte per second")
    return rate


def _latency_ns(latency_us: Any) -> int:
    return round(checks.not_negative("latency_us", latency_us, high=_MAX_LATENCY_NS / 1e3) * 1e3)


def _checked_host(index: int, host: Any) -> Host:
    if not isinstance(host, Host):
        raise LayoutError(f"host {index}, {checks.shown(host)}: expected meshcast.topology.Host")
    where = f"host {index}"
    nics = _checked_nics(where, host.nics)
    ranks = tuple(checks.integer(f"{where}: rank", rank, 0, _MAX_RANK) for rank in host.ranks)
    return Host(ranks, nics, checks.integer(f"{where}: local_rate", host.local_rate, 1, _MAX_RATE))


def _checked_nics(where: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    if not nics:
        raise LayoutError(f"{where} has no NIC: give at least one")
    return tuple(
        Nic(
            checks.integer(f"{where}: NIC {i}: out_rate", nic.out_rate, 1, _MAX_RATE),
            checks.integer(f"{where}: NIC {i}: in_rate", nic.in_rate, 1, _MAX_RATE),
        )
        for i, nic in enumerate(nics)
    )


def _read_host(reader: Reader) -> Host:
    nics = []
    for nic in reader.children("nics"):
        nics.append(Nic(nic.integer("out_rate", 1, _MAX_RATE), nic.integer("in_rate", 1, _MAX_RATE)))
        nic.finish()
    host = Host(
        tuple(reader.integers("ranks", 0, _MAX_RANK)), tuple(nics), reader.integer("local_rate", 1, _MAX_RATE)
    )
    reader.finish()
    return host


DEFAULT = Topology.uniform(ranks_per_host=8, nic_gbps=10.0)
"""The topology of plans when none is given."""


_FIGURES_FORMAT = "meshcast.gpu_figures/1"
_LATEST = 1 << 40  # seconds since 1970
_HOURS, _DAYS = 3600, 86400


@dataclass(frozen=True)
class GpuFigures:
    """Measured figures of the GPUs of one machine, over one transport.

    local_rate: bytes/s of each rank to a neighbour while all of them send. out_rate, in_rate: of the machine,
    to and from others. round_ns: of a round of messages, apart from its bytes. 0 where that was not
    measured. domains: uuids of the GPUs that were measured, those together that reach each other by NVLink,
    or equally fast. measured: seconds since 1970.
    """

    local_rate: int
    out_rate: int
    in_rate: int
    round_ns: int
    ranks: int
    measured: int
    domains: tuple[tuple[str, ...], ...] = ()

    def text(self, now: float) -> str:
        """The figures in a line, with their age."""
        age = max(now - self.measured, 0)
        parts = [f"{self.local_rate / 1e9:.3g} GB/s inside the host"] if self.local_rate else []
        if self.out_rate:
            parts.append(f"{self.out_rate / 1e9:.3g} out and {self.in_rate / 1e9:.3g} GB/s in")
        parts.append(f"{self.round_ns / 1e3:.3g} us a round" if self.round_ns else "a round not measured")
        old = f"{age / _DAYS:.0f} days" if age >= 2 * _DAYS else f"{age / _HOURS:.0f} hours"
        day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.measured))
        return f"{', '.join(parts)}; by {self.ranks} ranks, {old} ago ({day} UTC)"


@dataclass(frozen=True)
class MachineFigures:
    """All figures of a machine, by slot (see `figures_slot`), as a rank offers them to the others; perhaps
    none. visible: of settings.visible_gpus; wants: the transport that it asks for."""

    visible: tuple[str, ...]
    wants: str
    slots: dict[str, GpuFigures]


@dataclass(frozen=True)
class AgreedFigures:
    """Figures with which all ranks of a group plan calls between GPUs.

    slot: of the figures, which fit no other transport. local_rate: bytes/s, the least of all hosts;
    round_ns: 0 where it was not measured.
    """

    slot: str
    topology: Topology
    local_rate: int
    round_ns: int


def figures_slot(transport: str, shares: bool) -> str:
    """Name of the figures of a transport, "nccl" or "cuda_ipc", between ranks that have a GPU each, or of
    which some share one."""
    return f"{transport}, shared GPUs" if shares else transport


def agreed_figures(
    hosts: Mapping[int, str], offers: Mapping[int, MachineFigures | None]
) -> AgreedFigures | None:
    """Figures for a group, from what each of its ranks offered when they met: a function of that alone, so
    that ranks of different files plan equally. None unless every host has figures that fit.

    Where the ranks of a host see fewer GPUs than they are, some share one. Which GPU each is on is not known
    yet: the first call over GPUs compares the slot with what it finds (transfers/gpu.py).
    """
    ranks_of = ranks_by_host(hosts)
    several = len(ranks_of) > 1
    offered = [_figures_of(ranks, offers) for ranks in ranks_of]
    known = [offer for offer in offered if offer is not None]
    if len(known) < len(ranks_of):
        return None
    shares = any(len(ranks) > _visible_to(ranks, offers) for ranks in ranks_of)
    wanted = known[0].wants
    transport = wanted if wanted != "auto" else "cuda_ipc" if shares and not several else "nccl"
    slot = figures_slot(transport, shares)
    found = []
    for ranks, offer in zip(ranks_of, known, strict=True):
        figures = offer.slots.get(slot)
        if figures is None or (several and not figures.out_rate):
            return None
        if len(ranks) > 1 and not figures.local_rate:
            return None
        found.append(figures)
    local = [each.local_rate or min(each.out_rate, each.in_rate) or 1 for each in found]
    rounds = [each.round_ns for each in found]
    round_ns = max(rounds) if all(rounds) else 0
    nics = [Nic(each.out_rate or rate, each.in_rate or rate) for each, rate in zip(found, local, strict=True)]
    described = [Host(ranks, (nic,), rate) for ranks, nic, rate in zip(ranks_of, nics, local, strict=True)]
    topology = Topology(described, round_ns / 1e3) if round_ns else Topology(described)
    return AgreedFigures(slot, topology, min(local), round_ns)


def _figures_of(ranks: Sequence[int], offers: Mapping[int, MachineFigures | None]) -> MachineFigures | None:
    """The offer of the lowest of these ranks that has figures."""
    own = (offers.get(rank) for rank in ranks)
    return next((offer for offer in own if offer is not None and offer.slots), None)


def _visible_to(ranks: Sequence[int], offers: Mapping[int, MachineFigures | None]) -> int:
    """Number of GPUs that these ranks see together."""
    seen = [offer.visible for rank in ranks if (offer := offers.get(rank)) is not None]
    return len({gpu for each in seen for gpu in each})


_known: list[MachineFigures | None] = []  # of this process, once it has looked; another one once that is old
_noted: set[str] = set()  # why figures were ignored: one line for each


def known_figures() -> MachineFigures | None:
    """Figures that this process offers to others; the file is read once, and after `keep_figures`."""
    known = _known
    if not known:
        known.append(_offered_figures())
    return known[0]


def forget_figures() -> None:
    """Has the next group read the file again, also where another thread is about to know the old one."""
    global _known
    _known = []


def _offered_figures() -> MachineFigures | None:
    # Without a file NVML is not asked, which may take long.
    folder = settings.figures_folder()
    if folder is None or not _may_have_figures(folder):
        return None
    machine = settings.gpu_machine()
    if machine is None:
        return None
    slots, why = stored_figures(machine)
    if why and why not in _noted:
        _noted.add(why)
        logging.getLogger("meshcast").warning("measured figures of GPUs are ignored: %s", why)
    # The others need no names of GPUs. They count those that this process sees, also where it has no figures.
    brief = {slot: replace(figures, domains=()) for slot, figures in slots.items()}
    return MachineFigures(settings.visible_gpus(machine), settings.CUDA_TRANSPORT.text(), brief)


def _may_have_figures(folder: Path) -> bool:
    try:
        return any(folder.glob("gpu-*.json"))
    except OSError:  # as where this user may not enter it: stored_figures says why
        return True


def figures_file(machine: settings.GpuMachine) -> Path | None:
    """Place of a machine's figures; None where none are kept. Machines that share a home folder have a file
    each."""
    folder = settings.figures_folder()
    gpus = json.dumps(sorted(machine.gpus)).encode()
    return None if folder is None else folder / f"gpu-{hashlib.sha256(gpus).hexdigest()[:16]}.json"


def stored_figures(machine: settings.GpuMachine) -> tuple[dict[str, GpuFigures], str]:
    """Figures of this machine by slot, and why some that are there are ignored; empty where none are."""
    path = figures_file(machine)
    try:
        if path is None or not path.exists():
            return {}, ""
    except OSError as error:
        named = settings.GPU_FIGURES.name
        return {}, f"{path}: {error.strerror}; let {named} name another folder, or {settings.NOWHERE}"
    try:
        reader = Reader(read_json(path, "figures"), "figures")
        reader.expect_format(_FIGURES_FORMAT)
        written = reader.value("machine")
        if not isinstance(written, dict):
            raise LayoutError(f"figures.machine: expected an object, found {checks.shown(written)}")
        here = _facts_of(machine)
        for name, found in here.items():
            if written.get(name) != found:
                given = checks.shown(written.get(name))
                return {}, (
                    f"{path} was measured with {name} {given}, here it is {checks.shown(found)}; call "
                    'meshcast.measure_topology(device="cuda") again'
                )
        slots = reader.child("figures")
        found = {name: _read_figures(slots.child(name)) for name in reader.value("figures")}
        reader.finish()
    except MeshcastError as error:
        return {}, f"{path} cannot be read: {error}; delete it"
    return found, ""


def _facts_of(machine: settings.GpuMachine) -> dict[str, Any]:
    """Surroundings that figures depend on."""
    from . import _C

    try:
        nccl = _C.nccl_version()
    except (AttributeError, MeshcastError):  # a build without CUDA, or no library
        nccl = ""
    gpus = [list(each) for each in sorted(machine.gpus)]
    return {"meshcast": settings.version(), "driver": machine.driver, "nccl": nccl, "gpus": gpus}


def _read_figures(reader: Reader) -> GpuFigures:
    domains = reader.items("domains")
    if not all(isinstance(each, list) and all(isinstance(u, str) for u in each) for each in domains):
        raise LayoutError(f"{reader.where}.domains: expected lists of texts")
    rates = [reader.integer(name, 0, _MAX_RATE) for name in ("local_rate", "out_rate", "in_rate")]
    if bool(rates[1]) != bool(rates[2]) or not any(rates):
        raise LayoutError(f"{reader.where}: the rates {rates} do not belong together")
    figures = GpuFigures(
        local_rate=rates[0],
        out_rate=rates[1],
        in_rate=rates[2],
        round_ns=reader.integer("round_ns", 0, _MAX_LATENCY_NS),
        ranks=reader.integer("ranks", 1, _MAX_RANK),
        measured=reader.integer("measured", 0, _LATEST),
        domains=tuple(map(tuple, domains)),
    )
    reader.finish()
    return figures


def keep_figures(machine: settings.GpuMachine | None, slot: str, figures: GpuFigures) -> str:
    """Writes the figures of a slot to the file of this machine, and keeps those of others. Returns why they
    could not be kept, "" where they were or where MESHCAST_GPU_FIGURES forbids it."""
    if machine is None:
        return "NVML, by which machines are distinguished, is missing"
    path = figures_file(machine)
    if path is None:
        return ""
    slots, _ = stored_figures(machine)
    slots[slot] = figures
    written = {
        "format": _FIGURES_FORMAT,
        "machine": _facts_of(machine),
        "figures": {name: _written(each) for name, each in slots.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=".gpu-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(written, indent=1) + "\n")
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _written(figures: GpuFigures) -> dict[str, Any]:
    return {**asdict(figures), "domains": [list(each) for each in figures.domains]}
