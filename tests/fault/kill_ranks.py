"""The ranks of rounds in which one rank is killed: see kills.py, which starts this and reads what it prints.

Imports torch and meshcast once, then forks the ranks of each round: a line of JSON on stdin is a round, a
line on stdout is what became of its ranks. A rank that is still there at the round's limit prints its stacks
into its output and is killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from fault.kills import COLUMNS, PLACEMENTS, ROWS
from meshcast import Layout, MeshcastError

_MOST_SECONDS = 30.0  # that a rank repeats its call, waiting for the death to be seen


def main() -> None:
    for name in meshcast.__all__:
        getattr(meshcast, name)  # imports the module that has it
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(what: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank: its exit status (negative: the signal), what it said, and its output where that is of use."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run here, of which a fork copies only one"
    with tempfile.TemporaryDirectory(prefix="meshcast-kill-") as name:
        folder = Path(name)
        children = {}
        for rank in range(what["world"]):
            child = os.fork()
            if child == 0:
                os._exit(_become_rank(rank, what, folder))
            children[child] = rank
        statuses: dict[int, int | None] = dict.fromkeys(range(what["world"]))
        gone: dict[int, float] = {}
        end = time.monotonic() + what["round_limit"]
        for number in (0, signal.SIGUSR1, signal.SIGKILL):
            for child in children if number else ():
                os.kill(child, number)
            while children and (number == signal.SIGKILL or time.monotonic() < end):
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    time.sleep(0.002)
                elif number == 0:
                    gone[children[child]] = time.monotonic()
                    statuses[children.pop(child)] = os.waitstatus_to_exitcode(status)
                else:
                    del children[child]  # it hung: no status
            end += 1.0
        return [
            {**_result(folder, rank, status), "gone_at": gone.get(rank)} for rank, status in statuses.items()
        ]


def _result(folder: Path, rank: int, status: int | None) -> dict[str, Any]:
    said = folder / f"{rank}.json"
    found = json.loads(said.read_text()) if said.exists() else {}
    output = (folder / f"{rank}.out").read_text(errors="replace")
    return {"status": status, "output": output[-4000:], **found}


def _become_rank(rank: int, what: dict[str, Any], folder: Path) -> int:
    output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (output, 1), (output, 2)):
        os.dup2(here, there)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["MESHCAST_TRANSPORT"] = "gloo" if what["transport"] == "gloo" else "ucx"
    if what["transport"] != "shared memory":
        os.environ["MESHCAST_HOST_ID"] = f"host {rank}"
    try:
        found = _Rank(rank, what, folder).live()
    except BaseException:
        traceback.print_exc()
        return 1
    _say(folder, rank, found)
    return 0


def _say(folder: Path, rank: int, what: dict[str, Any]) -> None:
    path = folder / f"{rank}.part"
    path.write_text(json.dumps(what))
    path.rename(folder / f"{rank}.json")


class _Rank:
    def __init__(self, rank: int, what: dict[str, Any], folder: Path) -> None:
        self._rank, self._what, self._folder = rank, what, folder
        self._ranks = list(range(what["world"]))
        self._victim = rank == what["victim"]

    def live(self) -> dict[str, Any]:
        what = self._what
        store = dist.TCPStore("127.0.0.1", what["port"], is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"round {what['number']}", store),
            rank=self._rank,
            world_size=what["world"],
            timeout=timedelta(seconds=60),
        )
        phase, late = what["phase"], what["late"].get(str(self._rank), 0.0)
        if phase in ("moving", "ending"):
            self._call(60.0)
            self._call(60.0)
        elif phase == "agreeing":
            self._call(60.0, rows=ROWS + 1)
        elif phase == "connecting":
            meshcast.prepare(self._ranks)
        dist.barrier()
        if self._victim:
            # The kernel ends the process then, whatever it is in the middle of.
            at = time.monotonic() + what["delay"]
            _say(self._folder, self._rank, {"dies_at": at})
            signal.setitimer(signal.ITIMER_REAL, max(at - time.monotonic(), 1e-6))
        time.sleep(late)
        begin = time.monotonic()
        found: dict[str, Any] = {"begin": begin}
        if phase != "ending":
            found |= self._until_failure(what["limit"])
        ends = time.monotonic()
        dist.destroy_process_group()
        return {**found, "destroyed": time.monotonic() - ends, "ended": time.monotonic()}

    def _until_failure(self, limit: float) -> dict[str, Any]:
        """Repeats the call: a rank that has done its part of one before the death meets it in a later one."""
        end = time.monotonic() + _MOST_SECONDS
        calls = 0
        while calls < self._what["calls"] and time.monotonic() < end:
            begin = time.monotonic()
            try:
                self._call(limit)
            except Exception as error:
                seen = time.monotonic()
                again = self._fails_at_once()
                return {
                    "seen": seen,
                    "elapsed": seen - begin,
                    "calls": calls,
                    "error": type(error).__name__,
                    "typed": isinstance(error, MeshcastError),
                    "peer": getattr(error, "peer", None),
                    "in": getattr(error, "phase", None),
                    "text": str(error),
                    "again": again,
                }
            calls += 1
        return {"calls": calls}

    def _fails_at_once(self) -> str:
        """What is wrong with the next call of the group; "" where it raises at once."""
        begin = time.monotonic()
        try:
            self._call(10.0)
        except MeshcastError:
            took = time.monotonic() - begin
            return f"it raised after {took:.2f} s" if took > 2.0 else ""
        return "it went through"

    def _call(self, limit: float, rows: int | None = None) -> None:
        """One reshard of all ranks; raises AssertionError where its result is wrong."""
        (source, give), (destination, take) = self._what["source"], self._what["destination"]
        shape = (rows or self._what["rows"], COLUMNS)
        full = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        out = meshcast.reshard_local(
            _part(full, source, give, self._rank),
            Layout(source, [PLACEMENTS[give]]),
            None,
            Layout(destination, [PLACEMENTS[take]]),
            shape=full.shape,
            dtype=full.dtype,
            timeout=limit,
        )
        wanted = _part(full, destination, take, self._rank)
        assert (out is None) == (wanted is None)
        if out is not None and wanted is not None and not torch.equal(out, wanted):
            print("WRONG BYTES", flush=True)
            raise AssertionError("wrong bytes")


def _part(full: torch.Tensor, mesh: list[int], placement: str, rank: int) -> torch.Tensor | None:
    if rank not in mesh:
        return None
    if placement == "whole":
        return full
    dim = int(placement == "columns")
    parts = full.chunk(len(mesh), dim)
    at = mesh.index(rank)
    return parts[at] if at < len(parts) else full.narrow(dim, 0, 0)


if __name__ == "__main__":
    main()
