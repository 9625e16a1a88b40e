"""Refuses source and test files that are too long to read at one go.

A file is a concept, of 300 to 700 lines as a rule. One above 700 is printed, and 800 is the limit, for tests
as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh", ".cmake"}
WARN_LINES = 700
MAX_LINES = 800


def long_files(root: Path, threshold: int) -> list[tuple[int, str]]:
    """(lines, path) of the files that git tracks or does not ignore with more than `threshold` lines."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = root / name
        if path.suffix in SUFFIXES and path.is_file():
            with path.open("rb") as file:
                lines = sum(1 for _ in file)
            if lines > threshold:
                found.append((lines, name))
    return sorted(found, reverse=True)


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    status = 0
    for lines, name in long_files(root, WARN_LINES):
        if lines > MAX_LINES:
            status = 1
            print(f"{name}: {lines} lines, the limit is {MAX_LINES}: split it where an interface is narrow")
        else:
            print(f"{name}: {lines} lines (above {WARN_LINES}: is it one concept?)")
    return status


if __name__ == "__main__":
    sys.exit(main())
