"""What holds for the page and the chart of every benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_tables(text: str) -> None:
    """Every row of a table has as many cells as its head."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            assert len({each.count("|") for each in block}) == 1, block
            block = []


def check_chart(draw: Callable[[Any, Path], None], results: Callable[[], Any], folder: Path) -> str:
    """The chart is the same for the same figures. Its text."""
    paths = [folder / name for name in ("a.svg", "b.svg")]
    for path in paths:
        draw(results(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    return paths[0].read_text()
