"""Checks that imports go one way: each layer uses what lies below it and nothing above.

The layers and why they are these: docs/design.md. Imports inside functions and under TYPE_CHECKING count too.
Exit status 1 for an import that goes up, and for a circle.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from import_graph import Graph, circles, cpp_graph, python_graph

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
USE_C = {"base", "layout", "topology", "planning", "groups", "transfers", "backend", "pipelining", "bench"}
# Used by the command line and `meshcast/__init__` alone: they hold the package together.
TOP = {"", "__main__", "_version", "_build_check", "_build_info"}
# What a face loads only when somebody asks for it.
LAZY = {"planning.plan": {"planning.text", "planning.draw", "planning.plan_json"}}
HEADERS_OF_TORCH = ("torch/", "ATen/", "c10/", "cuda")


_RANK = {layer: number for number, row in enumerate(PYTHON_LAYERS) for layer in row}


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
        for other in sorted(imports):
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


def main() -> int:
    found = python_violations() + cpp_violations()
    for line in found:
        print(f"violation: {line} (move what is needed down, or pass it in; layers: docs/design.md)")
    print(f"layers: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
