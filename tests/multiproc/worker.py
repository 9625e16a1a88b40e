"""The ranks of harness.run_world: each runs the cases of a module and writes down how each ended.

    worker.py MODULE WORLD PORT BACKEND FOLDER

forks a process for each rank. fork_server.py, which has imported torch, forks this one in turn, since the
import is what a rank's start costs most of; or it runs by itself. Nothing of meshcast and no module of cases
is imported before the ranks are forked: what these do when they are imported, they do in each rank.
An interpreter with torch takes 0.2 s of CPU time to end, so one rank of each world ends as programs do, and
the others leave out the last part, after everything that Python calls at its exit. All ranks of a module with
LEAVE_UP end as programs do.
FOLDER/processes gets a line "rank pid" at the start of each rank, and a line "rank pid status" when it has
ended (status as in subprocess: negative is the signal).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
import torch.distributed.tensor  # noqa: F401  most modules of cases need it

# Seconds, unless the module of cases has its own; a rank that takes longer prints its stacks and exits.
CASE_LIMIT = 120.0


@dataclass
class Context:
    """What a case gets. wait_for_all() lines the ranks up by the store, without any communicator."""

    rank: int
    world: int
    store: dist.Store
    case: str = ""

    def say(self, name: str) -> None:
        """Has the others see that this rank came to `name`, and waits for none of them."""
        self.store.set(f"{self.case}/{name}/{self.rank}", "")

    def wait_for_all(self, name: str, ranks: list[int] | None = None, limit: float = 30.0) -> None:
        ranks = list(range(self.world)) if ranks is None else ranks
        self.say(name)
        met = [f"{self.case}/{name}/{rank}" for rank in ranks]
        self.wait_until(lambda: self.store.check(met), f"the ranks meet at {name}", limit)

    def wait_until(self, look: Callable[[], bool], what: str, limit: float = 30.0) -> None:
        """For what other ranks or threads bring about."""
        deadline = time.monotonic() + limit
        while not look():
            assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
            time.sleep(0.002)

    def wait_until_freed(self, reference: weakref.ref, what: str) -> None:
        """A thread of the group that settles a call may hold it a little longer than the program does."""
        self.wait_until(lambda: gc.collect() >= 0 and reference() is None, f"{what} is freed")


def main() -> int:
    """Forks the ranks and waits for them; a rank returns its own exit status."""
    module_path, world, port, backend, folder = sys.argv[1:]
    # What is there already is no garbage: without this each rank would look through all of torch as it exits,
    # which takes longer than its import.
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run here, of which a fork copies only one"
    ranks: dict[int, int] = {}
    with (Path(folder) / "processes").open("w", buffering=1) as processes:
        for rank in range(int(world)):
            pid = os.fork()
            if pid == 0:
                processes.close()
                status = become_rank(module_path, rank, int(world), int(port), backend, Path(folder))
                module = sys.modules[Path(module_path).stem]
                whole = zlib.crc32(module.__name__.encode()) % int(world)
                if rank != whole and not getattr(module, "LEAVE_UP", False):
                    end_quickly(status)
                return status
            ranks[pid] = rank
            processes.write(f"{rank} {pid}\n")
        while ranks:
            pid, status = os.wait()
            processes.write(f"{ranks.pop(pid)} {pid} {os.waitstatus_to_exitcode(status)}\n")
    end_quickly(0)


def become_rank(module_path: str, rank: int, world: int, port: int, backend: str, folder: Path) -> int:
    """What the process of a rank does. Its arguments and its output are its own from here on."""
    output = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv[1:] = [module_path, str(rank), str(world), str(port), backend, str(folder)]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    module = _load(Path(module_path))
    limit = getattr(module, "GROUP_TIMEOUT", 30.0)
    case_limit = getattr(module, "CASE_LIMIT", CASE_LIMIT)
    if backend == "meshcast":
        import meshcast  # noqa: F401  registers the backend
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
    )
    context = Context(rank, world, dist.PrefixStore("cases", store.clone()))
    failed = False
    with (folder / f"rank{rank}.json").open("w", buffering=1) as results:
        for case in module.CASES:
            faulthandler.dump_traceback_later(case_limit, exit=True)
            context.case = case.__name__
            outcome = {"case": case.__name__, "passed": True, "error": "", "value": None}
            begin = time.monotonic()
            try:
                outcome["value"] = case(context)
            except Exception:
                failed = True
                outcome |= {"passed": False, "error": traceback.format_exc()}
            outcome["seconds"] = time.monotonic() - begin
            results.write(json.dumps(outcome) + "\n")
            faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(case_limit, exit=True)
    if not getattr(module, "LEAVE_UP", False):
        dist.destroy_process_group()
    return 1 if failed else 0


def end_quickly(status: int) -> NoReturn:
    """Ends this process as its interpreter would, but for the objects that it would free."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
