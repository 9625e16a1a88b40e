"""The column "on hardware" of the table in docs/cuda.md, from the results of on_gpu.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["published", "publish"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cuda.md"
# Kept in the tree once there is one: the page follows from it.
RESULTS = ROOT / "benchmarks" / "results" / "on_gpu.json"
NOTHING = "nothing yet"
HEAD = "| part | step | on hardware | otherwise |"


def published(page: str, results: dict[str, Any] | None) -> str:
    """The page with the column filled in: a row says what the last run of its step brought, and where."""
    lines = page.split("\n")
    try:
        first = lines.index(HEAD) + 2
    except ValueError:
        raise SystemExit(f"on_gpu_page: docs/cuda.md has no line {HEAD!r}") from None
    for number in range(first, len(lines)):
        if not lines[number].startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", lines[number])
        cells[3] = f" {_cell(cells[2].strip().strip('`'), results)} "
        lines[number] = "|".join(cells)
    return "\n".join(lines)


def _cell(step: str, results: dict[str, Any] | None) -> str:
    if step == "none":
        return "does not apply"
    found = next((each for each in (results or {}).get("steps", []) if each["name"] == step), None)
    if found is None or results is None or results["head"]["dry"]:
        return NOTHING
    head = results["head"]
    machine = head["machine"]
    counts = f"{found['passed']} passed" + (f", {found['failed']} failed" if found["failed"] else "")
    missing = f"; not run: {', '.join(found['not_run'])}" if found["not_run"] else ""
    missing = missing.replace("|", "\\|").replace("\n", " ")
    return (
        f"{counts}{missing} ({head['commit']}, {head['date']}, {machine['gpu']}, driver {machine['driver']})"
    )


def publish(source: Path) -> None:
    results = json.loads(source.read_text())
    if results["head"]["dry"]:
        sys.exit(f"on_gpu_page: {source} is of a dry run: nothing of it is of hardware")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(published(PAGE.read_text(), results))
