"""Follows the first two calls of reshard() of one kind between two ranks and prints which files they enter.

python tools/first_call.py: one JSON object, {"files": [...], "upward": [[caller, called], ...], "later":
[...]}, the last of the second call; a call goes upward where the file that it enters belongs to a higher
layer than the file that it comes from.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_layers import python_layer, python_rank
from import_graph import PACKAGE


def _module(frame: FrameType | None) -> str | None:
    """The module of the package whose code a frame runs; None for other code and while a module loads."""
    if frame is None or frame.f_code.co_name == "<module>":
        return None
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _caller(frame: FrameType) -> str | None:
    """The nearest module of the package that the call came from, over frames of torch and the library."""
    back = frame.f_back
    while back is not None and _module(back) is None:
        back = back.f_back
    return _module(back)


def _rank(rank: int, store: str, answer: Any) -> None:
    import meshcast
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    files, later = set[str](), set[str]()
    entered = files
    upward: list[tuple[str, str]] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        module = _module(frame) if event == "call" else None
        if module:
            entered.add(module)
            caller = _caller(frame)
            if caller and python_rank(python_layer(caller)) < python_rank(python_layer(module)):
                upward.append((caller, module))

    source, destination = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    x = distribute_tensor(torch.arange(12.0), source, [Shard(0)], src_data_rank=None)
    reshard = meshcast.reshard  # loads its module: what is followed is the call
    threading.setprofile(follow)
    sys.setprofile(follow)
    y = reshard(x, destination, [Replicate()])
    entered = later
    reshard(x, destination, [Replicate()])
    sys.setprofile(None)
    assert rank == 0 or torch.equal(y.to_local(), torch.arange(12.0))
    answer.put((rank, sorted(files), sorted(set(upward)), sorted(later)))
    dist.destroy_process_group()


def first_call() -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """(modules entered, calls into a higher layer, modules that the second call enters) of the source's
    rank."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(rank, store, answer)) for rank in range(2)]
        for process in ranks:
            process.start()
        answers = {rank: rest for rank, *rest in (answer.get(timeout=120) for _ in ranks)}
        for process in ranks:
            process.join(60)
    files, upward, later = answers[0]
    return files, upward, later


if __name__ == "__main__":
    files, upward, later = first_call()
    print(json.dumps({"files": files, "upward": upward, "later": later}))
