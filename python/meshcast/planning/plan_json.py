"""Plans as JSON: all that went in, and all that came out in compact arrays.

    {"format": "meshcast.plan/1",
     "problems": [{"shape": [...], "dtype": "int32", "src": LAYOUT, "dst": LAYOUT}, ...],
     "topology": {...}, "options": {"strategy", "balance", "chunk_bytes", "seed"},
     "result": {"strategy", "makespan_ns", "lower_bound_ns", "hash",
                "peak_staging": [bytes of each rank, ascending],
                "tasks": [[tensor, box, holders, receivers], ...], "local_copies": [[rank, tensor, box], ...],
                "pieces": [[tensor, task, box], ...], "chunks": [[first piece, end piece, nbytes], ...],
                "hops": {"src": [...], "dst": [...], "chunk": [...], "after": [...], "reduce": [...],
                         "last_reduce": [...], "start_ns": [...], "finish_ns": [...]}}}

LAYOUT is {"mesh_shape": [...], "ranks": [...], "placements": [["shard", 0], ["replicate"], ...]}.
A box is [[lo, hi], ...]. A hop sends its chunk, the pieces [first, end), after the hop `after` (-1: at once).
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from ..base import checks
from ..base.json_reader import Reader, read_json
from ..errors import LayoutError
from ..layout import Layout
from ..topology import Topology
from .plan import BALANCES, STRATEGIES, Options, Plan, Problem

_FORMAT = "meshcast.plan/1"
_HOP_COLUMNS = ("src", "dst", "chunk", "after", "reduce", "last_reduce", "start_ns", "finish_ns")
_PLACEMENT_FIELDS = {"replicate": 0, "shard": 1, "strided_shard": 2, "partial": 1}


def to_json(plan: Plan) -> str:
    """JSON text of a plan."""
    return json.dumps(_to_dict(plan), separators=(",", ":"))


def from_json(source: str | Path) -> Plan:
    """The plan that `to_json` wrote, made again and compared."""
    parsed = read_json(source, "plan")
    reader = Reader(parsed, "plan")
    reader.expect_format(_FORMAT)
    problems = [_read_problem(problem) for problem in reader.children("problems")]
    if not problems:
        raise LayoutError("plan.problems is empty: a plan moves at least one tensor")
    topology = Topology._read(reader.child("topology"))
    options = _read_options(reader.child("options"))
    result = reader.value("result")
    reader.finish()
    plan = Plan(problems, topology, options)
    made = json.loads(json.dumps(_result(plan)))
    if result != made:
        differing = [name for name in made if not isinstance(result, dict) or result.get(name) != made[name]]
        raise LayoutError(
            f"plan.result.{differing[0] if differing else '?'} is not what this version plans from the same "
            "input: the file was altered, or written by another version; make the plan again"
        )
    return plan


def _to_dict(plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "problems": [
            {
                "shape": list(p.shape),
                "dtype": checks.dtype_name(p.dtype),
                "src": _layout_dict(p.src),
                "dst": _layout_dict(p.dst),
            }
            for p in plan.problems
        ],
        "topology": plan.topology._to_dict(),
        "options": plan.options._asdict(),
        "result": _result(plan),
    }


def _result(plan: Plan) -> dict[str, Any]:
    core = plan._core
    hops = {
        name: memoryview(core.column(name if name.endswith("_ns") else f"hop_{name}")).tolist()
        for name in _HOP_COLUMNS
    }
    chunks = [memoryview(core.column(f"chunk_{name}")).tolist() for name in ("begin", "end", "nbytes")]
    return {
        "strategy": plan.strategy,
        "makespan_ns": core.makespan_ns,
        "lower_bound_ns": core.lower_bound_ns,
        "hash": plan.hash,
        "peak_staging": core.peak_staging(),
        "tasks": [[t.tensor, t.box, t.holders, t.receivers] for t in plan.tasks],
        "local_copies": [[c.rank, c.tensor, c.box] for c in plan.local_copies],
        "pieces": [core.piece(i)[:3] for i in range(core.num_pieces)],
        "chunks": [list(chunk) for chunk in zip(*chunks, strict=True)],
        "hops": hops,
    }


def _layout_dict(layout: Layout) -> dict[str, Any]:
    out: dict[str, Any] = {
        "mesh_shape": list(layout.mesh_shape),
        "ranks": list(layout.ranks),
        "placements": [_placement_list(*p) for p in layout._placements],
    }
    if layout._ndim is not None:
        out["ndim"] = layout._ndim
    return out


def _placement_list(kind: str, dim: int, split_factor: int, op: str) -> list[Any]:
    fields: dict[str, list[Any]] = {"shard": [dim], "strided_shard": [dim, split_factor], "partial": [op]}
    return [kind, *fields.get(kind, [])]


def _read_problem(reader: Reader) -> Problem:
    problem = Problem(
        checks.shape(reader.items("shape")),
        checks.dtype(reader.text("dtype")),
        _read_layout(reader.child("src")),
        _read_layout(reader.child("dst")),
    )
    reader.finish()
    return problem


def _read_layout(reader: Reader) -> Layout:
    mesh_shape = tuple(reader.integers("mesh_shape", 1, 1 << 20))
    ranks = reader.integers("ranks", 0, (1 << 31) - 1)
    size = 1
    for n in mesh_shape:
        size *= n
    if size != len(ranks):
        raise LayoutError(
            f"{reader.where}: {len(ranks)} ranks for a mesh of {'x'.join(map(str, mesh_shape))}"
        )
    if len(set(ranks)) != len(ranks):
        raise LayoutError(f"{reader.where}.ranks: a rank appears twice")
    placements = tuple(
        _read_placement(f"{reader.where}.placements[{i}]", p)
        for i, p in enumerate(reader.items("placements"))
    )
    ndim = reader.integer("ndim", 0, checks.MAX_DIMS) if reader.has("ndim") else None
    reader.finish()
    layout = Layout.__new__(Layout)
    layout._set(mesh_shape, array("i", ranks), placements, ndim)
    return layout


def _read_placement(where: str, value: Any) -> tuple[str, int, int, str]:
    if (
        not isinstance(value, list)
        or not value
        or not isinstance(value[0], str)
        or value[0] not in _PLACEMENT_FIELDS
    ):
        raise LayoutError(
            f"{where} {checks.shown(value)}: allowed are [{'], ['.join(_PLACEMENT_FIELDS)}] with their values"
        )
    kind, *fields = value
    if len(fields) != _PLACEMENT_FIELDS[kind]:
        raise LayoutError(f"{where}: {kind} takes {_PLACEMENT_FIELDS[kind]} values, found {len(fields)}")
    if kind == "partial":
        return kind, 0, 1, checks.choice(where, fields[0], ("sum", "avg", "min", "max", "product"))
    dim = (
        checks.integer(f"{where}: dimension", fields[0], -checks.MAX_DIMS, checks.MAX_DIMS - 1)
        if fields
        else 0
    )
    split_factor = (
        checks.integer(f"{where}: split factor", fields[1], 1, checks.MAX_INT64) if len(fields) > 1 else 1
    )
    return kind, dim, split_factor, ""


def _read_options(reader: Reader) -> Options:
    chunk_bytes = reader.value("chunk_bytes")
    options = Options(
        checks.choice("plan.options.strategy", reader.value("strategy"), STRATEGIES),
        checks.choice("plan.options.balance", reader.value("balance"), BALANCES),
        None if chunk_bytes is None else reader.integer("chunk_bytes", 1, checks.MAX_INT64),
        reader.integer("seed", 0, (1 << 64) - 1),
    )
    reader.finish()
    return options
