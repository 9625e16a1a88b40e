"""Draws exits of processes, in every state, and runs them: see test_exits.py and exit_ranks.py.

A round is three ranks in processes of their own. One of them, or all, leave in the drawn way at the drawn
moment, in the middle of what ranks do. No process may crash or hang, and those that stay get typed errors.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from multiproc.fork_server import Forked, environment

__all__ = ["Exit", "draw", "run"]

LIMIT = 90.0  # seconds of a round; a call in it has 8, a collective of gloo 20
WORLD = 3

STATES = ("imported", "idle", "in flight", "waiting", "meeting", "failed", "destroyed", "messages")
WAYS = {  # and the exit status
    "return": 0,
    "sys.exit": 0,
    "raise": 1,
    "os._exit": 0,
    "exit in a thread": 0,
    "SIGTERM": -signal.SIGTERM,
    "SIGHUP": -signal.SIGHUP,
    "SIGTERM handled": 7,
    "SIGINT": -signal.SIGINT,
}
BACKENDS = ("gloo", "meshcast")
TRANSPORTS = ("shared memory", "ucx", "gloo")


@dataclass(frozen=True)
class Exit:
    seed: int
    state: str
    way: str
    backend: str
    transport: str
    everybody: bool  # else rank `victim` alone
    victim: int
    delay: float  # seconds


def draw(seed: int) -> Exit:
    rng = random.Random(seed)
    state = rng.choice(STATES)
    return Exit(
        seed=seed,
        state=state,
        way=rng.choice(list(WAYS)),
        backend="meshcast" if state == "messages" else rng.choice(BACKENDS),
        transport="ucx" if state == "messages" else rng.choice(TRANSPORTS),  # else they are gloo's
        everybody=rng.random() < 0.4,
        victim=rng.randrange(WORLD),
        delay=rng.choice([0.0, 0.0, rng.uniform(0.0, 0.3)]),
    )


def run(what: Exit) -> list[str]:
    """What must not be."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = environment({"MESHCAST_SHM": str(int(what.transport == "shared memory"))})
    env["MESHCAST_TRANSPORT"] = "gloo" if what.transport == "gloo" else "auto"
    program = str(Path(__file__).with_name("exit_ranks.py"))
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, program, json.dumps(asdict(what)), str(store.port)]
        process = Forked(command, env=env, stdout=subprocess.PIPE, stderr=output, text=True)
        try:
            said, _ = process.communicate(timeout=LIMIT + 30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            said = ""
        output.seek(0)
        text = output.read()
    if not said:
        return [f"{what}: the ranks' parent said nothing: {text[-4000:]}"]
    wrong = []
    for rank, found in enumerate(json.loads(said)):
        leaves = what.everybody or rank == what.victim
        wanted = WAYS[what.way] if leaves else 0
        how = f"rank {rank} ended with {found['status']} instead of {wanted}: {found['output'][-3000:]}"
        if found["status"] != wanted:
            wrong.append(how)
        for crash in ("terminate called", "Segmentation fault", "Fatal Python error", "not rethrown"):
            if crash in found["output"]:
                wrong.append(f"rank {rank}: {crash}: {found['output'][-3000:]}")
    return [f"{what}: {each}" for each in wrong]
