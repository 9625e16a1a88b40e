"""Checks that imports go one way; by hand: import-linter knows no C++, no `_C.pyi` and no lengths of chains.

Each layer uses what lies below it and nothing above. The layers and why they are these: docs/design.md.
Imports are read from the sources, Python by its syntax tree and C++ by its includes. Those inside functions
and under TYPE_CHECKING count too: a reader must know what they name.
Exit status 1 for an import that goes up, a circle, a private name of another package, and a class name that
stands twice in python/meshcast; also where there are more files, or longer chains of imports, than before.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "meshcast"
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)

Graph = dict[str, set[str]]

# Lowest first. A row holds layers of one rank, which know nothing of each other.
PYTHON_LAYERS = (
    ("errors",),
    ("base",),
    ("layout",),
    ("spec", "topology"),
    ("planning",),
    ("groups",),
    ("transfers",),
    ("resharding",),
    ("backend", "pipelining"),
    ("tuning",),
    ("elastic",),
    ("integrations",),
    ("bench", "pages"),
    ("cli",),
)
CPP_LAYERS = (
    ("common",),
    ("layout",),
    ("memory", "plan", "transport"),
    ("boxes", "run"),
    ("rounds",),
    ("group",),
    ("ipc", "ucx"),
    ("c10d",),
    ("cuda",),
    ("binding",),
)
# The extension's Python face may be used by these.
# Benchmarks measure its kernels; pipelining cuts graphs of autograd, which torch's Python cannot.
USE_C = {"base", "layout", "topology", "planning", "groups", "transfers", "backend", "pipelining"}
# Used by the command line and `meshcast/__init__` alone: they hold the package together.
TOP = {"", "__main__", "_version", "_build_check", "_build_info"}
# What a face loads only when somebody asks for it.
LAZY = {
    "backend": {"backend.backend"},
    "resharding.reshard": {"resharding.digested"},
    "resharding.weight_sync": {"resharding.weight_offers"},
    "planning.plan": {"planning.show"},
    "pipelining": {"tuning.choose", "tuning.candidates", "tuning.partition", "tuning.search"},
    "pipelining.schedules": {"tuning.choose"},
}
# What the tree has come down to: it may become less, and these with it. "": through all packages.
MOST_FILES = 131
LONGEST_CHAINS = {"": 16, "pipelining": 9, "resharding": 6, "groups": 4, "elastic": 5, "transfers": 4}
HEADERS_OF_TORCH = ("torch/", "ATen/", "c10/", "cuda")


_RANK = {layer: number for number, row in enumerate(PYTHON_LAYERS) for layer in row}


def python_modules() -> dict[str, Path]:
    """Every module by its name in the package, "layout" or "pipelining.stage"; "" is `meshcast` itself."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules["_C"] = PACKAGE / "_C.pyi"
    return modules


def python_graph() -> Graph:
    """Module to the modules of the package that it imports."""
    modules = python_modules()
    return {name: _python_imports(name, path, modules) for name, path in modules.items()}


def _python_imports(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {".".join(parts[1:]) for parts in names if parts[0] == "meshcast"}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            if base is not None:
                for alias in node.names:
                    whole = ".".join(filter(None, [base, alias.name]))
                    found.add(whole if whole in modules else base)
    return {module for module in found if module in modules} - {name}


def _base(node: ast.ImportFrom, package: list[str]) -> str | None:
    """The module that `from ... import` names, relative to the package; None for one that is not ours."""
    if node.level == 0:
        parts = (node.module or "").split(".")
        return ".".join(parts[1:]) if parts[0] == "meshcast" else None
    here = [part for part in package if part]
    kept = here[: len(here) - (node.level - 1)]
    return ".".join([*kept, *filter(None, (node.module or "").split("."))])


def cpp_files() -> dict[str, Path]:
    """Every file of csrc by its path relative to the include root that it lies under."""
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".def"}
    return {_cpp_name(path): path for path in sorted(CSRC.rglob("*")) if path.suffix in suffixes}


def _cpp_name(path: Path) -> str:
    core = CSRC / "core"
    return str(path.relative_to(core if path.is_relative_to(core) else CSRC))


def cpp_graph() -> Graph:
    """File to what it includes: files of csrc by their names, everything else as it is written."""
    return {name: set(INCLUDE.findall(path.read_text())) for name, path in cpp_files().items()}


def condensed(graph: Graph) -> tuple[Graph, dict[str, list[str]]]:
    """The graph with every circle as one node, and the members of each node. A circle: two or more nodes that
    reach each other; its node has the name of its first member."""
    members = {node: [node] for node in graph}
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return graph, members
        except CycleError as error:
            circle = set(error.args[1])
            first = min(circle)
            members[first] = sorted(each for node in circle for each in members.pop(node))
            folded: dict[str, set[str]] = defaultdict(set)
            for node, targets in graph.items():
                name = first if node in circle else node
                folded[name] |= {first if other in circle else other for other in targets} - {name}
            graph = dict(folded)


def circles(graph: Graph) -> list[list[str]]:
    return [each for each in condensed(graph)[1].values() if len(each) > 1]


def longest_chain(graph: Graph, nodes: Iterable[str]) -> list[str]:
    """The longest path of imports among `nodes`, the importing end first; circles count as one step each."""
    inside = set(nodes)
    graph, _ = condensed({node: graph.get(node, set()) & inside for node in inside})
    chains: dict[str, list[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        chains[node] = [node, *max((chains[other] for other in sorted(graph[node])), key=len, default=[])]
    return max((chains[node] for node in sorted(chains)), key=len, default=[])


def python_layer(module: str) -> str:
    return module.split(".")[0]


def python_rank(layer: str) -> int:
    """How high a layer lies; what holds the package together lies above all."""
    return _RANK.get(layer, len(PYTHON_LAYERS))


def python_violations() -> list[str]:
    graph = python_graph()
    found = []
    for module, imports in graph.items():
        if module in TOP:
            continue
        layer = python_layer(module)
        for other in sorted(imports - LAZY.get(module, set())):
            below = python_layer(other)
            if other == "_C":
                wrong = layer not in USE_C
            elif other in TOP:
                wrong = layer != "cli"
            elif module == "_C":
                wrong = other != "errors"
            else:
                wrong = layer != below and python_rank(below) >= python_rank(layer)
            if wrong:
                found.append(f"python: {module} > {other or 'meshcast'}")
    return found + _circle_lines("python", _without_lazy(graph))


def _without_lazy(graph: Graph) -> Graph:
    return {
        module: imports - LAZY.get(module, set()) - {""} for module, imports in graph.items() if module != ""
    }


def cpp_violations() -> list[str]:
    rank = {layer: number for number, row in enumerate(CPP_LAYERS) for layer in row}
    graph = cpp_graph()
    found = []
    for file, includes in graph.items():
        layer = file.split("/")[0]
        for other in sorted(includes):
            if other in graph:
                below = other.split("/")[0]
                # Inside plan/ as well: what strategies draft, the bound does not look at.
                inner = file.startswith("plan/bound/") and other.startswith("plan/strategies/")
                if inner or (layer != below and rank[below] >= rank[layer]):
                    found.append(f"csrc: {file} > {other}")
            elif rank[layer] < rank["c10d"] and other.startswith(HEADERS_OF_TORCH):
                found.append(f"csrc: {file} > {other}")
    return found + _circle_lines("csrc", graph)


def _circle_lines(where: str, graph: Graph) -> list[str]:
    return [f"{where}: circle of {' '.join(circle)}" for circle in circles(graph)]


def class_violations() -> list[str]:
    places = defaultdict(list)
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
            elif isinstance(node, ast.ImportFrom) and not _stays_inside(node, name):
                private = [
                    each.name for each in node.names if each.name.startswith("_") and each.name != "_C"
                ]
                found += [f"python: {name} > {each}, a private name" for each in private if each[1] != "_"]
    return found + [
        f"python: class {each} in {' and '.join(them)}" for each, them in places.items() if len(them) > 1
    ]


def _stays_inside(node: ast.ImportFrom, file: str) -> bool:
    """Whether an import is of the standard library, another distribution, or the file's own package."""
    module = node.module or ""
    if node.level == 0 and module.split(".")[0] != "meshcast":
        return True
    if node.level == 0:
        return "/" in file and module.split(".")[1:2] == [file.split("/")[0]]
    return "/" in file and node.level < 2 + file.count("/") - 1


def ratchet_violations() -> list[str]:
    graph = _without_lazy(python_graph())
    found = []
    files = sum(1 for path in PACKAGE.rglob("*.py") if path.name != "_build_info.py")
    if files > MOST_FILES:
        found.append(f"python: {files} files, there were {MOST_FILES}: a file is a concept")
    for package, most in LONGEST_CHAINS.items():
        chain = longest_chain(graph, [each for each in graph if package in ("", python_layer(each))])
        if len(chain) > most:
            found.append(f"python: a chain of {len(chain)} imports, there were {most}: {' > '.join(chain)}")
    return found


def main() -> int:
    found = python_violations() + class_violations() + ratchet_violations() + cpp_violations()
    for line in found:
        print(f"violation: {line} (move what is needed down, or pass it in; layers: docs/design.md)")
    print(f"layers: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
