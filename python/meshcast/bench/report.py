"""Tables and verdicts of raw results."""

from __future__ import annotations

import statistics
from typing import Any

BUSY_LIMIT = 0.85  # above, the cores may have been the limit and not the links
_LEAST_SHARE = 0.9  # of a link's rate alone that it must keep while all links work


def ratio(case: dict[str, Any], method: str) -> float | None:
    """Median time over the lower bound; None if the method did not run."""
    seconds = case["seconds"].get(method)
    return statistics.median(seconds) / case["lower_bound"] if seconds else None


def cell(case: dict[str, Any], method: str) -> str:
    """The ratio; a star where the cores were busy beyond BUSY_LIMIT."""
    value = ratio(case, method)
    if value is None:
        return "-"
    star = "\\*" if statistics.median(case["busy"][method]) > BUSY_LIMIT else ""
    return f"{value:.2f}{star}"


def spread(case: dict[str, Any], method: str) -> float:
    """(largest - least) / median of the repeats."""
    seconds = case["seconds"][method]
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def table(cases: list[dict[str, Any]], methods: list[str]) -> str:
    """Markdown: median time over the lower bound, per case and method."""
    lines = [
        "| case | layouts | MiB | bound, s | " + " | ".join(methods) + " | spread | wrong |",
        "|---|---|---:|---:|" + "---:|" * len(methods) + "---:|---:|",
    ]
    return "\n".join(lines + [row(case, methods) for case in cases])


def row(case: dict[str, Any], methods: list[str]) -> str:
    """`spread`: of the first method's repeats. `wrong`: elements, all methods and repeats together."""
    cells = [cell(case, method) for method in methods]
    return (
        f"| {case['name']} | {case['layouts']} | {case['nbytes'] / 2**20:.0f} | {case['lower_bound']:.3f} | "
        f"{' | '.join(cells)} | {spread(case, methods[0]):.1%} | {sum(case['wrong_elements'].values())} |"
    )


def calibration_text(results: dict[str, Any]) -> str:
    """What was found of links and machine, in one line."""
    found = results["calibration"]
    return "calibration: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items() if k != "topology")


def problems(results: dict[str, Any]) -> list[str]:
    """Why the figures must not be reported; empty if they may."""
    found = []
    links = results.get("calibration", {})
    if links and links["slowest_all_at_once"] < _LEAST_SHARE:
        found.append(
            f"the cores are the limit, not the links: a link keeps {links['slowest_all_at_once']:.0%} of its "
            f"rate while all links work; choose a lower --mbit"
        )
    for case in results["cases"]:
        for method, wrong in case["wrong_elements"].items():
            if wrong:
                found.append(f"{case['name']}: {method} left {wrong} wrong elements")
    return found
