"""What imports what, read from the sources: Python by its syntax tree, C++ by its includes.

Imports inside functions and under TYPE_CHECKING count too: a reader of the file must know what they name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "meshcast"
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)

Graph = dict[str, set[str]]


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


def circles(graph: Graph) -> list[list[str]]:
    """Groups of two or more nodes that reach each other (strongly connected components, Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            members = []
            while True:
                members.append(stack.pop())
                if members[-1] == node:
                    break
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def longest_chain(graph: Graph, nodes: Iterable[str]) -> list[str]:
    """The longest path of imports among `nodes`, the importing end first; circles count as one step each."""
    inside = set(nodes)
    home = {node: min(circle) for circle in circles(graph) for node in circle}
    folded: Graph = {}
    for node in inside:
        targets = {home.get(other, other) for other in graph.get(node, ()) if other in inside}
        folded.setdefault(home.get(node, node), set()).update(targets - {home.get(node, node)})

    @cache
    def longest(node: str) -> list[str]:
        chains = [longest(other) for other in sorted(folded[node])]
        return [node, *max(chains, key=len, default=[])]

    return max([longest(node) for node in sorted(folded)], key=len, default=[])
