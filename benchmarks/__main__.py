"""python -m benchmarks: reshard cases on an emulated cluster, as ratios to the lower bound and to what people
use today. Needs root and iproute2; without them it runs on loopback, where only the checks mean something."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshcast.bench.cases import CASES, find
from meshcast.bench.methods import METHODS
from meshcast.bench.report import calibration_text, details, problems, remarks, table

from .cluster import ClusterError, missing
from .machine import machine
from .peers import PEERS
from .session import Options, OverloadedError, run

EXTRA = ("gloo broadcasts", "Open MPI isend")  # slow, and nobody recommends them
RATES = (250.0, 200.0, 150.0, 100.0)  # Mbit/s, tried in this order where none was asked for


def header(args: argparse.Namespace, rate: float, loopback: str) -> dict[str, Any]:
    """What a reader must know to take the figures for what they are."""
    return {
        **machine("benchmarks"),
        "links": "loopback" if loopback else "emulated",
        "link_mbit": rate,
        "bound_seconds": args.seconds,
        "repeats": args.repeats,
    }


def names(known: list[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        return chosen

    return parse


def positive(kind: type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text}: must be positive")
        return value

    return parse


def parse() -> argparse.Namespace:
    groups = list(dict.fromkeys(case.group for case in CASES))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--cases", type=_cases([*groups, *(case.name for case in CASES)]),
        default=["n-to-m", "1-to-m"], help="names of cases or of groups of cases, separated by ';' or ','",
    )  # fmt: skip
    known = [*METHODS, *(peer.name for peer in PEERS)]
    parser.add_argument(
        "--methods", type=names([*known, "all"], "method"), default=[m for m in known if m not in EXTRA],
        help=f"separated by commas; `all` for all; default: all but {' and '.join(EXTRA)}, which take long",
    )  # fmt: skip
    parser.add_argument(
        "--mbit", type=positive(float),
        help=f"rate of a link each way, Mbit/s; default: the first of {', '.join(f'{r:g}' for r in RATES)} "
        "that the machine carries",
    )  # fmt: skip
    parser.add_argument("--seconds", type=positive(float), default=0.3, help="what the bounds are about")
    parser.add_argument(
        "--repeats",
        type=positive(int),
        default=5,
        help="of auto, multicast and broadcast; others take part in 3 of them",
    )
    parser.add_argument("--loopback", action="store_true", help="no cluster, even where one could be built")
    parser.add_argument("--out", type=Path, help="write raw JSON here, case by case, and a text beside it")
    args = parser.parse_args()
    if "all" in args.methods:
        args.methods = known
    return args


def _cases(known: list[str]) -> Callable[[str], list[str]]:
    """Some names have commas: those are separated by semicolons."""
    whole = names(known, "case")
    return lambda text: [
        name for part in text.split(";") for name in ([part] if part in known else whole(part))
    ]


class Book:
    """Prints what is found, and keeps the file up to date, so that a run that ends early leaves what it
    has."""

    def __init__(self, head: dict[str, Any], out: Path | None) -> None:
        self.results: dict[str, Any] = {"header": head, "calibrations": [], "cases": [], "left_out": {}}
        self._out = out
        self._text: list[str] = []
        self._say("# " + ", ".join(f"{k} {v}" for k, v in head.items()))

    def calibrated(self, found: dict[str, Any]) -> None:
        self.results["calibrations"].append(found)
        self._say(f"# {calibration_text(found)}")

    def found(self, case: dict[str, Any]) -> None:
        self.results["cases"].append(case)
        self._say(details(case))

    def left_out(self, cases: list[str], why: str) -> None:
        self.results["left_out"] |= dict.fromkeys(cases, why)
        self._say(f"# not measured: {', '.join(cases)}: {why}")

    def close(self, methods: list[str]) -> list[str]:
        """The summary; returns why the figures must not be reported."""
        if self.results["cases"]:
            ran = [m for m in methods if any(case["seconds"].get(m) for case in self.results["cases"])]
            self._say("\n# median time over the lower bound\n" + table(self.results["cases"], ran))
        for remark in remarks(self.results):
            self._say(f"# {remark}")
        found = problems(self.results)
        for problem in found:
            self._say(f"# DO NOT REPORT: {problem}")
        return found

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self._text.append(text)
        if self._out is not None:
            write(self._out, json.dumps(self.results, indent=1))
            write(self._out.with_suffix(".txt"), "\n".join(self._text))


def write(path: Path, text: str) -> None:
    """All or nothing: who reads meanwhile finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n")
    part.replace(path)


def main() -> int:
    args = parse()
    # Ended from outside, it cleans up behind itself as after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    loopback = missing()
    if loopback:
        print(f"# {loopback}: no emulated cluster. All ranks run on loopback, and no figure means anything.")
    elif args.loopback:
        loopback = "asked for"
    peers = [peer for peer in PEERS if peer.name in args.methods]
    for peer in peers:
        if why := peer.missing():
            print(f"# {peer.name}: {why}")
    began = time.monotonic()
    for rate in RATES if args.mbit is None else (args.mbit,):
        book = Book(header(args, rate, loopback), args.out)
        options = Options(
            args.methods, peers, rate, args.seconds, args.repeats, loopback, book.found, book.calibrated,
            book.left_out,
        )  # fmt: skip
        try:
            run(find(args.cases), options)
        except OverloadedError as error:
            print(f"# {rate:g} Mbit/s refused: {error}", file=sys.stderr, flush=True)
            continue
        except (ClusterError, RuntimeError) as error:
            print(f"benchmarks did not run: {error}", file=sys.stderr)
            return 1
        found = book.close(args.methods)
        print(f"# {time.monotonic() - began:.0f} s in all")
        return 1 if (found and not loopback) or not book.results["cases"] else 0
    print("benchmarks did not run: the machine carries none of these rates", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
