"""Tables and verdicts of raw results."""

from __future__ import annotations

import statistics
from typing import Any

BUSY_LIMIT = 0.85  # above, the cores may have been the limit and not the links
STEADY = 0.05  # spread between repeats that counts as steady
_LEAST_SHARE = 0.9  # of a link's rate alone that it must keep while all links work
_LEAST_EFFICIENCY = 0.8  # of the nominal rate that a link must reach alone
OURS = "auto"  # the others are compared with it

Found = dict[str, Any]  # one case of the raw results


def ratio(case: Found, method: str) -> float | None:
    """Median time over the lower bound; None if the method did not run, or nothing has to travel between
    hosts."""
    seconds = case["seconds"].get(method)
    return statistics.median(seconds) / case["lower_bound"] if seconds and case["lower_bound"] else None


def cell(case: Found, method: str) -> str:
    """The ratio; a star where the cores were busy beyond BUSY_LIMIT."""
    value = ratio(case, method)
    if value is None:
        return "failed" if method in case.get("failed", {}) else "-"
    star = "\\*" if _busy(case, method) > BUSY_LIMIT else ""
    return f"{value:.2f}{star}"


def _busy(case: Found, method: str) -> float:
    """Part of the machine's cores that was at work; 0 if the method did not run."""
    return statistics.median(case["busy"].get(method) or [0.0])


def spread(case: Found, method: str) -> float | None:
    """(largest - least) / median of the repeats; None below two of them."""
    seconds = case["seconds"].get(method) or []
    return (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else None


def quantile(seconds: list[float], part: float) -> float:
    """The least of the measured times that is not below this part of them: no interpolation."""
    ordered = sorted(seconds)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def table(cases: list[Found], methods: list[str]) -> str:
    """Markdown: median time over the lower bound, per case and method."""
    lines = [
        "| case | layouts | MiB | bound, s | " + " | ".join(methods) + " | spread | wrong bytes |",
        "|---|---|---:|---:|" + "---:|" * len(methods) + "---:|---:|",
    ]
    return "\n".join(lines + [row(case, methods) for case in cases])


def row(case: Found, methods: list[str]) -> str:
    """`spread`: of the first method's repeats. `wrong bytes`: of all methods and repeats together."""
    cells = [cell(case, method) for method in methods]
    steadiness = spread(case, methods[0])
    return (
        f"| {case['name']} | {case['layouts']} | {case['nbytes'] / 2**20:.3g} | {case['lower_bound']:.3f} | "
        f"{' | '.join(cells)} | {'-' if steadiness is None else f'{steadiness:.1%}'} | "
        f"{sum(case['wrong_bytes'].values())} |"
    )


_COLUMNS = (
    f"{'method':<24}{'runs':>5}{'min':>9}{'median':>9}{'p99':>9}{'algbw':>9}{'/bound':>8}{'/auto':>7}"
    f"{'spread':>8}{'cores':>7}{'wrong':>7}\n{'':<24}{'':>5}{'ms':>9}{'ms':>9}{'ms':>9}{'MB/s':>9}{'':>8}{'':>7}"
    f"{'%':>8}{'%':>7}{'bytes':>7}"
)


def details(case: Found) -> str:
    """One line per method, in the manner of nccl-tests. algbw: bytes of the whole tensor over the median
    time. /auto: median over that of `auto`, how many times longer the method takes."""
    size = f"{case['nbytes']} bytes" + (f" in {case['tensors']} tensors" if case["tensors"] > 1 else "")
    title = (
        f"# {case['name']}: {case['layouts']}; {size}; bound {case['lower_bound'] * 1e3:.2f} ms; auto plans "
        f"{case['strategy']}, predicts {case['predicted'] * 1e3:.2f} ms"
    )
    lines = [title, _COLUMNS]
    own = case["seconds"].get(OURS)
    for method, seconds in case["seconds"].items():
        if not seconds:
            continue
        median, apart = statistics.median(seconds), spread(case, method)
        times = [min(seconds), median, quantile(seconds, 0.99)]
        over, others = ratio(case, method), median / statistics.median(own) if own else None
        lines.append(
            f"{method:<24}{len(seconds):>5}{''.join(f'{1e3 * t:>9.2f}' for t in times)}"
            f"{case['nbytes'] / median / 1e6:>9.1f}{'-' if over is None else f'{over:.3f}':>8}"
            f"{'-' if others is None else f'{others:.2f}':>7}{'-' if apart is None else f'{apart:.1%}':>8}"
            f"{statistics.median(case['busy'][method]):>7.0%}{case['wrong_bytes'].get(method, 0):>7}"
        )
    lines += [f"{method:<24} not run: {why}" for method, why in case.get("not_run", {}).items()]
    lines += [f"{method:<24} FAILED: {why}" for method, why in case.get("failed", {}).items()]
    return "\n".join(lines)


def calibration_text(found: Found) -> str:
    """Returns what was found of links and machine, in one line."""
    return "calibration: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items() if k != "topology")


def overload(found: Found) -> str:
    """Returns why a calibration shows that the cores and not the links would be measured, or ""."""
    if found["efficiency"] < _LEAST_EFFICIENCY:
        return (
            f"this machine does not carry the rate: a link alone reaches {found['efficiency']:.0%} of it; "
            f"choose a lower --mbit"
        )
    if found["slowest_all_at_once"] < _LEAST_SHARE:
        return (
            f"the cores are the limit, not the links: a link keeps {found['slowest_all_at_once']:.0%} of its "
            f"rate while all links work; choose a lower --mbit"
        )
    return ""


def problems(results: dict[str, Any]) -> list[str]:
    """Returns the reasons why the figures must not be reported; empty if they may."""
    found = []
    if results["header"].get("links") == "loopback":
        found.append(
            "measured on loopback: no link limited anything, so only the checks of bytes mean something"
        )
    for calibration in results.get("calibrations", []):
        if why := overload(calibration):
            found.append(why)
    for case in results["cases"]:
        for method, wrong in case["wrong_bytes"].items():
            if wrong:
                found.append(f"{case['name']}: {method} left {wrong} wrong bytes")
    return found


def remarks(results: dict[str, Any]) -> list[str]:
    """Returns what a reader should know besides the figures: busy cores, failures, repeats that differ."""
    found = []
    busy = [case["name"] for case in results["cases"] if _busy(case, OURS) > BUSY_LIMIT]
    if busy:
        found.append(f"the cores were busy beyond {BUSY_LIMIT:.0%} while {OURS} ran in {len(busy)} cases")
    for case in results["cases"]:
        found += [f"{case['name']}: {method} failed: {why}" for method, why in case.get("failed", {}).items()]
        apart = spread(case, OURS)
        if apart is not None and apart > STEADY:
            found.append(f"{case['name']}: repeats of {OURS} differ by {apart:.1%}, more than {STEADY:.0%}")
    return found
