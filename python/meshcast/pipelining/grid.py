"""Schedules as text: a grid of steps by ranks with cells marked, for messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshcast.pipelining.action import Action

Cell = tuple[int, int]  # rank, step

_AROUND = 6  # steps shown before and after the first and last marked cell


def format_grid(actions: Mapping[int, Sequence[Action]], marked: Collection[Cell] = ()) -> str:
    """Steps downwards, ranks across, marked cells in ``>..<``. A long schedule is cut to the steps around the
    marks."""
    ranks = sorted(actions)
    steps = max((len(row) for row in actions.values()), default=0)
    first, last = 0, steps
    if marked:
        first = max(0, min(step for _, step in marked) - _AROUND)
        last = min(steps, max(step for _, step in marked) + _AROUND + 1)
    header = ["step", *(f"rank {rank}" for rank in ranks)]
    table = [header]
    for step in range(first, last):
        cells = [_cell(actions[rank], step, (rank, step) in marked) for rank in ranks]
        table.append([str(step), *cells])
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _cell(row: Sequence[Action], step: int, marked: bool) -> str:
    text = str(row[step]) if step < len(row) else ""
    return f">{text or 'end'}<" if marked else f" {text} " if text else ""
