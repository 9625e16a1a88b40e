"""Train a GPT whose ranks may be killed at any moment, and join.

python -m meshcast.elastic.run --nproc-per-node 2:4 --max-restarts 3 examples/elastic/train.py --steps 200
python -m meshcast.elastic.run --nproc-per-node 3:5 --max-restarts 3 examples/elastic/train.py --pipeline
"""

import argparse
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

# `gpt` and `training` are packages of the examples folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpt.config import MODELS, model_config
from gpt.data import TextSamples, read_text
from meshcast.elastic import Job

from elastic.hybrid import HybridTraining
from elastic.pipeline import PipelineTraining
from elastic.state import Task
from elastic.told import Teller


def main() -> None:
    options = parser().parse_args()
    task = task_of(options)
    kind = PipelineTraining if options.pipeline else HybridTraining
    teller = Teller(options.metrics)

    def make() -> HybridTraining | PipelineTraining:
        teller.joins()
        return kind(task)

    with Job(make, backend="gloo", timeout=timedelta(seconds=60)) as job:
        while job.steps < options.steps:
            with job.attempt() as training:
                time.sleep(options.pause)
                step, begin = job.steps, time.perf_counter()
                loss = training.forward_and_backward(step)
                teller.is_ready()
                job.commit(partial(teller.update, training, step, loss, begin))


def task_of(options: argparse.Namespace) -> Task:
    config = model_config(options.model)
    samples = TextSamples(read_text(options.data), config.seq_len, seed=0)
    return Task(config, samples, options.batch, options.steps, getattr(torch, options.dtype))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pipeline", action="store_true", help="two stages (FSDP2 with hybrid sharding)")
    found.add_argument("--model", default="nano", help=f"{', '.join(MODELS)} (%(default)s)")
    found.add_argument("--data", metavar="PATH", help="text (the sources of Python's standard library)")
    found.add_argument("--batch", type=int, default=24, help="samples of a step, of all ranks (%(default)s)")
    found.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    found.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="(%(default)s)")
    found.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to see it all")
    found.add_argument(
        "--metrics", type=Path, metavar="FOLDER", help="a line of JSON for each step and process"
    )
    return found


if __name__ == "__main__":
    main()
