"""Pages whose tables are written by programs."""

from __future__ import annotations

from pathlib import Path


def replace(page: Path, mark: str, text: str) -> None:
    """Puts the text between the marks of the page. mark: with {} where Begin and End stand."""
    begin, end = mark.format("Begin"), mark.format("End")
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page}: the marks `{begin}` and `... End ...` are gone")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
