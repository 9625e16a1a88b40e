"""One rank of three to five is killed at a random moment. What the others do is judged here: each must raise
a typed error that names it, within two seconds, and then end.

A round is drawn from a seed alone, so that it can be run again. The moments are named for what the ranks are
doing; a rank that comes late makes the others wait there, so that a death finds them waiting.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Layout, Plan, Topology, plan
from torch.distributed.tensor import Placement, Replicate, Shard

__all__ = ["MOMENTS", "Kill", "Outcome", "Ranks", "draw", "ranks"]

ROOT = Path(__file__).resolve().parents[2]
_SEEN_WITHIN = 2.0  # seconds after the death, or after a rank's own call where that is later
_DESTROYED_WITHIN = 5.0  # seconds
_LATE = 1.2  # seconds by which a rank comes late: the others must not have to wait for it
_ROUND_LIMIT = 45.0  # seconds

# What is going on around the victim, and how many seconds from the begin of it the death may come.
MOMENTS = {
    "forming": 0.4,  # the first call of a group: ranks meet, connect, agree, and move
    "connecting": 0.05,  # the first messages of ranks that have met
    "agreeing": 0.4,  # the first use of a plan
    "moving": 0.15,  # 16 MiB, again and again, of a known plan
    "ending": 0.05,  # destroy_process_group
}


Part = tuple[list[int], str]  # a mesh, and how a tensor lies on it
PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
ROWS, COLUMNS = 30, 60  # of the smallest tensor: every rank has some of it


@dataclass(frozen=True)
class Kill:
    """A round: who dies when, of which ranks, in which call."""

    seed: int
    transport: str  # ucx, gloo, shared memory
    phase: str
    world: int
    victim: int
    delay: float  # seconds
    late: dict[str, float]  # seconds by rank, as JSON has it
    source: Part
    destination: Part
    rows: int  # of COLUMNS floats
    limit: float  # seconds, of each call
    calls: int = 1 << 20  # that a rank makes at most, until one fails


@dataclass(frozen=True)
class Outcome:
    """wrong: what must not be. before: the victim had not come to the group yet. times: seconds until each
    survivor knew; ended: until its process group was destroyed."""

    kill: Kill
    wrong: list[str]
    before: bool
    times: list[float]
    ended: list[float]
    said: list[dict[str, Any]]


def draw(seed: int, transport: str, phase: str) -> Kill:
    rng = random.Random(f"{seed} {transport} {phase}")
    world = rng.randint(3, 5)
    everyone = list(range(world))
    victim = rng.randrange(world)
    rows = 65536 if phase == "moving" else rng.choice([ROWS, 600, 20000])
    source, destination = _layouts(rng, world, [ROWS, rows])
    late = {}
    if phase in ("forming", "agreeing") and rng.random() < 0.6:
        late[str(rng.choice(everyone))] = _LATE  # it may be the victim, which dies before it calls
    return Kill(
        seed=seed,
        transport=transport,
        phase=phase,
        world=world,
        victim=victim,
        delay=rng.uniform(0.0, MOMENTS[phase]),
        late=late,
        source=source,
        destination=destination,
        rows=rows,
        limit=6.0 if phase == "forming" or transport == "gloo" else 20.0,
    )


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

    def run(self, kill: Kill) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        while True:
            self._number += 1
            head = {"port": self._store.port, "number": self._number, "round_limit": _ROUND_LIMIT}
            self._process.stdin.write(json.dumps({**asdict(kill), **head}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the ranks' parent has gone: {self._process.poll()}"
            said = json.loads(answer)
            if kill.phase != "ending" or said[kill.victim]["status"] != 0:
                return _judge(kill, said, self._came(kill))
            kill = replace(kill, delay=kill.delay / 2)  # it had ended before

    def _came(self, kill: Kill) -> bool:
        """Whether the victim had posted that it is there, when it died."""
        group = ",".join(map(str, range(kill.world)))
        return bool(self._store.check([f"round {self._number}/0//meshcast/{group}/0/member/{kill.victim}"]))


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The parent of the ranks of all rounds; it is gone when the block is left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Torch's store looks up the name of each client, which takes seconds where no name server answers.
    env["RES_OPTIONS"] = "attempts:0"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("kill_ranks.py"))],
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
            process.wait(_ROUND_LIMIT + 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _judge(kill: Kill, said: list[dict[str, Any]], came: bool) -> Outcome:
    wrong, times, ended = [], [], []
    dies_at = said[kill.victim].get("dies_at")
    before = kill.phase == "forming" and not came
    if dies_at is None or said[kill.victim]["status"] != -14:
        wrong.append(f"the victim did not die as it should: {said[kill.victim]}")
        dies_at = 0.0
    for rank, found in enumerate(said):
        if rank == kill.victim:
            continue
        who = f"rank {rank} "
        if found["status"] != 0:
            how = "hung" if found["status"] is None else f"ended with status {found['status']}"
            wrong.append(f"{who}{how}: {found['output']}")
            continue
        since = max(dies_at, found["begin"])
        # On a machine that is short of cores, the process is not gone as soon as it is killed.
        gone = max(said[kill.victim]["gone_at"] or since, since)
        ended.append(found["ended"] - max(since, found.get("seen", 0.0)))
        if ended[-1] > _DESTROYED_WITHIN:
            wrong.append(f"{who}took {ended[-1]:.1f} s to end its process group")
        if kill.phase == "ending":
            continue
        if "error" not in found:
            wrong.append(f"{who}never raised, in {found['calls']} calls")
            continue
        took = found["seen"] - max(since, found["seen"] - found["elapsed"])
        times.append(took)
        named = found["peer"] == kill.victim and f"rank {kill.victim}" in found["text"]
        if "WRONG BYTES" in found["output"] or not found["typed"]:
            wrong.append(f"{who}raised {found['error']}: {found['text']}")
        elif before:
            named = str(kill.victim) in found["text"]
            if not named or found["error"] not in ("DeadlineExceededError", "AbortedError"):
                wrong.append(f"{who}raised {found['error']}: {found['text']}")
        elif took > _SEEN_WITHIN + gone - since:
            wrong.append(f"{who}knew after {took:.2f} s, by {found['error']}: {found['text']}")
        elif not named:
            wrong.append(f"{who}blames rank {found['peer']}, by {found['error']}: {found['text']}")
        if found["again"]:
            wrong.append(f"{who}called again: {found['again']}")
    return Outcome(kill, wrong, before, times, ended, said)
