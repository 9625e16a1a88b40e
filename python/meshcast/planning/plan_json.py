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

LAYOUT is Layout.to_wire(). A box is [[lo, hi], ...]. A hop sends its chunk, the pieces [first, end),
after the hop `after` (-1: at once).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base import checks
from ..base.checks import Reader, read_json
from ..errors import LayoutError
from ..layout import Layout
from ..topology import Topology
from .plan import Options, Plan, Problem, checked_options

_FORMAT = "meshcast.plan/1"
_HOP_COLUMNS = ("src", "dst", "chunk", "after", "reduce", "last_reduce", "start_ns", "finish_ns")


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
    given = reader.child("options")
    options = checked_options("plan.options.", *(given.value(name) for name in Options._fields))
    given.finish()
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
                "src": p.src.to_wire(),
                "dst": p.dst.to_wire(),
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


def _read_problem(reader: Reader) -> Problem:
    problem = Problem(
        checks.shape(reader.items("shape")),
        checks.dtype(reader.text("dtype")),
        Layout.from_wire(reader.child("src")),
        Layout.from_wire(reader.child("dst")),
    )
    reader.finish()
    return problem
