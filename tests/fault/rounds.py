"""What a round of the fault matrix is: which rank of which fails how, at which moment of which call. Drawn
from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from meshcast import Layout, Plan, Topology, plan
from torch.distributed.tensor import Placement, Replicate, Shard

__all__ = [
    "BY_CLOCK",
    "BY_POINT",
    "COLUMNS",
    "FAULTS",
    "PLACEMENTS",
    "ROWS",
    "TRANSPORTS",
    "Round",
    "combinations",
    "control",
    "draw",
]

TRANSPORTS = ("ucx", "shared memory", "gloo")
_LATE = 1.2  # seconds by which a rank comes late: the others must not have to wait for it


# By the clock: what is going on around the victim, and how many seconds from the begin of it the fault may
# come.
BY_CLOCK = {
    "forming": 0.4,  # the first call of a group: ranks meet, connect, agree, and move
    "connecting": 0.05,  # the first messages of ranks that have met
    "agreeing": 0.4,  # the first use of a plan
    "moving": 0.15,  # 16 MiB, again and again, of a known plan
    "ending": 0.05,  # destroy_process_group
}
# By the fault points that may be chosen, and the share of their passes in a call after which one strikes.
BY_POINT: dict[str, tuple[tuple[str, ...], float]] = {
    "before connect": ((), 0.0),  # the rank does not come to its first call
    "connect": (("join", "greet", "link"), 0.0),
    "agree": (("agree",), 0.0),
    "first": (("send", "arrive", "fragment"), 0.0),
    "middle": (("send", "arrive", "fragment"), 0.5),
    "last": (("send", "arrive", "fragment"), 1.0),
    "completion": (("complete",), 0.0),
    "destroy": (("leave",), 0.0),
}
TRANSFER = ("first", "middle", "last", "completion")
FORMING = ("forming", "before connect", "connect")
ENDING = ("ending", "destroy")

# What each does is in matrix_ranks.py. By kind:
DEATHS = {"kill": -9, "exit": 1, "abort": -6}  # with the status that the process ends with
SILENCES = ("stop", "gil", "too late")  # a rank that says nothing until the limit, and may go on then
BREAKS = ("reset", "half")  # its connections end, it lives
DELAYS = ("late", "slow")  # it is slow, but within the limit
# Besides, a rank may raise and tell the others.
FAULTS: dict[str, tuple[str, ...]] = {  # the moments of each
    **dict.fromkeys(DEATHS, tuple(BY_POINT)),
    "stop": tuple(BY_POINT),
    "reset": ("agree", *TRANSFER),
    "half": ("agree", *TRANSFER),
    "gil": ("before connect", "agree", "first"),
    "too late": ("before connect", "agree", "first"),
    "late": ("before connect", "agree", "first"),
    "slow": ("first",),
    "memory": ("connect", "agree", "first"),
    "cuda": ("agree", "first"),
}

Part = tuple[list[int], str]  # a mesh, and how a tensor lies on it
PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
ROWS, COLUMNS = 30, 60  # of the smallest tensor: every rank has some of it


@dataclass(frozen=True)
class Round:
    """Who fails how and when, of which ranks, in which call."""

    seed: int
    transport: str
    fault: str  # "none": the control
    moment: str
    world: int
    victim: int
    store: int  # the rank that the rendezvous store is on, -1: none of them
    point: str  # "": by the clock
    share: float
    delay: float  # seconds, by the clock; else of faults that take time
    late: dict[str, float]  # seconds by rank, as JSON has it
    source: Part
    destination: Part
    rows: int  # of COLUMNS floats
    limit: float  # seconds, of each call
    gpu: bool  # the source is on GPUs, which are fake ones
    thaws: bool  # a frozen rank goes on once the others have ended; else it is killed
    calls: int = 1 << 20  # that a rank makes at most, until one fails

    def __str__(self) -> str:
        return (
            f"python -m fault.matrix {self.seed} --transport '{self.transport}' --fault '{self.fault}' "
            f"--moment '{self.moment}': {asdict(self)}"
        )


def draw(seed: int, transport: str, fault: str, moment: str, *, rows_to_columns: bool = False) -> Round:
    """rows_to_columns: between the same ranks, each of which sends to each."""
    rng = random.Random(f"{seed} {transport} {fault} {moment}")
    world = rng.randint(3, 5)
    everyone = list(range(world))
    victim = rng.randrange(world)
    rows = 65536 if moment in ("moving", *TRANSFER) else rng.choice([ROWS, 600, 20000])
    source, destination = _layouts(rng, world, [ROWS, rows])
    if rows_to_columns:
        source, destination = (everyone, "rows"), (everyone, "columns")
    if fault == "cuda":
        source = (everyone, "rows")  # the victim has something to copy from its GPU, and to send
        # Each needs something from each: else it may complete the refused call, and wait in a later one.
        destination = (everyone, "whole" if destination[1] == "whole" else "columns")
        rows = ROWS if moment == "agree" else 600
    late = {}
    if moment in ("forming", "agreeing") and rng.random() < 0.6:
        late[str(rng.choice(everyone))] = _LATE  # it may be the victim, which fails before it calls
    limit = 4.0 if moment in FORMING or transport == "gloo" else 20.0
    limit = 4.0 if fault in (*SILENCES, "late") else 60.0 if fault == "slow" else limit
    points, share = BY_POINT.get(moment, ((), 0.0))
    if transport == "shared memory":
        points = tuple(point for point in points if point != "link")
    else:
        points = tuple(point for point in points if point != "greet")
    if transport == "gloo":
        points = tuple(point for point in points if point not in ("link", "fragment"))
    if fault == "slow":
        points = ("send", "arrive")
    if fault == "memory":  # what a user's thread or the control thread asks for
        points = ("start",) if moment == "first" else points
    delay = rng.uniform(0.0, BY_CLOCK.get(moment, 0.0))
    delay = {"gil": limit + 3.0, "too late": limit + 1.0, "late": limit - 1.5, "slow": 0.3}.get(fault, delay)
    return Round(
        seed=seed,
        transport=transport,
        fault=fault,
        moment=moment,
        world=world,
        victim=victim,
        store=-1 if moment == "forming" else rng.choice([-1, -1, -1, (victim + 1) % world]),
        point=rng.choice(points) if points and fault not in ("gil", "late", "too late", "cuda") else "",
        share=share,
        delay=delay,
        late=late,
        source=source,
        destination=destination,
        rows=rows,
        limit=limit,
        gpu=fault == "cuda",
        thaws=rng.random() < 0.7,
    )


def control(round_: Round) -> Round:
    """The same without the fault."""
    return replace(round_, fault="none", calls=3, late={})


def _layouts(rng: random.Random, world: int, rows: list[int]) -> tuple[Part, Part]:
    """Meshes and placements under which every rank exchanges something with others, and none of them could go
    on for ever without the rest."""
    everyone = range(world)
    hosts = Topology.from_hosts({rank: f"host {rank}" for rank in everyone})
    while True:
        source = sorted(rng.sample(everyone, rng.randint(1, world)))
        rest = [rank for rank in everyone if rank not in source]
        destination = sorted({*rest, *rng.sample(everyone, rng.randint(1, world))})
        give, take = rng.choice(list(PLACEMENTS)), rng.choice(list(PLACEMENTS))
        before, after = Layout(source, [PLACEMENTS[give]]), Layout(destination, [PLACEMENTS[take]])
        plans = [plan((each, COLUMNS), torch.float32, before, after, hosts) for each in rows]
        if all(_connected(each, world) for each in plans):
            return (source, give), (destination, take)


def _connected(found: Plan, world: int) -> bool:
    reached = {0}
    for _ in range(world):
        for hop in found.transfers:
            if hop.src in reached or hop.dst in reached:
                reached |= {hop.src, hop.dst}
    return len(reached) == world


def combinations(
    transports: Sequence[str], faults: Sequence[str], moments: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Transport, fault and moment, as far as these go together."""
    return [
        (transport, fault, moment)
        for fault in faults
        for moment in moments
        for transport in transports
        if moment in FAULTS[fault] or (moment in BY_CLOCK and fault in ("kill", "stop"))
        if fault not in BREAKS or transport != "shared memory"  # which has no connections
    ]
