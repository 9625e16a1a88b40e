"""Reshard cases on an emulated cluster, as ratios to the lower bound and to what people use today. Needs root
and iproute2; without them it runs on loopback, where only the checks mean something.

Each setting of cases has a cluster of its own. The ranks run all torch methods of a case; peers of other
kinds run from this process between the cases, while the ranks sleep. A method that ends a rank or does not
return is noted as failed, and the ranks are started again without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from meshcast import Topology
from meshcast.base.progress import Progress
from meshcast.bench.cases import CASES, Case, CaseSetting, find
from meshcast.bench.measure import FEW_REPEATS, SHORT, SLOW, measure
from meshcast.bench.methods import METHODS
from meshcast.bench.report import calibration_text, details, overload, problems, remarks, table

from ..cluster import Cluster, ClusterError, Loopback, missing, run_job
from ..harness import Found, machine, names, parser, positive, save
from ..peers.programs import PEERS, Peer
from ..ranks import Report, calibrated

EXTRA = ("gloo broadcasts", "Open MPI isend")  # slow, and nobody recommends them
RATES = (250.0, 200.0, 150.0, 100.0)  # Mbit/s, tried in this order where none was asked for

_LIMIT = 4 * 3600.0  # seconds for the cases of one setting
_STILL = 120.0  # seconds in which a method must have returned
_START = 300.0  # likewise for the start of all ranks and the calibration
_MOST_FAILURES = 8  # of one setting


class OverloadedError(ClusterError):
    """The machine cannot carry the rate."""


@dataclass
class Options:
    """What to run, and where to put what is found."""

    methods: list[str]
    peers: list[Peer]
    mbit: float
    seconds: float
    repeats: int
    loopback: str  # why there is no cluster, or ""
    found: Callable[[Found], None]  # takes each case as soon as it is measured
    calibrated: Callable[[Found], None]
    left_out: Callable[[list[str], str], None]  # cases that could not be measured, and why


def settings(cases: list[Case]) -> Iterator[tuple[CaseSetting, list[Case]]]:
    """Cases that share a cluster, in the order of their first."""
    for setting in dict.fromkeys(case.setting for case in cases):
        yield setting, [case for case in cases if case.setting == setting]


def run(cases: list[Case], options: Options) -> None:
    """All cases, setting by setting. Raises OverloadedError before anything is measured where the machine
    does not carry the rate of the first setting; what fails later is left out, and told."""
    seen = 0  # cases of the settings before
    with Progress("cases", len(cases), ticks=False) as shown:
        for number, (setting, members) in enumerate(settings(cases)):
            try:
                _run_setting(setting, members, options, partial(_tell, shown, seen + len(members)))
            except ClusterError as error:
                if number == 0 and isinstance(error, OverloadedError):
                    raise
                options.left_out([case.name for case in members], str(error))
            seen += len(members)


def _tell(shown: Progress, when_through: int, left: int) -> None:
    shown.at(when_through - left)


def _run_setting(
    setting: CaseSetting, cases: list[Case], options: Options, tell: Callable[[int], None]
) -> None:
    """tell: is told, again and again, how many cases are left."""
    hosts = max(2, *(case.hosts for case in cases))
    watch = _Watch(setting, list(cases), options, tell)
    failures = 0
    while watch.left:
        rates = setting.mbit(options.mbit, hosts)
        network: Cluster | Loopback = (
            Loopback(hosts, rates, setting.nics)
            if options.loopback
            else Cluster(hosts, rates, setting.nics, setting.own_cores)
        )
        with network as cluster:
            job = watch.job(cluster)
            try:
                run_job(
                    cluster, setting.ranks_per_host, "reshard.session:rank", job, limit=_LIMIT,
                    heard=watch.heard, look=watch.look,
                )  # fmt: skip
                return
            except OverloadedError:
                raise
            except ClusterError as error:
                failures += 1
                if watch.now is None or failures > _MOST_FAILURES:
                    options.left_out([case.name for case in watch.left], str(error))
                    return
                case, method = watch.now
                print(f"# {case}: {method} failed, going on without it: {error}", flush=True)
                watch.failed.setdefault(case, {})[method] = str(error).strip().splitlines()[-1]


@dataclass
class _Watch:
    """Takes the ranks' results as they come, and lets the other peers run in between."""

    setting: CaseSetting
    left: list[Case]
    options: Options
    tell: Callable[[int], None]
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # case, method: why
    now: tuple[str, str] | None = None  # case and method that the ranks are at
    _seen: int = 0
    _last: float = 0.0  # when something was heard
    _topology: str = ""

    def job(self, cluster: Cluster | Loopback) -> Found:
        """What the ranks have to do; starts the watch again."""
        self._cluster, self._seen, self._last, self.now = cluster, 0, time.monotonic(), None
        return {
            "cases": [case.name for case in self.left],
            "methods": [method for method in self.options.methods if method in METHODS],
            "failed": {case: list(methods) for case, methods in self.failed.items()},
            "repeats": self.options.repeats, "seconds": self.options.seconds,
            "ranks_per_host": self.setting.ranks_per_host, "mbit": cluster.rates, "nics": cluster.nics,
            "folder": str(cluster.folder),
        }  # fmt: skip

    def heard(self, kind: str, value: Any) -> None:
        """Handles what the ranks report."""
        self._seen += 1
        if kind == "calibration":
            self._calibrated(value)
        elif kind == "begin":
            self.now = tuple(value)
        else:
            self._take(value)
        self._last = time.monotonic()

    def look(self) -> None:
        """Raises ClusterError where the ranks make no progress."""
        self.tell(len(self.left))
        limit = _STILL if self._seen else _START
        if time.monotonic() - self._last > limit:
            raise ClusterError(f"nothing was heard of the ranks for {limit:.0f} s")

    def _calibrated(self, found: Found) -> None:
        self._topology = found["topology"]
        why = overload(found)
        if why and not self.options.loopback:
            raise OverloadedError(f"{calibration_text(found)}: {why}")
        self.options.calibrated(found)

    def _take(self, measured: Found) -> None:
        topology = Topology.from_json(self._topology)
        (case,) = find([measured["name"]])
        case = case.scaled(topology, self.options.seconds)
        measured["failed"] = self.failed.get(case.name, {})
        for peer in self.options.peers:
            self._run_peer(peer, case, topology, measured)
        self.options.found(measured)
        self.left = [other for other in self.left if other.name != case.name]
        self.now = None
        (self._cluster.folder / f"go {case.name}").touch()

    def _run_peer(self, peer: Peer, case: Case, topology: Topology, measured: Found) -> None:
        why = peer.missing() or peer.why_not(case)
        if case.methods and peer.name not in case.methods:
            why = why or "not what this case compares"
        if self.options.loopback:
            why = why or "not run on loopback"
        if why or not isinstance(self._cluster, Cluster):
            measured["not_run"][peer.name] = why
            return
        slow = max(SLOW * measured["lower_bound"], SHORT)
        try:
            repeats = max(case.least_repeats, min(self.options.repeats, FEW_REPEATS))
            found = peer.run(self._cluster, case, topology, repeats, slow)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            measured["failed"][peer.name] = " ".join(str(error).split())[-300:]
            print(f"# {case.name}: {peer.name} failed: {error}", flush=True)
            return
        for key in ("seconds", "busy", "wrong_bytes"):
            measured[key][peer.name] = found[key]


def rank(job: Found, report: Report) -> None:
    """Reports the calibration, what begins, and each case."""
    per_host = job["ranks_per_host"]
    links = calibrated(per_host, job["mbit"])
    topology = links.topology(per_host, job["nics"]).striped()
    report("calibration", links.facts() | {"topology": topology.to_json()})
    for name in job["cases"]:
        (case,) = find([name])
        methods = [method for method in job["methods"] if method not in job["failed"].get(name, [])]
        measured = measure(
            case.scaled(topology, job["seconds"]), topology, methods, job["repeats"],
            lambda method, name=name: report("begin", [name, method]),
        )  # fmt: skip
        report("case", measured)
        # Peers of another kind run between the cases, while these processes sleep.
        while dist.get_rank() == 0 and not Path(job["folder"], f"go {name}").exists():
            time.sleep(0.05)
        dist.barrier()


class Book:
    """Prints what is found, and keeps the file up to date, so that a run that ends early leaves what it
    has."""

    def __init__(self, head: Found, out: Path | None) -> None:
        self.results: Found = {"header": head, "calibrations": [], "cases": [], "left_out": {}}
        self._out = out
        self._text: list[str] = []
        self._say("# " + ", ".join(f"{k} {v}" for k, v in head.items()))

    def calibrated(self, found: Found) -> None:
        self.results["calibrations"].append(found)
        self._say(f"# {calibration_text(found)}")

    def found(self, case: Found) -> None:
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
            save(self._out, self.results)
            save(self._out.with_suffix(".txt"), "\n".join(self._text))


def parse() -> argparse.Namespace:
    groups = list(dict.fromkeys(case.group for case in CASES))
    options = parser("reshard", __doc__)
    options.add_argument(
        "--cases", type=_cases([*groups, *(case.name for case in CASES)]),
        default=["n-to-m", "1-to-m"], help="names of cases or of groups of cases, separated by ';' or ','",
    )  # fmt: skip
    known = [*METHODS, *(peer.name for peer in PEERS)]
    options.add_argument(
        "--methods", type=names([*known, "all"], "method"), default=[m for m in known if m not in EXTRA],
        help=f"separated by commas; `all` for all; default: all but {' and '.join(EXTRA)}, which take long",
    )  # fmt: skip
    options.add_argument(
        "--mbit", type=positive(float),
        help=f"rate of a link each way, Mbit/s; default: the first of {', '.join(f'{r:g}' for r in RATES)} "
        "that the machine carries",
    )  # fmt: skip
    options.add_argument("--seconds", type=positive(float), default=0.3, help="what the bounds are about")
    options.add_argument(
        "--repeats", type=positive(int), default=5,
        help="of auto, multicast and broadcast; others take part in 3 of them",
    )  # fmt: skip
    options.add_argument("--loopback", action="store_true", help="no cluster, even where one could be built")
    options.add_argument("--out", type=Path, help="write raw JSON here, case by case, and a text beside it")
    args = options.parse_args()
    if "all" in args.methods:
        args.methods = known
    return args


def _cases(known: list[str]) -> Callable[[str], list[str]]:
    """Some names have commas: those are separated by semicolons."""
    whole = names(known, "case")
    return lambda text: [
        name for part in text.split(";") for name in ([part] if part in known else whole(part))
    ]


def header(args: argparse.Namespace, rate: float, loopback: str) -> Found:
    """What a reader must know to take the figures for what they are."""
    return {
        **machine("reshard"),
        "links": "loopback" if loopback else "emulated",
        "link_mbit": rate,
        "bound_seconds": args.seconds,
        "repeats": args.repeats,
    }


def main() -> int:
    args = parse()
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
