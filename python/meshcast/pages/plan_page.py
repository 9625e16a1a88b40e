"""The page of a plan: hosts, NICs and ranks, and the chunks on their way at each moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.checks import dtype_name
from ..errors import LayoutError
from ..planning.plan import Plan
from ..planning.text import ranks_text, size_text
from .page import write_page

__all__ = ["write_plan_page"]

_MOST_HOPS = 1_000_000  # a page of that many has 60 MB
_NAMED_TASKS = 1000


def write_plan_page(plan: Plan, path: str | Path) -> None:
    """Writes the page. Raises LayoutError for a plan of more than a million hops, and as `write_page`."""
    if len(plan) > _MOST_HOPS:
        raise LayoutError(
            f"{len(plan)} hops are too many to draw, the limit is {_MOST_HOPS}; plan with larger chunks "
            "(--chunk-bytes)"
        )
    write_page(path, f"Plan: {_moved(plan)}", "plan", _data(plan))


def _data(plan: Plan) -> dict[str, Any]:
    core = plan._core

    def column(name: str) -> list[int]:
        return memoryview(core.column(name)).tolist()

    chunk, begin, task_of = column("hop_chunk"), column("chunk_begin"), column("piece_task")
    size = max(plan.ranks, default=0) + 1
    host_of, nic_of = [0] * size, [0] * size
    hosts: list[dict[str, Any]] = []
    for host in plan.hosts:
        used = [rank for rank in host.ranks if rank in plan._rank_traffic]
        if not used:
            continue
        for position, rank in enumerate(host.ranks):
            if rank < size:
                host_of[rank], nic_of[rank] = len(hosts), position % len(host.nics)
        nics = [[nic.out_rate, nic.in_rate] for nic in host.nics]
        hosts.append({"ranks": used, "nics": nics, "local": host.local_rate})
    return {
        "what": _moved(plan),
        "strategy": plan.strategy,
        "makespan": core.makespan_ns,
        "bound": core.lower_bound_ns,
        "hosts": hosts,
        "host_of": host_of,
        "nic_of": nic_of,
        "tasks": [
            f"{size_text(task.nbytes)}, {ranks_text(task.holders)} \N{RIGHTWARDS ARROW} "
            f"{ranks_text(task.receivers)}"
            for task, _ in zip(plan.tasks, range(_NAMED_TASKS), strict=False)
        ],
        "hops": {
            "src": column("hop_src"),
            "dst": column("hop_dst"),
            "start": column("start_ns"),
            "finish": column("finish_ns"),
            "chunk": chunk,
            "task": [task_of[begin[each]] for each in chunk],
        },
        "chunk_bytes": column("chunk_nbytes"),
    }


def _moved(plan: Plan) -> str:
    first = plan.problems[0]
    text = f"{'x'.join(map(str, first.shape)) or 'scalar'} {dtype_name(first.dtype)}"
    return text if len(plan.problems) == 1 else f"{len(plan.problems)} tensors, the first {text}"
