"""Faults by moments: one of three to five ranks fails, and what the others do is judged here. Each must raise
a typed error that names it, in time, give back no wrong byte, and then end.

A round is drawn from a seed, so that it can be run again:

    PYTHONPATH=python:tests:. python -m fault.matrix 17 --transport gloo --fault stop --moment middle

Moments are by the clock, which any build has, or by a fault point (csrc/core/common/fault_point.h), which
`make faults` builds. Every round has a control: the same without the fault, which must not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Layout, Plan, Topology, plan
from torch.distributed.tensor import Placement, Replicate, Shard

__all__ = [
    "BY_CLOCK",
    "BY_POINT",
    "FAULTS",
    "TRANSPORTS",
    "Outcome",
    "Ranks",
    "Round",
    "control",
    "draw",
    "ranks",
]

ROOT = Path(__file__).resolve().parents[2]
FAULT_BUILD = ROOT / "build/faults/python"
TRANSPORTS = ("ucx", "shared memory", "gloo")
_SEEN_WITHIN = 2.0  # seconds after the death, or after a rank's own call where that is later
_TOLD_WITHIN = 3.0  # seconds, of a refusal: who stands still in a known call looks for one after two
_ENDED_WITHIN = 5.0  # seconds, of destroy_process_group
_LATE = 1.2  # seconds by which a rank comes late: the others must not have to wait for it
_ROUND_LIMIT = 60.0  # seconds

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
_KNOWN = (
    "moving",
    "ending",
    "first",
    "middle",
    "last",
    "completion",
    "destroy",
)  # of a plan agreed on before
_TRANSFER = ("first", "middle", "last", "completion")
_FORMING = ("forming", "before connect", "connect")
_ENDING = ("ending", "destroy")

# What each does is in matrix_ranks.py. By kind:
_DEATHS = {"kill": -9, "exit": 1, "abort": -6}  # with the status that the process ends with
_SILENCES = ("stop", "gil", "too late")  # a rank that says nothing until the limit, and may go on then
_BREAKS = ("reset", "half")  # its connections end, it lives
_REFUSALS = ("memory", "cuda")  # it raises, and tells the others
_DELAYS = ("late", "slow")  # it is slow, but within the limit
FAULTS: dict[str, tuple[str, ...]] = {  # the moments of each
    **dict.fromkeys(_DEATHS, tuple(BY_POINT)),
    "stop": tuple(BY_POINT),
    "reset": ("agree", *_TRANSFER),
    "half": ("agree", *_TRANSFER),
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


@dataclass(frozen=True)
class Outcome:
    """wrong: what must not be. before: the victim had not come to the group yet. times: seconds until each
    survivor knew; ended: until its process group was destroyed."""

    round: Round
    wrong: list[str]
    before: bool
    times: list[float]
    ended: list[float]
    said: list[dict[str, Any]]


def draw(seed: int, transport: str, fault: str, moment: str, *, rows_to_columns: bool = False) -> Round:
    """rows_to_columns: between the same ranks, each of which sends to each."""
    rng = random.Random(f"{seed} {transport} {fault} {moment}")
    world = rng.randint(3, 5)
    everyone = list(range(world))
    victim = rng.randrange(world)
    rows = 65536 if moment in ("moving", *_TRANSFER) else rng.choice([ROWS, 600, 20000])
    source, destination = _layouts(rng, world, [ROWS, rows])
    if rows_to_columns:
        source, destination = (everyone, "rows"), (everyone, "columns")
    if fault == "cuda":
        source = (everyone, "rows")  # the victim has something to copy from its GPU
        rows = ROWS if moment == "agree" else 600
    late = {}
    if moment in ("forming", "agreeing") and rng.random() < 0.6:
        late[str(rng.choice(everyone))] = _LATE  # it may be the victim, which fails before it calls
    limit = 6.0 if moment in _FORMING or transport == "gloo" else 20.0
    limit = 4.0 if fault in (*_SILENCES, "late") else limit
    points, share = BY_POINT.get(moment, ((), 0.0))
    if transport == "shared memory":
        points = tuple(point for point in points if point != "link")
    else:
        points = tuple(point for point in points if point != "greet")
    if transport == "gloo":
        points = tuple(point for point in points if point not in ("link", "fragment"))
    if fault == "memory":  # what a user's thread or the control thread asks for
        points = ("start",) if moment == "first" else points
    delay = rng.uniform(0.0, BY_CLOCK.get(moment, 0.0))
    delay = {"gil": limit + 3.0, "too late": limit + 1.0, "late": limit - 1.5, "slow": 0.05}.get(fault, delay)
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


class Ranks:
    """Where rounds are run, one after the other."""

    def __init__(self, process: subprocess.Popen[str], store: dist.TCPStore) -> None:
        self._process, self._store, self._number = process, store, 0

    def run(self, round_: Round, *, fails_like: str = "") -> Outcome:
        """fails_like: a control is judged as a round with this fault."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        while True:
            self._number += 1
            head = {"port": self._store.port, "number": self._number, "round_limit": _ROUND_LIMIT}
            self._process.stdin.write(json.dumps({**asdict(round_), **head}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the ranks' parent has gone: {self._process.poll()}"
            said = json.loads(answer)
            if round_.moment != "ending" or said[round_.victim]["status"] != 0 or round_.fault == "none":
                judged = replace(round_, fault=fails_like) if fails_like else round_
                return _Judge(judged, said, self._came(round_)).outcome()
            round_ = replace(round_, delay=round_.delay / 2)  # it had ended before

    def fails_without_fault(self, round_: Round) -> str:
        """Runs the control. What the assertion of the round finds there must be that nothing has failed; ""
        where it is just that."""
        outcome = self.run(control(round_), fails_like=round_.fault)
        expected = [] if round_.moment in _ENDING else list(range(round_.world))
        missing = [
            rank
            for rank in expected
            if rank != round_.victim
            and not any(text.startswith(f"rank {rank} never") for text in outcome.wrong)
        ]
        if not outcome.wrong or missing:
            return f"the control passes on ranks {missing}: {outcome.wrong}"
        others = [text for text in outcome.wrong if " never " not in text and "did not fail" not in text]
        return f"the control fails otherwise: {others}" if others else ""

    def _came(self, round_: Round) -> bool:
        """Whether the victim had posted that it is there, when it failed."""
        if round_.store >= 0:
            return True
        group = ",".join(map(str, range(round_.world)))
        key = f"round {self._number}/0//meshcast/{group}/0/member/{round_.victim}"
        return bool(self._store.check([key]))


@contextmanager
def ranks(*, points: bool) -> Iterator[Ranks]:
    """The parent of the ranks of all rounds; it is gone when the block is left. points: of the build that has
    them."""
    built = FAULT_BUILD if points else ROOT / "python"
    assert list((built / "meshcast").glob("_C.*.so")), (
        f"{built} has no _C: run `make {'faults' if points else ''}`"
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join([str(built), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Torch's store looks up the name of each client, which takes seconds where no name server answers.
    env["RES_OPTIONS"] = "attempts:0"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("matrix_ranks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    try:
        yield Ranks(process, store)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_ROUND_LIMIT + 10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Judge:
    """What is wrong with what the ranks of a round say."""

    def __init__(self, round_: Round, said: list[dict[str, Any]], came: bool) -> None:
        self._round, self._said = round_, said
        self._wrong: list[str] = []
        self._times: list[float] = []
        self._ended: list[float] = []
        self._at = said[round_.victim].get("failed_at")  # by time.monotonic()
        self._before = round_.moment == "before connect" or (round_.moment in _FORMING and not came)

    def outcome(self) -> Outcome:
        round_ = self._round
        self._victim(self._said[round_.victim])
        for rank, found in enumerate(self._said):
            if rank != round_.victim and self._lives(rank, found) and round_.moment not in _ENDING:
                self._survivor(f"rank {rank} ", found)
        return Outcome(round_, self._wrong, self._before, self._times, self._ended, self._said)

    def _victim(self, found: dict[str, Any]) -> None:
        round_ = self._round
        wanted: tuple[Any, ...] = (_DEATHS.get(round_.fault, 0),)
        if round_.fault == "kill" and not round_.point:
            wanted = (-9, -14)
        if round_.fault == "stop" and not round_.thaws:
            wanted = (-9,)
        if self._at is None or found["status"] not in wanted:
            self._wrong.append(f"the victim did not fail as it should: {found}")
            self._at = self._at or 0.0
            return
        if wanted != (0,) or round_.moment in _ENDING:
            return
        who = f"rank {round_.victim}, the victim, "
        if "WRONG BYTES" in found["output"]:
            self._wrong.append(f"{who}has wrong bytes")
        if round_.fault in _DELAYS:
            if "error" in found:
                self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
        elif "error" not in found:
            self._wrong.append(f"{who}never raised, in {found['calls']} calls")
        elif not found["typed"]:
            self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
        if found["destroyed"] > _ENDED_WITHIN:
            self._wrong.append(f"{who}took {found['destroyed']:.1f} s to end its process group")

    def _lives(self, rank: int, found: dict[str, Any]) -> bool:
        if found["status"] != 0:
            how = "hung" if found["status"] is None else f"ended with status {found['status']}"
            self._wrong.append(f"rank {rank} {how}: {found['output']}")
            return False
        self._ended.append(found["destroyed"])
        if found["destroyed"] > _ENDED_WITHIN:
            self._wrong.append(f"rank {rank} took {found['destroyed']:.1f} s to end its process group")
        return True

    def _survivor(self, who: str, found: dict[str, Any]) -> None:
        round_ = self._round
        if "WRONG BYTES" in found["output"]:
            self._wrong.append(f"{who}has wrong bytes: {found['text']}")
        if round_.fault in _DELAYS:
            if "error" in found:
                self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
            elif found["longest"] < (0.5 * round_.delay if round_.fault == "late" else 2 * round_.delay):
                self._wrong.append(f"{who}never waited: {found['longest']:.2f} s")
            self._times.append(found["longest"])
            return
        if "error" not in found:
            self._wrong.append(f"{who}never raised, in {found['calls']} calls")
            return
        since = max(self._at, found["begin"])
        called = found["seen"] - found["elapsed"]
        took = found["seen"] - max(since, called)
        self._times.append(took)
        what = f"by {found['error']}: {found['text']}"
        named = found["peer"] == round_.victim or f"rank {round_.victim}" in found["text"]
        if not found["typed"]:
            self._wrong.append(f"{who}raised {what}")
        elif self._at_limit():
            named = named or str(round_.victim) in found["text"]
            most = round_.limit * 1.5 if round_.limit >= 4.0 else round_.limit + 2.0
            if found["elapsed"] > most:
                self._wrong.append(f"{who}knew {found['elapsed']:.2f} s after its call, {what}")
        else:
            # On a machine that is short of cores, the process is not gone as soon as it is killed.
            gone = self._said[round_.victim]["gone_at"] if round_.fault in _DEATHS else None
            most = _TOLD_WITHIN if round_.fault == "cuda" else _SEEN_WITHIN
            if took > most + max(0.0, (gone or since) - since):
                self._wrong.append(f"{who}knew after {took:.2f} s, {what}")
        if not named:
            self._wrong.append(f"{who}blames rank {found['peer']}, {what}")
        # A refusal while ranks agree moves nothing, and leaves the group in use.
        if found["again"] and not (round_.fault == "cuda" and round_.moment == "agree"):
            self._wrong.append(f"{who}called again: {found['again']}")
        if found.get("without"):
            self._wrong.append(f"{who}went on without the victim: {found['without']}")

    def _at_limit(self) -> bool:
        """Whether only the limit can tell, as docs/errors.md says."""
        round_ = self._round
        if round_.fault in _SILENCES or self._before:
            return True
        # Over gloo a death is seen by those alone who exchange bytes with the dead rank.
        return round_.transport == "gloo" and round_.moment in (*_FORMING, "connecting", "agree", "agreeing")


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
        if fault not in _BREAKS or transport != "shared memory"  # which has no connections
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fault.matrix", description="Runs rounds and their controls, until the time is up."
    )
    parser.add_argument("seed", type=int, help="of the first round; each has the next one")
    parser.add_argument("--transport", nargs="*", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moment", nargs="*", choices=[*BY_CLOCK, *BY_POINT], default=[*BY_CLOCK, *BY_POINT])
    parser.add_argument("--times", type=int, default=1, help="rounds of each combination")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no round begins")
    args = parser.parse_args()
    found = combinations(args.transport, args.fault, args.moment) * args.times
    random.Random(args.seed).shuffle(found)
    end, done, bad = time.monotonic() + args.seconds, 0, 0
    with ranks(points=True) as parent:
        for number, (transport, fault, moment) in enumerate(found):
            if time.monotonic() > end:
                break
            round_ = draw(args.seed + number, transport, fault, moment)
            outcome = parent.run(round_)
            wrong = [*outcome.wrong, parent.fails_without_fault(round_)]
            done += 1
            bad += any(wrong)
            if any(wrong):
                print(round_, *filter(None, wrong), f"seconds: {outcome.times}", sep="\n  ", flush=True)
    print(f"{done} rounds and as many controls, {bad} not as promised")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
