"""The text form of a plan."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ..base.checks import dtype_name

if TYPE_CHECKING:
    from ..layout import Box
    from .plan import Plan

_SHOWN = 8  # rows of a table before it is cut short


def describe(plan: Plan) -> str:
    """Describes what moves, how, how fast, and what each host's NICs carry."""
    return "\n".join([*_head(plan), "", *_nics(plan), "", *_tasks(plan)])


def size_text(nbytes: float) -> str:
    """Bytes with a binary unit: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if nbytes < 1024 or unit == "PiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"


def time_text(seconds: float) -> str:
    """Seconds with the unit that leaves few digits: 12.3 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.4g} {unit}"


def _head(plan: Plan) -> list[str]:
    lines = []
    for problem in islice(plan.problems, _SHOWN):
        lines.append(
            f"tensor       {'x'.join(map(str, problem.shape)) or 'scalar'} {dtype_name(problem.dtype)}"
        )
        lines.append(f"  from       {problem.src!r}")
        lines.append(f"  to         {problem.dst!r}")
    if len(plan.problems) > _SHOWN:
        lines.append(f"  ...        {len(plan.problems)} tensors")
    sent = sum(plan.bytes_sent(rank) for rank in plan.ranks)
    network = sum(plan.nic_bytes(host)[0] for host in range(len(plan.hosts)))
    asked = plan.options.strategy
    bound = f"{plan.ratio:.4g} x the lower bound of {time_text(plan.lower_bound)}"
    filling = []
    if plan.filling_bound > 1.005 * plan.lower_bound:
        above = f"{plan.makespan / plan.filling_bound:.4g} x the {time_text(plan.filling_bound)}"
        filling = [f"filling      {above} that no plan beats whose chunks are as large as these"]
    lines += [
        f"topology     {plan.topology!r}",
        f"strategy     {plan.strategy}{'' if asked == plan.strategy else f' (chosen by {asked})'}",
        f"makespan     {time_text(plan.makespan)}, {bound}",
        "             (no plan is faster in which only holders and receivers of a box carry it)",
        *filling,
        f"traffic      {len(plan)} messages, {size_text(sent)} ({size_text(network)} between hosts)",
        f"staging      {size_text(max(map(plan.peak_staging_bytes, plan.ranks)))} at most on one rank",
        f"kept         {len(plan.local_copies)} local copies",
        f"hash         {plan.hash}",
    ]
    return lines


def _nics(plan: Plan) -> list[str]:
    lines = ["host         out           in            busy out  busy in"]
    hosts = plan.hosts
    for index, host in islice(enumerate(hosts), _SHOWN):
        out, received = plan.nic_bytes(index)
        out_rate = sum(nic.out_rate for nic in host.nics)
        in_rate = sum(nic.in_rate for nic in host.nics)
        busy = [
            nbytes / rate / plan.makespan if plan.makespan else 0.0
            for nbytes, rate in ((out, out_rate), (received, in_rate))
        ]
        lines.append(
            f"{index:<12} {size_text(out):<13} {size_text(received):<13} {busy[0]:>8.1%}  {busy[1]:>7.1%}"
        )
    if len(hosts) > _SHOWN:
        lines.append(f"...          {len(hosts)} hosts")
    return lines


def _tasks(plan: Plan) -> list[str]:
    lines = [f"{len(plan.tasks)} tasks"]
    for index, task in islice(enumerate(plan.tasks), _SHOWN):
        who = f"{ranks_text(task.holders)} -> {ranks_text(task.receivers)}"
        lines.append(f"  {index:<4} {size_text(task.nbytes):<11} {who:<36} {_box(task.box)}")
    if len(plan.tasks) > _SHOWN:
        lines.append(f"  ...  {len(plan.tasks)} tasks")
    return lines


def _box(box: Box) -> str:
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ascending ranks with runs joined: 0-3,8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:_SHOWN])
    return text if len(runs) <= _SHOWN else f"{text},... ({len(ranks)} ranks)"
