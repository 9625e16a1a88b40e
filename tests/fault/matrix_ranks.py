"""The ranks of rounds in which one rank fails: see matrix.py, which starts this and reads what it prints.

Imports torch and meshcast once, then forks the ranks of each round: a line of JSON on stdin is a round, a
line on stdout is what became of its ranks. A rank that is still there at the round's limit prints its stacks
into its output and is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from fault.rounds import COLUMNS, PLACEMENTS, ROWS
from meshcast import _C, Layout, MeshcastError
from multiproc.fake_gpu import FakeGpu, fake_gpu, held, mesh_on
from torch.distributed.tensor import Replicate, Shard

_MOST_SECONDS = 30.0  # that a rank repeats its call, waiting for the death to be seen
_SLOW_IN_ALL = 0.3  # of the limit, that a slow rank is slow in a call


def main() -> None:
    for name in meshcast.__all__:
        getattr(meshcast, name)  # imports the module that has it
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(what: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank: its exit status (negative: the signal), what it said, and its output where that is of use."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run here, of which a fork copies only one"
    with tempfile.TemporaryDirectory(prefix="meshcast-fault-") as name:
        folder = Path(name)
        children = {}
        for rank in range(what["world"]):
            child = os.fork()
            if child == 0:
                os._exit(_become_rank(rank, what, folder))
            children[child] = rank
        return _wait(what, folder, children)


def _wait(what: dict[str, Any], folder: Path, children: dict[int, int]) -> list[dict[str, Any]]:
    statuses: dict[int, int | None] = dict.fromkeys(range(what["world"]))
    gone: dict[int, float] = {}
    victim = {rank: child for child, rank in children.items()}[what["victim"]]
    stops, freezes = folder / "stops", what["fault"] == "stop"
    end = time.monotonic() + what["round_limit"]
    for number in (0, signal.SIGUSR1, signal.SIGKILL):
        for child in children if number else ():
            os.kill(child, signal.SIGCONT)
            os.kill(child, number)
        while children and (number == signal.SIGKILL or time.monotonic() < end):
            if stops.exists() and time.monotonic() >= float(stops.read_text()):
                stops.unlink()
                if victim in children:  # it may have ended in the meantime, and its number be another's
                    os.kill(victim, signal.SIGSTOP)
                    _failed_now(folder)
            if freezes and list(children) == [victim]:
                freezes = False
                os.kill(victim, signal.SIGCONT if what["thaws"] else signal.SIGKILL)
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                time.sleep(0.002)
            elif number == 0:
                gone[children[child]] = time.monotonic()
                statuses[children.pop(child)] = os.waitstatus_to_exitcode(status)
            else:
                del children[child]  # it hung: no status
        end += 1.0
    found = [
        {**_result(folder, rank, status), "gone_at": gone.get(rank)} for rank, status in statuses.items()
    ]
    failed = folder / "failed"
    found[what["victim"]]["failed_at"] = float(failed.read_text().split()[0]) if failed.exists() else None
    return found


def _failed_now(folder: Path, at: float = 0.0) -> None:
    """As fault points do."""
    with (folder / "failed").open("a") as file:
        file.write(f"{at or time.monotonic()}\n")


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
        with fake_gpu(what["seed"]) if what["gpu"] else contextlib.nullcontext() as gpu:
            found = _Rank(rank, what, folder, gpu).live()
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
    def __init__(self, rank: int, what: dict[str, Any], folder: Path, gpu: FakeGpu | None) -> None:
        self._rank, self._what, self._folder = rank, what, folder
        self._ranks = list(range(what["world"]))
        self._victim = rank == what["victim"]
        self._gpu = gpu

    def live(self) -> dict[str, Any]:
        what = self._what
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"round {what['number']}", self._store()),
            rank=self._rank,
            world_size=what["world"],
            timeout=timedelta(seconds=60),
        )
        passes = self._warm_up()
        dist.barrier()
        if self._victim:
            self._arm(passes)
        time.sleep(what["late"].get(str(self._rank), 0.0))
        begin = time.monotonic()
        found: dict[str, Any] = {"begin": begin}
        if what["moment"] not in ("ending", "destroy"):
            found |= self._until_failure(what["limit"])
        ends = time.monotonic()
        dist.destroy_process_group()
        return {**found, "destroyed": time.monotonic() - ends, "ended": time.monotonic()}

    def _store(self) -> dist.TCPStore:
        path = self._folder / "port"
        if self._what["store"] == self._rank:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            part = self._folder / "port.part"
            part.write_text(str(store.port))
            part.rename(path)
            return store
        while self._what["store"] >= 0 and not path.exists():
            time.sleep(0.001)
        port = int(path.read_text()) if self._what["store"] >= 0 else self._what["port"]
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def _warm_up(self) -> dict[str, int]:
        """Calls before the one that meets the fault; how often each fault point is passed in one."""
        moment = self._what["moment"]
        if moment in ("agreeing", "agree"):
            self._call(60.0, rows=ROWS + 1)
        elif moment == "connecting":
            meshcast.prepare(self._ranks)
        elif moment not in ("forming", "before connect", "connect"):
            self._call(60.0)
            before = _passes()
            self._call(60.0)
            return {point: count - before.get(point, 0) for point, count in _passes().items()}
        return {}

    def _arm(self, passes: dict[str, int]) -> None:
        """Sees to it that this rank fails."""
        what, fault = self._what, self._what["fault"]
        if fault == "none":
            return
        if fault in ("late", "too late"):
            _failed_now(self._folder)
            time.sleep(what["delay"])
        elif fault == "gil":
            _failed_now(self._folder)
            hold = ctypes.PyDLL(None).usleep  # does not let go of it
            threading.Thread(target=hold, args=(int(1e6 * what["delay"]),)).start()
        elif fault == "cuda":
            _failed_now(self._folder)
            assert self._gpu is not None
            self._gpu.failure = "CUDA error: an illegal memory access was encountered"
        elif what["point"]:
            self._arm_point(passes)
        elif what["moment"] == "before connect":
            _failed_now(self._folder)
            {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(1),
                "abort": os.abort,
            }.get(fault, lambda: os.kill(os.getpid(), signal.SIGSTOP))()
        else:
            at = time.monotonic() + what["delay"]
            if fault == "kill":  # the kernel ends the process then, whatever it is in the middle of
                _failed_now(self._folder, at)
                signal.setitimer(signal.ITIMER_REAL, max(at - time.monotonic(), 1e-6))
            else:
                (self._folder / "stops.part").write_text(str(at))
                (self._folder / "stops.part").rename(self._folder / "stops")

    def _arm_point(self, passes: dict[str, int]) -> None:
        what, point = self._what, self._what["point"]
        if what["moment"] in ("first", "middle", "last") and not passes.get(point):
            point = max(("send", "arrive"), key=lambda each: passes.get(each, 0))
        count = max(1, math.ceil(what["share"] * passes.get(point, 1)))
        if point == "agree":
            count = 1 + what["seed"] % 2  # before it has told the others, or after
        if point == "leave":
            count = 1 + what["seed"] % 3
        action = {"memory": "throw", "slow": "sleep"}.get(what["fault"], what["fault"])
        delay = what["delay"]
        if action == "sleep":
            count = 0  # each
            delay = min(delay, _SLOW_IN_ALL * what["limit"] / max(1, passes.get(point, 1)))
        port = what["port"] if what["store"] < 0 else int((self._folder / "port").read_text())
        _C.arm_fault(f"{point} {count} {action} {delay} {self._folder / 'failed'} {port}")

    def _until_failure(self, limit: float) -> dict[str, Any]:
        """Repeats the call: a rank that has done its part of one before the death meets it in a later one."""
        end = time.monotonic() + _MOST_SECONDS
        most = 1 if self._what["fault"] in ("late", "slow") else self._what["calls"]
        calls, longest = 0, 0.0
        while calls < most and time.monotonic() < end:
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
                    "without": "" if self._victim else self._goes_on_without_the_victim(),
                }
            calls += 1
            longest = max(longest, time.monotonic() - begin)
        return {"calls": calls, "longest": longest}

    def _goes_on_without_the_victim(self) -> str:
        """What is wrong with a group of the survivors; "" where it works."""
        ranks = [rank for rank in self._ranks if rank != self._what["victim"]]
        full = torch.arange(600, dtype=torch.float32).reshape(20, 30)
        try:
            out = meshcast.reshard_local(
                _part(full, ranks, "rows", self._rank),
                Layout(ranks, [Shard(0)]),
                None,
                Layout(ranks, [Replicate()]),
                shape=full.shape,
                dtype=full.dtype,
                timeout=30.0,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if out is not None and torch.equal(out, full) else "WRONG BYTES"

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
        wanted = _part(full, destination, take, self._rank)
        if self._what["gpu"]:
            x = held(full, mesh_on("cuda", source), [PLACEMENTS[give]], self._rank)
            y = meshcast.reshard(x, mesh_on("cpu", destination), [PLACEMENTS[take]], timeout=limit)
            return _check(None if wanted is None else y.to_local(), wanted)
        out = meshcast.reshard_local(
            _part(full, source, give, self._rank),
            Layout(source, [PLACEMENTS[give]]),
            None,
            Layout(destination, [PLACEMENTS[take]]),
            shape=full.shape,
            dtype=full.dtype,
            timeout=limit,
        )
        _check(out, wanted)


def _check(out: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert (out is None) == (wanted is None)
    if out is not None and wanted is not None and not torch.equal(out, wanted):
        print("WRONG BYTES", flush=True)
        raise AssertionError("wrong bytes")


def _passes() -> dict[str, int]:
    return dict(_C.fault_points_passed()) if hasattr(_C, "fault_points_passed") else {}


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
