"""Measures again and compares with committed results, ratio by ratio.

Ratios to the lower bound are compared, not times, so that the machines need not be equal. Fails where a
median is more than 10 % above the committed one, or where a committed figure could not be measured. What is
above is measured up to twice more before it counts: something else may have disturbed it. Messages over UCX
are compared with torch's over gloo in the same way; there 30 % is allowed, since loopback leaves less between
a message and the scheduler than the links of a cluster do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshcast.bench.report import ratio

from .calls.cases import Size, carrier_of
from .calls.rounds import QUOTIENT, Pair, messages, quotients
from .harness import RESULTS, load, parser, positive

_ALLOWED = 1.10
_ALLOWED_MESSAGES = 1.30
_MESSAGES = [Size(nbytes << 10) for nbytes in (4, 1024, 16384)]
_TRIES = 3
_METHODS = ["auto", "multicast", "broadcast"]

Cases = dict[str, dict[str, Any]]


def worse(before: Cases, now: Cases, methods: list[str]) -> dict[str, list[str]]:
    """By case, what is more than 10 % above the committed ratio or was not measured."""
    found: dict[str, list[str]] = {}
    for name, case in before.items():
        for method in methods:
            old = ratio(case, method)
            new = ratio(now[name], method) if name in now else None
            if old is not None and (new is None or new > old * _ALLOWED):
                shown = "not measured" if new is None else f"{new:.3f}"
                found.setdefault(name, []).append(f"{name}, {method}: {shown}, committed {old:.3f}")
    return found


def measure(names: list[str], rate: float, seconds: float, repeats: int) -> tuple[Cases, int]:
    """The cases by name, and the exit status of the run."""
    with tempfile.TemporaryDirectory(prefix="meshcast-bench-") as folder:
        out = Path(folder, "now.json")
        options = {
            "--cases": ";".join(names), "--methods": ",".join(_METHODS), "--mbit": rate,
            "--seconds": seconds, "--repeats": repeats, "--out": out,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks", "reshard"]
        command += [str(word) for option in options.items() for word in option]
        with subprocess.Popen(command) as run:
            try:
                status = run.wait()
            except BaseException:
                run.terminate()  # killed, it would leave its hosts behind
                raise
        cases = (load(out) or {"cases": []})["cases"]
        return {case["name"]: case for case in cases}, status


def worse_messages(before: dict[str, float], now: dict[str, float]) -> dict[str, str]:
    """By quotient (rounds.quotients), what is more than 30 % above the committed one or was not measured."""
    found = {}
    for name, old in before.items():
        new = now.get(name)
        if new is None or new > old * _ALLOWED_MESSAGES:
            shown = "not measured" if new is None else f"{new:.2f}"
            found[name] = f"message, {name}: {shown} of torch's, committed {old:.2f}"
    return found


def check_messages(repeats: int) -> list[str]:
    """What is worse in each of the tries. Takes ten seconds for each."""
    sizes = {size.nbytes for size in _MESSAGES}
    committed = load(RESULTS / "calls.json")["sizes"]
    before = quotients([row for row in committed if row["bytes"] in sizes])
    pairs: dict[str, Pair] = {}
    try:
        for key in QUOTIENT:
            pairs[carrier_of(key)] = Pair(carrier_of(key), sys.executable)
        for turn in range(_TRIES):
            found = worse_messages(before, quotients(messages(pairs, QUOTIENT, _MESSAGES, repeats)))
            print("\n".join(f"# try {turn + 1}: {line}" for line in found.values()), flush=True)
            before = {name: before[name] for name in found}
            if not found:
                break
    finally:
        for pair in pairs.values():
            pair.close()
    return list(found.values())


def main() -> int:
    options = parser("check", __doc__)
    options.add_argument("--committed", type=Path, default=RESULTS / "paper_cases.json")
    options.add_argument("--repeats", type=positive(int), default=5)
    args = options.parse_args()
    committed = load(args.committed)
    if committed is None:
        options.error(f"--committed: no file {args.committed}; `make bench` writes it")
    before = {case["name"]: case for case in committed["cases"]}
    head = committed["header"]
    found, failed = {name: ["not measured"] for name in before}, False
    for turn in range(_TRIES):
        left = {name: before[name] for name in found}
        now, status = measure(list(left), head["link_mbit"], head["bound_seconds"], args.repeats)
        failed = failed or status != 0
        found = worse(left, now, _METHODS)
        print(
            "\n".join(f"# try {turn + 1}: {line}" for lines in found.values() for line in lines), flush=True
        )
        if failed or not found:
            break
    slower = check_messages(args.repeats)
    print(
        "\n".join([line for lines in found.values() for line in lines] + slower)
        or f"no ratio is more than {_ALLOWED - 1:.0%} above the committed one"
    )
    return 1 if found or slower or failed else 0
