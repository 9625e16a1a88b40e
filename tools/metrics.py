"""Prints how large the tree is and how it hangs together; counters of lines know no layers, follow no call.

It is the table of docs/design.md.

python tools/metrics.py, or `make metrics`, which builds what it needs. Two ranks make two calls of reshard()
of one kind: the files that these enter are counted, and a call goes upward where its file belongs to a higher
layer than its caller's.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_layers import (
    CSRC,
    LAZY,
    PACKAGE,
    PYTHON_LAYERS,
    ROOT,
    TOP,
    circles,
    longest_chain,
    python_graph,
    python_layer,
    python_rank,
    python_violations,
)

CPP = {".h", ".cpp", ".cu", ".cuh", ".def"}
PYTHON = {".py", ".pyi"}
IMPORTS = (
    "import time, torch; start = time.perf_counter(); import meshcast; print(time.perf_counter() - start)"
)


def sources(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Files of a folder that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", str(folder)]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = {ROOT / name for name in listing.split("\0") if name}
    return sorted(path for path in paths if path.suffix in suffixes and path.is_file())


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def comment_lines(paths: Iterable[Path]) -> tuple[int, int, int]:
    """(lines that are a comment alone, lines that hold one, lines that are not blank) of C++ files."""
    alone = holding = filled = 0
    for path in paths:
        inside = False
        for raw in path.read_text().splitlines():
            line = raw.strip()
            filled += bool(line)
            begins = line.startswith(("//", "/*"))
            alone += inside or begins
            holding += inside or begins or bool(re.search(r"(//|/\*)", re.sub(r'"[^"]*"', "", line)))
            inside = (inside or line.startswith("/*")) and "*/" not in line
    return alone, holding, filled


def seconds_to_import() -> float:
    """What `import meshcast` adds to `import torch`: median of five processes."""
    command = [sys.executable, "-c", IMPORTS]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"}
    runs = [
        float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    return sorted(runs)[2]


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


def rows() -> list[tuple[str, str]]:
    cpp, python = sources(CSRC, CPP), sources(PACKAGE, PYTHON)
    tests = sources(ROOT / "tests", CPP | PYTHON)
    longest = max([*cpp, *python, *tests], key=lambda path: len(path.read_text().splitlines()))
    alone, holding, filled = comment_lines(cpp)
    graph = {
        module: {other for other in imports if other not in TOP} - LAZY.get(module, set())
        for module, imports in python_graph().items()
        if module not in TOP
    }
    packages: dict[str, list[str]] = {}
    for module in graph:
        packages.setdefault(python_layer(module), []).append(module)
    chains = {package: longest_chain(graph, modules) for package, modules in packages.items()}
    rest = max((chain for package, chain in chains.items() if package != "pipelining"), key=len)
    files, upward, later = first_call()
    return [
        ("lines of csrc", f"{lines(cpp):,} in {len(cpp)} files"),
        ("lines of python/meshcast", f"{lines(python):,} in {len(python)} files"),
        ("lines of both", f"{lines([*cpp, *python]):,}"),
        ("lines of tests", f"{lines(tests):,} in {len(tests)} files"),
        ("longest file", f"{len(longest.read_text().splitlines())} ({longest.relative_to(ROOT)})"),
        ("comment lines of csrc", f"{alone:,}, {100 * alone / filled:.1f} % of the lines that are not blank"),
        ("with comments behind code", f"{holding:,}, {100 * holding / filled:.1f} %"),
        ("modules at the top of python/meshcast", str(sum("." not in module for module in python_graph()))),
        ("layers of python/meshcast", str(len(PYTHON_LAYERS))),
        ("imports that go up", str(sum(" > " in line for line in python_violations()))),
        ("modules in circles", str(sum(len(circle) for circle in circles(graph)))),
        ("longest chain of imports in a package", f"{len(rest)} ({python_layer(rest[0])})"),
        ("longest chain in pipelining", str(len(chains["pipelining"]))),
        ("files that a first call of reshard enters", str(len(files))),
        ("files that a second call of this kind enters", str(len(later))),
        ("calls of it into a higher layer", str(len(upward))),
        ("seconds that import meshcast adds", f"{seconds_to_import():.3f}"),
    ]


def main() -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"], cwd=ROOT, check=True, capture_output=True
    )
    print(f"| `make metrics` | {commit.stdout.decode().strip()} |\n| --- | --- |")
    for name, value in rows():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
