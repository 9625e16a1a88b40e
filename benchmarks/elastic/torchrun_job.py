"""The pipeline of examples/elastic as a program of torchrun: a checkpoint every few steps, and all ranks go
on from the last one when torchrun has started them anew.

torchrun --standalone --nproc-per-node 5 --max-restarts 2 benchmarks/elastic/torchrun_job.py FOLDER EVERY
[options of examples/elastic/train.py]
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch.distributed as dist
from elastic.pipeline import PipelineTraining
from elastic.told import Teller
from elastic.train import parser, task_of
from meshcast import pipelining


def main() -> None:
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    options = parser().parse_args(sys.argv[3:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training, teller, step = PipelineTraining(task_of(options)), Teller(options.metrics), 0
    teller.joins()
    if folder.exists():
        step = pipelining.load(training.schedule, folder, training.optimizer)
    while step < options.steps:
        time.sleep(options.pause)
        begin = time.perf_counter()
        loss = training.forward_and_backward(step)
        teller.is_ready()
        teller.update(training, step, loss, begin)
        step += 1
        if step % every == 0:
            pipelining.save(training.schedule, folder, training.optimizer, position=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
