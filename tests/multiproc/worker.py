"""One rank of harness.run_world: runs the cases of a module and writes down how each ended."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

CASE_LIMIT = 120.0  # seconds; a rank that takes longer prints its stacks and exits


@dataclass
class Context:
    """What a case gets. wait_for_all() lines the ranks up by the store, without any communicator."""

    rank: int
    world: int
    store: dist.Store
    case: str = ""

    def wait_for_all(self, name: str, ranks: list[int] | None = None, limit: float = 30.0) -> None:
        ranks = list(range(self.world)) if ranks is None else ranks
        self.store.set(f"{self.case}/{name}/{self.rank}", "")
        deadline = time.monotonic() + limit
        while not self.store.check([f"{self.case}/{name}/{rank}" for rank in ranks]):
            assert time.monotonic() < deadline, f"the ranks did not meet at {name}"
            time.sleep(0.002)


def main() -> int:
    module_path, rank, world, port, backend, folder = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    module = _load(Path(module_path))
    limit = getattr(module, "GROUP_TIMEOUT", 30.0)
    if backend == "meshcast":
        import meshcast  # noqa: F401  registers the backend
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("world", store),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=limit),
    )
    context = Context(int(rank), int(world), dist.PrefixStore("cases", store.clone()))
    failed = False
    with (Path(folder) / f"rank{rank}.json").open("w", buffering=1) as results:
        for case in module.CASES:
            faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
            context.case = case.__name__
            outcome = {"case": case.__name__, "passed": True, "error": "", "value": None}
            try:
                outcome["value"] = case(context)
            except Exception:
                failed = True
                outcome |= {"passed": False, "error": traceback.format_exc()}
            results.write(json.dumps(outcome) + "\n")
            faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
    if not getattr(module, "LEAVE_UP", False):
        dist.destroy_process_group()
    return 1 if failed else 0


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
