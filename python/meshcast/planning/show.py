"""The text form of a plan, and its picture: when each NIC sends and receives, one colour per task, the lower
bound as a line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import checks
from ..base.boxes import box_text
from ..base.checks import runs_text
from ..errors import LayoutError, MeshcastError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..layout import Layout
    from .plan import Plan, Problem

_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
_SHOWN = 8  # rows of a table before it is cut short
_SUFFIXES = (".png", ".svg", ".pdf")
_MAX_ROWS = 48  # NICs drawn; further ones are counted below the picture
_MAX_BARS = 1500  # per row; finer detail than a pixel is sampled
_MAX_LEGEND = 10
# Ten hues that stay apart in print and under the common colour deficiencies; red is left to the lower bound.
_PALETTE = (
    "#4477aa",
    "#ee8866",
    "#44aa99",
    "#ddcc77",
    "#aa6699",
    "#88ccee",
    "#999933",
    "#bb9977",
    "#77aadd",
    "#666677",
)


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
    unit, factor = _time_unit(seconds)
    return f"{seconds * factor:.4g} {unit}"


def _head(plan: Plan) -> list[str]:
    lines = []
    for problem in islice(plan.problems, _SHOWN):
        lines.append(f"tensor       {_tensor(problem)}")
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


def _tensor(problem: Problem) -> str:
    return f"{'x'.join(map(str, problem.shape)) or 'scalar'} {checks.dtype_name(problem.dtype)}"


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
        who = f"{runs_text(task.holders)} -> {runs_text(task.receivers)}"
        lines.append(f"  {index:<4} {size_text(task.nbytes):<11} {who:<36} {box_text(task.box)}")
    if len(plan.tasks) > _SHOWN:
        lines.append(f"  ...  {len(plan.tasks)} tasks")
    return lines


@dataclass
class _LinkRow:
    """One direction of one link: what it carries, in order of time."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    task: NDArray[np.int64]


def draw(plan: Plan, path: str | Path) -> None:
    """Writes the picture to `path`; its suffix decides the format. Raises OSError where the file cannot be
    written."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise LayoutError(f"path {checks.shown(str(path))}: allowed suffixes are {', '.join(_SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MeshcastError("drawing needs matplotlib: pip install matplotlib") from None
    rows = _rows(plan)
    shown = rows[:_MAX_ROWS]
    legend_rows = 1 + (len(plan.tasks) // 3 if len(plan.tasks) <= _MAX_LEGEND else 0)
    height = 1.45 + 0.34 * max(len(shown), 2) + 0.2 * legend_rows
    # hashsalt: the same plan gives the same SVG, byte for byte
    with matplotlib.rc_context({"svg.hashsalt": "meshcast", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, height), layout="constrained")
        axes = figure.add_subplot()
        unit, scale = _time_unit(max(plan.makespan, plan.lower_bound))
        _draw_rows(axes, plan, shown, scale)
        _draw_limits(axes, plan, scale, unit)
        _draw_legend(figure, plan, len(rows) - len(shown))
        axes.set_xlabel(f"time ({unit})")
        head, details = _titles(plan)
        axes.set_title(details, loc="left", fontsize=8, color="#555555")
        figure.suptitle(head, x=0.008, ha="left", fontsize=11, fontweight="bold")
        metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata[path.suffix.lower()])


def _rows(plan: Plan) -> list[tuple[str, _LinkRow, _LinkRow]]:
    """(label, out row, in row) of every NIC; of every rank instead, where nothing leaves a host."""
    import numpy as np

    core = plan._core

    def column(name: str) -> NDArray[Any]:
        return np.asarray(core.column(name))

    chunk = column("hop_chunk")
    nbytes = column("chunk_nbytes")[chunk].astype(np.float64)
    task = column("piece_task")[column("chunk_begin")[chunk]].astype(np.int64)
    start = column("start_ns") / 1e9

    size = max(plan.ranks) + 1
    host_of = np.full(size, -1)
    nic_of = np.full(size, -1)
    for index, host in enumerate(plan.hosts):
        for position, rank in enumerate(host.ranks):
            if rank < size:
                host_of[rank] = index
                nic_of[rank] = position % len(host.nics)
    src, dst = column("hop_src"), column("hop_dst")
    crosses = host_of[src] != host_of[dst]

    def row(mask: Any, rate: int) -> _LinkRow:
        order = np.argsort(start[mask], kind="stable")
        begin = start[mask][order]
        return _LinkRow(begin, begin + nbytes[mask][order] / rate, task[mask][order])

    rows = []
    if crosses.any():
        for index, host in enumerate(plan.hosts):
            if not any(host_of[rank] == index for rank in plan.ranks):
                continue
            for n, nic in enumerate(host.nics):
                out = row(crosses & (host_of[src] == index) & (nic_of[src] == n), nic.out_rate)
                received = row(crosses & (host_of[dst] == index) & (nic_of[dst] == n), nic.in_rate)
                label = f"host {index}" if len(host.nics) == 1 else f"host {index} NIC {n}"
                rows.append((label, out, received))
    else:
        for rank in plan.ranks:
            rate = plan.hosts[host_of[rank]].local_rate
            rows.append((f"rank {rank}", row(src == rank, rate), row(dst == rank, rate)))
    return rows


def _bars(row: _LinkRow, span: float) -> dict[int, list[tuple[float, float]]]:
    """(start, width) of the bars of each task. Neighbours of one task join; more bars than pixels are
    sampled."""
    import numpy as np

    start, end, task = row.start, row.end, row.task
    if len(start) > _MAX_BARS:
        edges = np.linspace(0, span, _MAX_BARS + 1)
        centre = (edges[:-1] + edges[1:]) / 2
        hop = np.searchsorted(start, centre, side="right") - 1
        busy = (hop >= 0) & (centre < end[np.maximum(hop, 0)] + span / _MAX_BARS / 2)
        start, end, task = edges[:-1][busy], edges[1:][busy], task[hop[busy]]
    bars: dict[int, list[tuple[float, float]]] = {}
    if len(start) == 0:
        return bars
    gap = span / 3000
    breaks = np.flatnonzero((task[1:] != task[:-1]) | (start[1:] > end[:-1] + gap)) + 1
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(start)], strict=True):
        bars.setdefault(int(task[first]), []).append(
            (float(start[first]), float(end[last - 1] - start[first]))
        )
    return bars


def _draw_rows(axes: Any, plan: Plan, rows: list[tuple[str, _LinkRow, _LinkRow]], scale: float) -> None:
    span = max(plan.makespan, plan.lower_bound) or 1.0
    for y, (_, out, received) in enumerate(rows):
        axes.axhspan(y - 0.42, y + 0.42, color="#f2f2f2", linewidth=0, zorder=0)
        for row, bottom in ((out, y - 0.40), (received, y + 0.03)):
            for task, bars in _bars(row, span).items():
                scaled = [(begin * scale, width * scale) for begin, width in bars]
                axes.broken_barh(
                    scaled, (bottom, 0.37), facecolors=_colour(task, len(plan.tasks)), linewidth=0, zorder=2
                )
        for text, at in (("out", y - 0.215), ("in", y + 0.215)):
            axes.text(
                -0.004,
                at,
                text,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                fontsize=6.5,
                color="#666666",
            )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.tick_params(axis="y", length=0, pad=20)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, span * scale * 1.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if not plan.transfers:
        axes.text(
            0.5, 0.5, "nothing travels", transform=axes.transAxes, ha="center", va="center", color="#666666"
        )


def _draw_limits(axes: Any, plan: Plan, scale: float, unit: str) -> None:
    if not plan.lower_bound:
        return
    axes.axvline(
        plan.makespan * scale,
        color="#222222",
        linewidth=0.9,
        zorder=3,
        label=f"makespan {plan.makespan * scale:.4g} {unit}",
    )
    axes.axvline(
        plan.lower_bound * scale,
        color="#d62728",
        linewidth=1.3,
        linestyle=(0, (4, 2)),
        zorder=4,
        label=f"lower bound {plan.lower_bound * scale:.4g} {unit}",
    )


def _draw_legend(figure: Any, plan: Plan, hidden_rows: int) -> None:
    from matplotlib.patches import Patch

    handles = list(figure.axes[0].get_legend_handles_labels()[0])
    tasks = plan.tasks
    for index, task in enumerate(tasks if len(tasks) <= _MAX_LEGEND else ()):
        who = f"{runs_text(task.holders)} \N{RIGHTWARDS ARROW} {runs_text(task.receivers)}"
        handles.append(
            Patch(color=_colour(index, len(tasks)), label=f"task {index}: {size_text(task.nbytes)}, {who}")
        )
    if len(tasks) > _MAX_LEGEND:
        handles.append(Patch(color="none", label=f"{len(tasks)} tasks, one colour each"))
    if hidden_rows > 0:
        handles.append(Patch(color="none", label=f"and {hidden_rows} more NICs"))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=7.5, handlelength=1.6
        )


def _titles(plan: Plan) -> tuple[str, str]:
    nbytes = size_text(sum(checks.total_bytes(p.shape, p.dtype) for p in plan.problems))
    ratio = f"{plan.ratio:.3f} \N{MULTIPLICATION SIGN} the lower bound"
    head = f"{plan.strategy}: {time_text(plan.makespan)}, {ratio}"
    if len(plan.problems) > 1:
        return head, f"{len(plan.problems)} tensors, {nbytes}"
    problem = plan.problems[0]
    return (
        head,
        f"{_tensor(problem)} ({nbytes}): {_mesh(problem.src)}  \N{RIGHTWARDS ARROW}  {_mesh(problem.dst)}",
    )


def _mesh(layout: Layout) -> str:
    return f"mesh {'x'.join(map(str, layout.mesh_shape))} {', '.join(layout.placement_texts)}"


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(each for each in _UNITS if seconds * each[1] >= 1 or each == _UNITS[-1])


def _colour(index: int, count: int) -> Any:
    if count <= len(_PALETTE):
        return _PALETTE[index]
    import matplotlib

    # Neighbouring tasks get distant hues: steps of the golden ratio never repeat.
    return matplotlib.colormaps["turbo"](0.05 + 0.9 * ((index * 0.6180339887) % 1.0))
