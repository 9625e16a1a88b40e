"""Train a GPT whose ranks may be killed at any moment, and join.

python -m meshcast.elastic.run --nproc-per-node 2:4 --max-restarts 3 examples/elastic/train.py --steps 200
python -m meshcast.elastic.run --nproc-per-node 3:5 --max-restarts 3 examples/elastic/train.py --pipeline
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

# `gpt` and `training` are packages of the examples folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from gpt.config import MODELS, model_config
from gpt.data import TextSamples, read_text
from meshcast.elastic import Job

from elastic.hybrid import HybridTraining
from elastic.pipeline import PipelineTraining
from elastic.state import Task


def main() -> None:
    options = parser().parse_args()
    config = model_config(options.model)
    samples = TextSamples(read_text(options.data), config.seq_len, seed=0)
    task = Task(config, samples, options.batch, options.steps)
    kind = PipelineTraining if options.pipeline else HybridTraining
    groups = 0

    def make() -> HybridTraining | PipelineTraining:
        nonlocal groups
        groups += 1
        return kind(task)

    with Job(make, backend="gloo", timeout=timedelta(seconds=60)) as job:
        while job.steps < options.steps:
            with job.attempt() as training:
                time.sleep(options.pause)
                step, begin = job.steps, time.perf_counter()
                loss = training.forward_and_backward(step)
                ready = time.perf_counter()
                update = job.commit(training.update)
                end = time.perf_counter()
                if dist.get_rank() == 0:
                    report(options.metrics, step, loss, groups, end - begin, end - ready - update)


def report(
    metrics: Path | None, step: int, loss: float, groups: int, seconds: float, agreeing: float
) -> None:
    """groups: that this process has been in. seconds: of the step; agreeing: of it until all agreed."""
    ranks = dist.get_world_size()
    print(f"step {step + 1}: loss {loss:.4f} on {ranks} ranks, process {os.getpid()} is rank 0", flush=True)
    if metrics is not None:
        said = {"step": step, "loss": loss, "ranks": ranks, "time": time.time()}
        said["group"] = f"{os.getpid()}.{groups}"  # another one after each change of ranks
        with metrics.open("a") as file:
            file.write(json.dumps({**said, "seconds": seconds, "agreeing": agreeing}) + "\n")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pipeline", action="store_true", help="two stages (FSDP2 with hybrid sharding)")
    found.add_argument("--model", default="nano", help=f"{', '.join(MODELS)} (%(default)s)")
    found.add_argument("--data", metavar="PATH", help="text (the sources of Python's standard library)")
    found.add_argument("--batch", type=int, default=24, help="samples of a step, of all ranks (%(default)s)")
    found.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    found.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to see it all")
    found.add_argument("--metrics", type=Path, metavar="PATH", help="a line of JSON for each step")
    return found


if __name__ == "__main__":
    main()
