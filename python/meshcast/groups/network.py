"""The network over which the hosts of a private group exchange messages: UCX, or gloo.

The network interfaces that private groups use: one gloo context for each, and messages that take them in
turns, so that any rank can send through all of them at once.

`MESHCAST_IFNAMES=eth0,eth1` names them, on all hosts equally many of about the same speed: the first one of a
host talks to the first ones of the others, and so on. Without it there is one, chosen by gloo
(`GLOO_SOCKET_IFNAME`).
"""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.util
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from .. import _C
from ..base import settings
from ..base.observe import log
from ..base.wire import pack, unpack
from ..errors import Caller, DeadlineExceededError, LayoutError, MeshcastError, PeerLostError
from .store import as_shortage, first_line, shortage

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = [
    "Network",
    "agreed_count",
    "connect",
    "device_names",
    "first_rails",
    "interfaces",
    "library",
    "plane",
    "rdma_devices",
]


_KEY = re.compile(r"gloo\d+/(?:[^/\s]+/)?(\d+)")


def interfaces() -> tuple[tuple[str, ...], str]:
    """The names, () for gloo's choice, and what this rank sends the others: their number, or why they are
    wrong here."""
    names = settings.IFNAMES.names()
    if problem := settings.IFNAMES.problem():
        return (), problem
    return names, str(len(names) or 1)


def agreed_count(gathered: Mapping[int, str], rank: int) -> int:
    """Interfaces of every host, from what the ranks sent: {rank: text of interfaces()}. Raises
    LayoutError, on every rank, where a name is wrong or hosts have different numbers."""
    caller = Caller("connect", rank, "connect")
    for other, text in sorted(gathered.items()):
        if not text.isdigit():
            raise caller.error(LayoutError, f"rank {other}: {text}", peer=other)
    if len(set(gathered.values())) > 1:
        found = ", ".join(f"{count} on rank {other}" for other, count in sorted(gathered.items()))
        raise caller.error(
            LayoutError,
            f"{settings.IFNAMES.name} must name equally many interfaces on every rank; found {found}",
        )
    return int(next(iter(gathered.values())))


def first_rails(ranks: Sequence[int], topology: Topology, count: int) -> list[int]:
    """The interface of each rank's first message to any other, by its position among the ranks of its host;
    the next message takes the next one."""
    rails = {rank: at % count for host in topology.hosts for at, rank in enumerate(host.ranks)}
    return [rails[rank] for rank in ranks]


def connect(
    store: Any, ranks: Sequence[int], rank: int, names: Sequence[str], deadline: float, timeout: float
) -> list[dist.ProcessGroupGloo]:
    """One gloo context of `ranks` for each interface, or one by gloo's choice. Blocks; `deadline` is by
    time.monotonic(), `timeout` (seconds) is what operations get later. Raises DeadlineExceededError or
    PeerLostError."""
    rails = []
    for index, name in enumerate(names or ("",)):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        how: Any = left
        if name:
            gloo: Any = dist.ProcessGroupGloo
            how = gloo._Options()
            how._timeout, how._threads = left, 2
            how._devices = [gloo.create_device(interface=name)]
        # Connecting waits in the store, and a wait blocks every other user of its connection: two groups that
        # connect at once over one connection could wait for each other for ever.
        try:
            rail = dist.ProcessGroupGloo(
                dist.PrefixStore(f"gloo{index}", store.clone()), ranks.index(rank), len(ranks), how
            )
        except Exception as error:
            raise _failed(error, ranks, rank, deadline) from error
        rail._set_default_timeout(timedelta(seconds=timeout))
        rails.append(rail)
    return rails


def _failed(error: Exception, ranks: Sequence[int], rank: int, deadline: float) -> MeshcastError:
    """For what gloo raises while it connects: it names a peer by the key under which that was to post its
    address, "gloo0/0/2" for the third rank."""
    caller = Caller("connect", rank, "connect")
    short = as_shortage(error, caller)
    if short is not None:
        return short
    named = _KEY.search(str(error))
    position = int(named[1]) if named else len(ranks)
    peer = ranks[position] if position < len(ranks) else None
    late = time.monotonic() >= deadline
    whom = "the others" if peer is None else f"rank {peer}"
    why = "within the limit; it is dead, stuck or unreachable" if late else f": {first_line(error)}"
    kind = DeadlineExceededError if late else PeerLostError
    text = f"connecting with {whom} of ranks {list(ranks)} over gloo failed {why}"
    return caller.error(kind, text, peer=peer)


_RDMA = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_SONAME = "libucp.so.0"
_environment = threading.Lock()  # private groups load the library in threads of their own


def _wheel() -> str | None:
    """Path of the library that the package libucx brings."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return str(path)
    return None


def _system() -> str | None:
    return _SONAME if ctypes.util.find_library("ucp") else None


def rdma_devices() -> list[str]:
    """The RDMA devices of this host, as the operating system names them."""
    return sorted(entry.name for entry in _RDMA.iterdir()) if _RDMA.is_dir() else []


def library() -> str:
    """Path or name of the UCX to load, by `MESHCAST_UCX`. Raises MeshcastError where there is none.

    The wheel has no InfiniBand transport; a distribution's UCX has. So a machine with RDMA devices takes that
    of the system, and any other the wheel, which is newer.
    """
    choice = settings.UCX.text()
    if choice == "wheel":
        found = _wheel()
    elif choice == "system":
        found = _system()
    elif choice != "auto":
        found = choice if Path(choice).is_file() else None
    elif rdma_devices():
        found = _system() or _wheel()
    else:
        found = _wheel() or _system()
    if found is None:
        raise MeshcastError(
            f"{settings.UCX.name} is {choice!r}, but there is no such UCX; install libucx-cu12 or the "
            f"system's libucx0, or set {settings.TRANSPORT.name}=gloo",
            op="connect",
            phase="connect",
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """UCX reads these while it is loaded: it would catch signals of the program, patch libc's mmap (which
    nothing but RDMA needs), and write to stderr what the errors say anyway. What the user has set stays."""
    wanted = {"UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
    if not rdma_devices():
        wanted["UCX_MEM_EVENTS"] = "n"
    with _environment:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _may_reach_hosts(name: str) -> bool:
    """Returns whether an interface is up and neither a loopback nor a bridge, as containers have: UCX takes
    bridges of two hosts that have the same addresses for one network."""
    flags = settings.interface_flags(name)
    return (
        bool(flags & settings.IFF_UP)
        and not flags & settings.IFF_LOOPBACK
        and not (_NET / name / "bridge").exists()
    )


def device_names() -> str:
    """The devices among which UCX chooses, "" for all; `UCX_NET_DEVICES` says otherwise."""
    if rdma_devices() or "UCX_NET_DEVICES" in os.environ:
        return ""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return named
    return ",".join(name for _, name in socket.if_nameindex() if _may_reach_hosts(name)) or "lo"


def plane(devices: Sequence[str], timeout: float) -> _C.UcxPlane:
    """The plane of this process; the first call makes it. devices: one for each rail, () for UCX's choice.
    timeout: seconds within which a peer that the network has lost is noticed. Raises MeshcastError."""
    if not hasattr(_C, "UcxPlane"):
        raise MeshcastError(
            "this copy of meshcast was built without the headers of UCX", op="connect", phase="connect"
        )
    with _quiet():
        return _C.UcxPlane(library(), list(devices) or [device_names()], timeout, bool(rdma_devices()))


_told: set[str] = set()


class _NetworkOffer(NamedTuple):
    """A rank's network, as the others have to know it. kind: "ucx"; "gloo"; or "none", and why. The
    rest is of UCX: the form of its messages, and what UcxPlane.address() returns; the nonce makes each
    connection another one."""

    kind: str
    why: str = ""
    form: int = 0
    process: int = 0
    rails: tuple[bytes, ...] = ()
    breaks: dict[int, int] = {}  # noqa: RUF012  never written
    nonce: str = ""

    @property
    def member(self) -> tuple[int, tuple[bytes, ...], dict[int, int]]:
        """The rank as the plane takes it."""
        return self.process, self.rails, self.breaks


class Network:
    """One rank's end, from its offer, a text, to the transport.

    names: the interfaces to use, () for the library's choice. choice: a transport, else that which
    `MESHCAST_TRANSPORT` names. Where this rank cannot have it, `failure` and its offer say so, and
    transport() raises on every rank.
    """

    def __init__(self, names: Sequence[str], timeout: float, choice: str = "") -> None:
        self._names, self._timeout = names, timeout
        self._plane: _C.UcxPlane | None = None
        self.failure = ""
        try:
            choice = choice or settings.TRANSPORT.choice()
            if choice != "gloo":
                self._plane = plane(names, timeout)
        except MeshcastError as error:
            if shortage(error):  # the caller reports it: gloo needs threads and descriptors, too
                raise
            if choice != "auto":
                self.failure = str(error)
            elif str(error) not in _told:
                log.warning("hosts exchange messages over gloo, since UCX cannot be used: %s", error)
                _told.add(str(error))

    def offer(self) -> str:
        """Returns what the other ranks have to know."""
        if self.failure:
            return pack(_NetworkOffer("none", self.failure))
        if self._plane is None:
            return pack(_NetworkOffer("gloo"))
        process, rails, breaks = self._plane.address()
        form, nonce = _C.UcxPlane.WIRE, secrets.token_hex(8)
        return pack(_NetworkOffer("ucx", "", form, process, tuple(rails), breaks, nonce))

    def watch(self, offer: str) -> Callable[[], str] | None:
        """Returns a function that says why the rank that made this offer has left, "" while that is not
        known; None over gloo, which knows no rank before all have connected."""
        read = unpack(_NetworkOffer, offer)
        if self._plane is None or read.kind != "ucx":
            return None
        return self._plane.watch(read.member)

    def transport(
        self, offers: Mapping[int, str], first_rail: list[int], rank: int, store: Any, deadline: float
    ) -> _C.Transport:
        """Connects with the ranks of `offers`, or is ready to. Blocks; deadline: by time.monotonic().

        Raises LayoutError, on every rank, where one has none or they do not all use the same."""
        caller = Caller("connect", rank, "connect")
        ranks = list(offers)
        read = {other: unpack(_NetworkOffer, text) for other, text in offers.items()}
        for other, offer in read.items():
            if offer.kind == "none":
                raise caller.error(LayoutError, f"rank {other}: {offer.why}", peer=other)
        if len({offer.kind for offer in read.values()}) > 1:
            found = ", ".join(f"{offer.kind} on rank {other}" for other, offer in read.items())
            raise caller.error(
                LayoutError,
                f"all ranks must use one transport, found {found}; set {settings.TRANSPORT.name} to the "
                "same, or install UCX everywhere",
            )
        if len({offer.form for offer in read.values()}) > 1:
            found = ", ".join(f"{offer.form or 'none'} on rank {other}" for other, offer in read.items())
            raise caller.error(
                LayoutError,
                "all ranks must run one version of meshcast: they send each other different forms of "
                f"messages, found {found}; install the same version everywhere",
            )
        if self._plane is None:
            rails = connect(store, ranks, rank, self._names, deadline, self._timeout)
            return _C.gloo_transport(rails, first_rail, ranks.index(rank))
        digest = hashlib.sha256("\n".join(offers.values()).encode()).digest()
        members = [offer.member for offer in read.values()]
        return self._plane.join(int.from_bytes(digest[:8], "big"), members, ranks.index(rank), first_rail)
