"""How soon the others know of a rank that fails.

One rank of three to five fails in rounds that a seed draws (tests/fault/matrix.py, which also judges them),
by the clock, or at fault points of the build that `make faults` makes. In a partition the link of a host goes
down (tests/fault/cut_link_program.py; needs root and iproute2). Rows may be made one by one: those of other
faults and transports stay in benchmarks/results/time_to_error.json and in the table of docs/errors.md, each
with its date. A thousand kills take about twenty minutes, a hundred freezes fifteen.

PYTHONPATH=python:. python -m benchmarks time_to_error --faults kill stop partition --rounds 100
"""

from __future__ import annotations

import datetime
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshcast.base.progress import Progress

from ..cluster import Cluster, ClusterError, run_ranks
from ..harness import ROOT, Found, Page, command, machine, positive, table

sys.path.insert(0, str(ROOT / "tests"))

from fault.matrix import ranks
from fault.rounds import BY_CLOCK, FAULTS, TRANSPORTS, combinations, draw

_CUT = ROOT / "tests/fault/cut_link_program.py"
_BEFORE = "before it came"  # a row beside the moments: known at the limit alone
_ANY = "any"
_SOCKET = "a TCP socket"  # in place of a transport: what the kernel needs
_CHILD = """
import socket, sys, time, torch
held = torch.ones(8 << 20)  # 32 MiB, as ranks of the other rows have
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(b"here")
time.sleep(60)
"""
_NAMES = {  # of faults, in the table
    "plain": "killed (SIGKILL), without meshcast",
    "kill": "killed (SIGKILL)",
    "exit": "exits with status 1",
    "abort": "aborts (SIGABRT)",
    "stop": "frozen, limit 4 s",
    "gil": "a thread keeps the GIL, limit 4 s",
    "too late": "calls after the limit of 4 s",
    "late": "calls late, within the limit: the call takes",
    "slow": "0.3 s slower at each message: the call takes",
    "reset": "connections reset (RST)",
    "half": "connections end (FIN)",
    "memory": "no memory",
    "cuda": "CUDA error (fake GPU)",
    "partition": "its link goes down, limit 14 s",
}


@dataclass
class _Rounds:
    """What one row is made of."""

    times: list[float] = field(default_factory=list)  # seconds until each survivor knew
    ended: list[float] = field(default_factory=list)
    rounds: int = 0
    wrong: int = 0

    def row(self) -> Found:
        times = sorted(self.times)
        return {
            "rounds": self.rounds,
            "p50": _quantile(times, 0.5),
            "p99": _quantile(times, 0.99),
            "max": times[-1] if times else None,
            "wrong": self.wrong,
            "ended": max(self.ended) if self.ended else None,
        }


def _quantile(ordered: list[float], part: float) -> float | None:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else None


def _drawn(
    transport: str, fault: str, rounds: int, seed: int, only: str, shown: Progress
) -> dict[str, _Rounds]:
    """By moment, and of all."""
    by_clock = only == "clock" or (fault == "kill" and only != "points")
    moments = [
        moment
        for _, _, moment in combinations([transport], [fault], [*BY_CLOCK, *FAULTS[fault]])
        if (moment in BY_CLOCK) == by_clock
    ]
    found: dict[str, _Rounds] = {}
    with ranks(points=not by_clock) as parent:
        for number in range(rounds if moments else 0):
            moment = moments[number % len(moments)]
            outcome = parent.run(draw(seed + number, transport, fault, moment))
            shown.done()
            for key in (_BEFORE,) if outcome.before and fault == "kill" else (moment, _ANY):
                into = found.setdefault(key, _Rounds())
                into.rounds += 1
                into.wrong += bool(outcome.wrong)
                into.times += outcome.times
                into.ended += outcome.ended
            for text in outcome.wrong:
                print(
                    f"{transport}, {fault}, {moment}, seed {seed + number}: {text}",
                    file=sys.stderr,
                    flush=True,
                )
    return found if fault == "kill" else {_ANY: found[_ANY]} if found else {}


def _plain(rounds: int, shown: Progress) -> dict[str, _Rounds]:
    """A process that has imported torch alone. The kernel frees its memory before it closes its connections,
    and nobody can see its death before that."""
    found = _Rounds()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for _ in range(rounds):
            command = [sys.executable, "-c", _CHILD, str(listening.getsockname()[1])]
            with subprocess.Popen(command) as child:
                peer, _ = listening.accept()
                with peer:
                    peer.recv(4, socket.MSG_WAITALL)
                    begin = time.monotonic()
                    child.kill()
                    found.wrong += peer.recv(1) != b""
                    found.times.append(time.monotonic() - begin)
            found.rounds += 1
            shown.done()
    return {_ANY: found}


def _partition(transport: str, rounds: int, seed: int, shown: Progress) -> dict[str, _Rounds]:
    """Three hosts, the second of which loses its link to the network of the data."""
    found, rng = _Rounds(), random.Random(seed)
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])
    for _ in range(rounds):
        delay = rng.uniform(0.0, 1.2)  # the transfer takes somewhat longer
        with Cluster(3, 800, 2) as cluster:
            env = {"PYTHONPATH": paths, "SWITCH": cluster.switch, "MESHCAST_TRANSPORT": transport}
            command = [
                sys.executable,
                str(_CUT),
                "transfer",
                "cuts",
                "wheel" if transport == "ucx" else "gloo",
            ]
            found.rounds += 1
            try:
                run_ranks(cluster, 1, [*command, f"{delay:.3f}"], limit=200, env=env)
            except ClusterError as error:
                found.wrong += 1
                print(f"{transport}, partition after {delay:.3f} s: {error}", file=sys.stderr, flush=True)
            for text in _outputs(cluster):
                found.times += [float(each) for each in re.findall(r"known ([0-9.]+) s after the cut", text)]
                found.ended += [float(each) for each in re.findall(r"ended in ([0-9.]+) s", text)]
        shown.done()
    return {_ANY: found}


def _outputs(cluster: Cluster) -> Iterator[str]:
    for path in sorted(cluster.folder.glob("rank*.out")):
        yield path.read_text(errors="replace")


def text(runs: list[Found]) -> str:
    columns = "data|the rank|moment|rounds|p50, s|p99, s|max, s|not as promised|end, s|run"
    rows = {
        (row["transport"], row["fault"], row["moment"]): (row, run) for run in runs for row in run["rows"]
    }
    cells = []
    used: list[Found] = []
    order = [*_NAMES]
    for key in sorted(rows, key=lambda key: (order.index(key[1]), [_SOCKET, *TRANSPORTS].index(key[0]))):
        row, run = rows[key]
        if run not in used:
            used.append(run)
        cells.append(
            [row["transport"], _NAMES[row["fault"]], row["moment"], str(row["rounds"])]
            + [_shown(row[name]) for name in ("p50", "p99", "max")]
            + [str(row["wrong"]), _shown(row["ended"]), str(used.index(run) + 1)]
        )
    # The number of a run is no figure.
    lines = [table(columns.split("|"), cells, "lllrrrrrrl"), ""]
    for number, run in enumerate(used, 1):
        head = run["header"]
        lines.append(f"{number}. `{command(head)}`,")
        lines.append(
            f"   {run['date']}, commit {head['commit']}, {head['cores']} cores with a load of {run['load']}, "
            f"kernel {head['kernel']}, torch {head['torch']}."
        )
    return "\n".join(lines)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _kept(runs: list[Found], new: Found) -> list[Found]:
    """The runs with their rows that the new one does not replace."""
    replaced = {(row["transport"], row["fault"]) for row in new["rows"]}
    for run in runs:
        run["rows"] = [row for row in run["rows"] if (row["transport"], row["fault"]) not in replaced]
    return [run for run in runs if run["rows"]]


PAGE = Page("time_to_error", "time_to_error.json", "docs/errors.md", text)
PAGES = [PAGE]


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--faults", nargs="*", choices=_NAMES, default=["plain", "kill", "stop"])
    options.add_argument("--transports", nargs="*", choices=TRANSPORTS, default=TRANSPORTS)
    options.add_argument("--rounds", type=positive(int), default=100, help="for each fault and transport")
    options.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    options.add_argument("--moments", choices=["clock", "points"], default="", help="where a fault has both")
    args = options.parse_args()
    new: Found = {
        "header": machine("time_to_error"),
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[2]),  # processes that want a core, over the last 15 minutes
        "rows": [],
    }
    pairs = [
        (fault, transport)
        for fault in args.faults
        for transport in ([_SOCKET] if fault == "plain" else args.transports)
        if (fault, transport) != ("partition", "shared memory")
    ]
    with Progress("rounds", args.rounds * len(pairs), ticks=False) as shown:
        for fault, transport in pairs:
            if fault == "plain":
                found = _plain(args.rounds, shown)
            elif fault == "partition":
                found = _partition(transport, args.rounds, args.seed, shown)
            else:
                found = _drawn(transport, fault, args.rounds, args.seed, args.moments, shown)
            new["rows"] += [
                {"transport": transport, "fault": fault, "moment": moment, **rounds.row()}
                for moment, rounds in found.items()
            ]
    runs = [*_kept(PAGE.results or [], new), new]
    print(text(runs))
    PAGE.finish(args, runs)
    return 0
