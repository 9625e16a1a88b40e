"""From the kill of a rank to the end of the next step, in the job of examples/elastic.

python -m benchmarks.going_on [--ranks 4] [--kills 10] [--seed 1] [--model nano]

Kills a random worker with SIGKILL once the job is back at its number of ranks and has done five steps more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshcast.base.progress import track

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds that nothing goes on


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshcast.elastic.run", "--nproc-per-node", f"1:{options.ranks}"),
                *("--max-restarts", str(options.kills), str(ROOT / "examples/elastic/train.py")),
                *("--model", options.model, "--steps", "1000000", "--metrics", str(metrics)),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
            stdout=subprocess.DEVNULL,
        )
        try:
            rows = [measure(job, metrics, options.ranks, drawn) for _ in track(range(options.kills), "kills")]
            steps = [each for each in read(metrics) if each["ranks"] == options.ranks]
        finally:
            job.terminate()
            job.wait()
    about = machine("benchmarks.going_on")
    print(f"{options.ranks} ranks, model {options.model}, {options.kills} kills; {json.dumps(about)}")
    for what, values in (
        ("to the end of the next step", [row[0] for row in rows]),
        ("until the new rank has joined", [row[1] for row in rows]),
    ):
        print(f"from the kill {what}: median {statistics.median(values):.2f} s, most {max(values):.2f} s")
    for name, what in (("seconds", "a step"), ("agreeing", "of it until all agree")):
        print(f"{what}: median {1e3 * statistics.median(each[name] for each in steps):.2f} ms")


def measure(
    job: subprocess.Popen[bytes], metrics: Path, ranks: int, drawn: random.Random
) -> tuple[float, float]:
    """Seconds from a kill to the end of the next step, and of the first with all ranks again."""
    before = len(read(metrics))
    wait(job, metrics, lambda steps: len(steps) > before + 5 and steps[-1]["ranks"] == ranks)
    time.sleep(drawn.random() * 0.2)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    killed = time.time()
    os.kill(int(drawn.choice(children)), signal.SIGKILL)

    # The step that was on its way may have ended. And the new rank may be there before the others have done
    # a step without it: then both are the same.
    old = [step for step in read(metrics) if step["time"] < killed][-1]["group"]

    def later(least: int) -> float:
        def steps_since(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [x for x in steps if x["time"] > killed and x["group"] != old and x["ranks"] >= least]

        return wait(job, metrics, steps_since)[0]["time"] - killed

    return later(1), later(ranks)


def wait(job: subprocess.Popen[bytes], metrics: Path, done: Any) -> Any:
    limit = time.monotonic() + LIMIT
    while not (found := done(read(metrics))):
        if job.poll() is not None or time.monotonic() > limit:
            raise SystemExit(f"the job does not go on (exit status {job.poll()})")
        time.sleep(0.05)
    return found


def read(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    main()
