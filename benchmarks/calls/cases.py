"""What is compared: the ways a message can take, and the sizes, counts and worlds that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Carrier:
    """What two processes have loaded and set to exchange messages. Its ways share these processes."""

    name: str
    env: tuple[tuple[str, str], ...] = ()  # of its ranks
    backend: str = ""  # of torch.distributed, for its send and recv; "" for meshcast and programs in C
    btl: str = ""  # of Open MPI, which it is then
    one_host: bool = False  # its ranks know that they share one


_SEGMENT = str((512 + 16) << 10)  # bytes, kSegmentBytes of csrc/ucx/worker.h
CARRIERS = {
    "ucx": Carrier("meshcast, UCX", (("MESHCAST_TRANSPORT", "ucx"),)),
    "shm": Carrier("meshcast, shared memory", one_host=True),
    "gloo": Carrier("meshcast, gloo", (("MESHCAST_TRANSPORT", "gloo"),)),
    "torch": Carrier("torch, gloo", backend="gloo"),
    "mpi": Carrier("Open MPI", btl="tcp,self"),
    "mpi-shm": Carrier("Open MPI, shared memory", btl="vader,self"),
    # The settings of csrc/ucx/process_plane.cpp.
    "ucp": Carrier("UCX alone", (("UCX_TLS", "^sm,cuda,self"), ("UCX_NET_DEVICES", "lo"),
                                 ("UCX_TCP_TX_SEG_SIZE", _SEGMENT), ("UCX_TCP_RX_SEG_SIZE", _SEGMENT),
                                 ("UCX_MAX_RNDV_RAILS", "1"), ("UCX_MAX_EAGER_RAILS", "1"),
                                 ("UCX_MEM_EVENTS", "n"), ("UCX_DEBUG_SIGNO", "0"))),
    # Left to itself UCX takes shared memory, since its hosts are one machine here.
    "commux": Carrier("commux", (("UCX_TLS", "tcp,self"),), backend="commux"),
}  # fmt: skip
WORLDS = ("ucx", "gloo", "torch", "mpi", "commux")
"""Carriers whose first exchanges are measured."""
TRANSPORTS = {"ucx": "Between hosts, over TCP", "shm": "Inside a host"}
"""What is compared with each other, and its title."""


@dataclass(frozen=True)
class Way:
    """One way for bytes to get from process to process."""

    kind: str  # what `--ways` calls it
    name: str
    what: str
    carrier: str
    transports: tuple[str, ...]  # whose tables have it
    fresh: bool = False  # what arrives is in a tensor that the call has made
    latency_only: bool = False
    local: bool = False  # nothing travels
    colour: str = ""  # in the chart, which leaves out those without


_OURS = (
    ("reshard", "reshard", "`reshard` to the other rank's mesh", True),
    ("reshard_", "reshard_", "`reshard_` into a tensor that is there", False),
    ("Resharder", "Resharder",
     "`Resharder.run`, `reuse_output=True`; several at once `start` with `out=`", False),
    ("reshard_local", "reshard_local", "`reshard_local` with `dst=None`", True),
    ("backend", "backend", '`send` and `recv` of the backend "meshcast" into a tensor that is there', False),
    ("edge", "pipeline edge", "the transfers between two stages: values there, gradients back", True),
)  # fmt: skip
_STAY = (
    ("stays", "stays", "`reshard` to the same layout, which copies"),
    (
        "stays-gradient",
        "stays, gradient",
        "`reshard` to the same layout with a gradient, without its backward",
    ),
)
_COLOURS = {"ucx": "#1f5fa8", "shm": "#17becf"}


def key_of(way: Way) -> str:
    return f"{way.carrier}/{way.kind}"


def _ways() -> list[Way]:
    found = []
    for carrier in TRANSPORTS:
        for kind, name, what, fresh in _OURS:
            colour = _COLOURS[carrier] if kind == "Resharder" else ""
            found.append(Way(kind, name, what, carrier, (carrier,), fresh, colour=colour))
        found += [
            Way(kind, name, what, carrier, (carrier,), fresh=True, latency_only=True, local=True)
            for kind, name, what in _STAY
        ]
    both = tuple(TRANSPORTS)
    mpi = "`MPI_Send` and `MPI_Recv`, `btl` tcp or, inside a host, vader; waits without sleeping"
    return [
        *found,
        Way("Resharder", "Resharder, gloo", "`Resharder` with `MESHCAST_TRANSPORT=gloo`", "gloo", ("ucx",),
            colour="#9ecae9"),
        Way("gloo", "gloo", "`send` and `recv` of torch's gloo into a tensor that is there", "torch", both,
            colour="#f28e2b"),
        Way("gloo-fresh", "gloo, fresh", "gloo's into a `torch.empty` for each message", "torch", both,
            fresh=True),
        Way("mpi", "Open MPI", mpi, "mpi", ("ucx",), colour="#9c755f"),
        Way("mpi", "Open MPI", mpi, "mpi-shm", ("shm",), colour="#d7b5a6"),
        Way("ucp", "UCX alone", "`ucp_tag_send_nbx`, receives posted before; sleeps as meshcast", "ucp",
            ("ucx",), colour="#e15759"),
        Way("commux", "commux", "`isend` and `irecv` of its c10d backend over UCX's tcp", "commux", ("ucx",),
            colour="#59a14f"),
    ]  # fmt: skip


WAYS = {key_of(way): way for way in _ways()}
"""By key, in the order of the rows."""
PEERS = (("torch/gloo", "torch/gloo-fresh"), ("mpi/mpi", "mpi-shm/mpi"), ("ucp/ucp",))
"""By which ways those of meshcast are divided: a tuple for each peer."""

_AGAINST = "against "


def against(key: str) -> str:
    """The key, or the carrier, of another tree."""
    return _AGAINST + key


def is_against(key: str) -> bool:
    return key.startswith(_AGAINST)


def known(key: str) -> str:
    """The key, or the carrier, of this tree that is the same."""
    return key.removeprefix(_AGAINST)


def carrier_of(key: str) -> str:
    """The name of the processes that a way, also another tree's, is measured in."""
    return key.partition("/")[0]


def way_of(key: str) -> Way:
    """A way of this tree or of another."""
    way = WAYS[known(key)]
    return replace(way, name=f"{way.name}, other tree", colour="") if is_against(key) else way


_WINDOW = 8  # messages in flight
_IN_FLIGHT = 128 << 20  # bytes in flight


@dataclass(frozen=True)
class Size:
    """Of messages, in bytes."""

    nbytes: int

    @property
    def window(self) -> int:
        """Messages in flight in one direction."""
        return max(1, min(_WINDOW, _IN_FLIGHT // self.nbytes))

    @property
    def name(self) -> str:
        kib = self.nbytes >> 10
        return f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"


def sizes(kib: Sequence[int]) -> list[Size]:
    return [Size(each << 10) for each in kib]


SIZES = sizes((1, 4, 16, 64, 256, 1024, 4096, 16384, 65536))
CONNECTS = (2, 8, 16, 32, 64)
"""Ranks that exchange something with each other for the first time."""
GROUPS = (1, 20, 100)
"""Private groups of two ranks that idle."""
