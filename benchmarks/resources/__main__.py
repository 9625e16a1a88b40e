"""python -m benchmarks.resources: memory, CPU time, small calls and copies inside a host, each beside what it
is to be compared with. Four ranks on this machine, connected by loopback or by shared memory. Writes
benchmarks/results/resources.json and the table of docs/benchmarks.md; takes about two minutes, with nothing
else running."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import ROOT, machine
from ..page import replace

_RESULTS = ROOT / "benchmarks/results/resources.json"
_PAGE = ROOT / "docs/benchmarks.md"
_MARK = "<!-- {} of what python -m benchmarks.resources writes -->"
_RANKS = 4
_LIMIT = 300.0  # seconds for one start of the ranks
_WORLDS = {"network": "0", "shared": "1"}  # name: MESHCAST_SHM


@dataclass(frozen=True)
class Row:
    what: str
    against: str
    unit: str
    scale: float
    target: float | None  # of the quotient, or of the figure itself where it is compared with nothing


_ROWS = {
    "memory, loopback": Row("most resident memory beyond that before, rows to columns",
                            "64 MiB + 5 % of what a rank holds", "MiB", 1.0, 1.0),
    "memory, shared": Row("the same through shared memory", "the same", "MiB", 1.0, 1.0),
    "CPU, in one piece": Row("CPU time of all ranks, 256 MiB, rows to the same rows",
                             "gloo isend and irecv of the bytes", "s", 1.0, 1.3),
    "CPU, strided": Row("the same, rows to columns", "the same, nothing packed", "s", 1.0, 1.3),
    "CPU, packed": Row("the same", "the same, packed by torch first", "s", 1.0, 1.3),
    "in host, rows to columns, one core": Row("256 MiB in a host, rows to columns, on one core",
                                              "each copies what it gets", "ms", 1e3, 1.5),
    "in host, rows to columns, all cores": Row("the same, on all cores in turn", "the same", "ms", 1e3, None),
    "in host, all-gather, one core": Row("256 MiB in a host, rows to replicas, on one core",
                                         "each copies what it gets", "ms", 1e3, 1.5),
    "in host, all-gather, all cores": Row("the same, on all cores in turn", "the same", "ms", 1e3, None),
    "digest, time, loopback": Row("256 MiB as a state dict with `digest=True`, rows to columns, loopback",
                                  "without", "ms", 1e3, 1.3),
    "digest, time, shared": Row("the same through shared memory", "without", "ms", 1e3, 1.3),
    "digest, memory, loopback": Row("most resident memory beyond that before, with digests, loopback",
                                    "64 MiB + 5 % of what a rank holds", "MiB", 1.0, 1.0),
    "digest, memory, shared": Row("the same through shared memory", "the same", "MiB", 1.0, 1.0),
    "4 KiB": Row("Resharder.run of 4 KiB, one way over loopback", "gloo send and recv", "us", 1.0, 1.5),
    "call": Row("Resharder.run of 4 KiB that stay where they are", "", "us", 1.0, 100.0),
    "call, autograd": Row("reshard with autograd of 4 KiB that stay", "", "us", 1.0, 250.0),
}  # fmt: skip


def text(results: dict[str, Any]) -> str:
    """A Markdown table with its head."""
    head = results["header"]
    said = (
        f"`{head['command']}`: commit {head['commit']}, {head['cores']} cores, kernel {head['kernel']}, "
        f"torch {head['torch']}; {head['mib']} MiB per rank where memory is measured; medians of "
        f"{head['repeats']} rounds taken in turn."
    )
    lines = [
        said,
        "",
        "| | unit | meshcast | compared with | | quotient | target |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for name, row in _ROWS.items():  # rows that say "the same" mean the one above
        found = results["figures"].get(name)
        if found is None:
            continue
        other = f"{found['theirs'] * row.scale:.4g}" if "theirs" in found else ""
        quotient = f"{found['value']:.2f}" if "theirs" in found else ""
        lines.append(
            f"| {row.what} | {row.unit} | {found['ours'] * row.scale:.4g} | {row.against} | {other} "
            f"| {quotient} | {'' if row.target is None else f'{row.target:g}'} |"
        )
    return "\n".join(lines)


def run(world: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}",
            "-m", "benchmarks.resources.rank", world, str(out), "--mib", str(args.mib),
            "--repeats", str(args.repeats),
        ]  # fmt: skip
        env = {
            **os.environ,
            "MESHCAST_SHM": _WORLDS[world],
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=_LIMIT)
        return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="that a rank holds where memory is measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worlds", nargs="+", choices=list(_WORLDS), default=list(_WORLDS))
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    args = parser.parse_args()
    if args.mib < 16 or args.repeats < 1:
        parser.error("--mib must be 16 or more, --repeats 1 or more")
    figures: dict[str, Any] = {}
    for world in args.worlds:
        figures |= run(world, args)
    head = {**machine("benchmarks.resources"), "mib": args.mib, "repeats": args.repeats}
    results = {"header": head, "figures": figures}
    print(text(results))
    if not args.no_publish:
        _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        replace(_PAGE, _MARK, text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
