"""Refuses lines of prose in the documents that are too wide to read beside the code.

Free of the limit: code blocks, tables, lines that are only a link or an image, and what programs write
between a `<!-- Begin ... -->` and an `<!-- End ... -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 120
_LINK = r"!?\[[^\]]*\]\([^)]*\)"
_ONLY_LINKS = re.compile(rf"[-*>\s]*(?:{_LINK}|<?https?://\S+)[.,;:]?\s*")


def documents(root: Path) -> list[Path]:
    named = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*named, *sorted((root / "docs").rglob("*.md"))]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines that the limit is for; numbers count from 1."""
    fence, written = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if fence:
            fence = "" if bare.startswith(fence) and not bare.strip(fence[0]) else fence
        elif opening := re.match(r"`{3,}|~{3,}", bare):
            fence = opening.group()
        elif bare.startswith("<!-- Begin"):
            written = True
        elif bare.startswith("<!-- End"):
            written = False
        elif not written and not bare.startswith("|") and not _ONLY_LINKS.fullmatch(line):
            yield number, line


def wide_lines(text: str) -> list[tuple[int, int]]:
    """(number, columns) of the lines of prose above the limit."""
    return [(number, len(line)) for number, line in prose(text) if len(line) > MAX_COLUMNS]


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {columns} columns, the limit is {MAX_COLUMNS}"
        for path in documents(ROOT)
        for number, columns in wide_lines(path.read_text())
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
