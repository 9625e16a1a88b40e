"""Pages whose tables are written by programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def replace(page: Path, mark: str, text: str) -> None:
    """Puts the text between the marks of the page. mark: with {} where Begin and End stand."""
    begin, end = mark.format("Begin"), mark.format("End")
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page}: the marks `{begin}` and `... End ...` are gone")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def publish(
    results: dict[str, Any],
    kept: Path,
    page: Path,
    mark: str,
    text: str,
    draw: Callable[[dict[str, Any], Path], None],
    chart: Path,
) -> None:
    """Keeps the figures, puts their tables on the page and draws their chart."""
    kept.write_text(json.dumps(results, indent=1) + "\n")
    replace(page, mark, text)
    draw(results, chart)
