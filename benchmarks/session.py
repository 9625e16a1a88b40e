"""Runs cases on clusters, each setting on its own, and goes on past methods that fail.

The ranks run all torch methods of a case (worker.py) and append what they find to a file that this process
reads; peers of other kinds run from here between the cases, while the ranks sleep. A method that ends a
rank or does not return is noted as failed, and the ranks are started again without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshcast import Topology
from meshcast.base.progress import Progress
from meshcast.bench.cases import Case, CaseSetting, find
from meshcast.bench.measure import FEW_REPEATS, SHORT, SLOW
from meshcast.bench.methods import METHODS
from meshcast.bench.report import calibration_text, overload

from .cluster import Cluster, ClusterError, Loopback, run_ranks
from .peers import Peer

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
    found: Callable[[dict[str, Any]], None]  # takes each case as soon as it is measured
    calibrated: Callable[[dict[str, Any]], None]
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
            command = [sys.executable, "-m", "benchmarks.worker", str(job)]
            try:
                run_ranks(cluster, setting.ranks_per_host, command, limit=_LIMIT, progress=watch.look)
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

    def job(self, cluster: Cluster | Loopback) -> Path:
        """Writes down what the ranks have to do; starts the watch anew."""
        self._cluster, self._seen, self._last, self.now = cluster, 0, time.monotonic(), None
        methods = [method for method in self.options.methods if method in METHODS]
        job = {
            "cases": [case.name for case in self.left], "methods": methods,
            "failed": {case: list(methods) for case, methods in self.failed.items()},
            "repeats": self.options.repeats, "seconds": self.options.seconds,
            "ranks_per_host": self.setting.ranks_per_host, "mbit": cluster.rates, "nics": cluster.nics,
            "folder": str(cluster.folder),
        }  # fmt: skip
        path = cluster.folder / "job.json"
        path.write_text(json.dumps(job))
        return path

    def look(self) -> None:
        """Handles what the ranks have written since the last look. Raises ClusterError where they stand
        still."""
        path = self._cluster.folder / "results.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be cut
        for line in lines[self._seen :]:
            self._seen += 1
            found = json.loads(line)
            if "calibration" in found:
                self._calibrated(found["calibration"])
            elif "begin" in found:
                self.now = tuple(found["begin"])
            else:
                self._take(found["case"])
            self._last = time.monotonic()
        self.tell(len(self.left))
        limit = _STILL if self._seen else _START
        if time.monotonic() - self._last > limit:
            raise ClusterError(f"nothing was heard of the ranks for {limit:.0f} s")

    def _calibrated(self, found: dict[str, Any]) -> None:
        self._topology = found["topology"]
        why = overload(found)
        if why and not self.options.loopback:
            raise OverloadedError(f"{calibration_text(found)}: {why}")
        self.options.calibrated(found)

    def _take(self, measured: dict[str, Any]) -> None:
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

    def _run_peer(self, peer: Peer, case: Case, topology: Topology, measured: dict[str, Any]) -> None:
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
