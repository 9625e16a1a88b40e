"""Builds, tests and measures what was written for GPUs, step by step, and goes on after a failure.

tools/on_gpu.sh [--dry] [--list] [--from STEP] [--only STEP ...] [--within SECONDS] [--shared]
                [--out FILE.json] [--commit NAME] [--publish FILE.json]

Each step has a time limit of its own, so that a hang costs one step. --within begins no step whose limit
would not fit any more, and says with which --from to go on. Results go to build/on_gpu/results.json, where
those of other steps stay, and all output to results.log beside it. --publish writes them into docs/cuda.md.
Exit status 1 where a step failed, 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import on_gpu_machine
import on_gpu_page
from on_gpu_run import run_step
from on_gpu_steps import BUILD, ROOT, Step, steps


def stop(reason: str) -> NoReturn:
    print(f"on-gpu: {reason}", file=sys.stderr)
    sys.exit(2)


def arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/on_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU, as far as each step goes")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    parser.add_argument("--from", dest="first", choices=names, metavar="STEP")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP")
    parser.add_argument("--within", type=float, metavar="SECONDS")
    parser.add_argument("--shared", action="store_true", help="others may be on the GPU")
    parser.add_argument("--out", type=Path, default=BUILD / "results.json", metavar="FILE.json")
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--publish", type=Path, metavar="FILE.json")
    return parser.parse_args()


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def chosen(args: argparse.Namespace, every: list[Step]) -> list[Step]:
    names = [step.name for step in every]
    taken = every[names.index(args.first) :] if args.first else every
    return [step for step in taken if args.only is None or step.name in args.only]


def earlier(out: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Results of steps that were run before with the same code on the same machine."""
    if not out.exists():
        return {}
    try:
        found = json.loads(out.read_text())
        same = all(found["head"][key] == head[key] for key in ("commit", "dry", "machine"))
        return {result["name"]: result for result in found["steps"]} if same else {}
    except (KeyError, TypeError, ValueError):
        return {}


def stable(machine: on_gpu_machine.Machine) -> dict[str, Any]:
    """What does not change between two calls on one machine."""
    return {key: value for key, value in asdict(machine).items() if key not in ("free_gib", "others")}


def row(result: dict[str, Any], dry: bool) -> str:
    counts = f"{result['passed']:>4} passed {result['failed']:>3} failed {result['skipped']:>3} skipped"
    said = result["first_error"] or "; ".join(result["not_run"])
    state = "FAILED" if result["failed"] else "dry" if dry else "ok" if not result["not_run"] else "in part"
    return f"{result['name']:<10} {state:<7} {counts} {result['seconds']:6.1f} s  {said}"


def main() -> int:
    every = steps()
    args = arguments([step.name for step in every])
    if args.publish:
        on_gpu_page.publish(args.publish)
        return 0
    if args.list:
        for step in every:
            print(f"{step.name:<10} {step.limit_s:4.0f} s  {step.what}")
        return 0
    machine = on_gpu_machine.seen()
    if reason := on_gpu_machine.obstacle(machine, dry=args.dry, shared=args.shared):
        stop(f"{reason}: nothing was built")
    head = {
        "commit": args.commit or commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "dry": args.dry,
        "machine": json.loads(json.dumps(stable(machine))),
    }
    place = "without a GPU" if args.dry else f"{machine.gpu}, driver {machine.driver}"
    print(f"on-gpu: {head['commit']}, torch {machine.torch}, {place}, {machine.cores} cores", flush=True)
    out = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    results = earlier(out, head)
    begin = time.monotonic()
    ran: list[str] = []
    failed = False
    with out.with_suffix(".log").open("a" if results else "w") as log:
        for step in chosen(args, every):
            left = None if args.within is None else args.within - (time.monotonic() - begin)
            if left is not None and left < step.limit_s and ran:
                limit = f"{step.name} may take {step.limit_s:.0f}"
                print(f"on-gpu: {left:.0f} s are left, {limit}: go on with --from {step.name}")
                break
            result = run_step(step, args.dry, log)
            results[step.name] = result
            ran.append(step.name)
            print(row(result, args.dry), flush=True)
            failed = failed or result["failed"] > 0
            ordered = [results[each.name] for each in every if each.name in results]
            out.write_text(json.dumps({"head": head, "steps": ordered}, indent=1) + "\n")
            if step.name == "build" and result["failed"]:
                print("on-gpu: nothing else can be run")
                break
    shown = os.path.relpath(out)
    print(f"on-gpu: {shown} and its log; {'a step FAILED' if failed else 'no failure'}")
    if args.dry:
        print("on-gpu: NOT checked: whatever needs a GPU, since this was a dry run (docs/cuda.md)")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
