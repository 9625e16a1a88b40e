"""Prints how large the tree is and how it hangs together, as the table of docs/design.md.

python tools/metrics.py, or `make metrics`, which builds what it needs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_layers import LAZY, PYTHON_LAYERS, TOP, python_layer, python_violations
from first_call import first_call
from import_graph import CSRC, PACKAGE, ROOT, circles, longest_chain, python_graph

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
