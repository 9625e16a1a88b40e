"""Trains a GPT-2 of transformers or a U-Net of diffusers in stages on different meshes, and compares with one
process.

torchrun --standalone --nproc-per-node 3 examples/huggingface/train.py gpt2 --stages 1,2
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshcast  # noqa: F401  (registers the backend)
import torch
import torch.distributed as dist
from meshcast.pipelining import ScheduleEager1F1B
from torch.distributed.device_mesh import DeviceMesh
from training.command_line import Parser, config_errors_exit
from training.layout import ConfigError, RunLayout, check_run, parse_stages

MICROBATCHES = 4
MOST_STAGES = 4  # a GPT-2 here has as many blocks


def parse(argv: list[str]) -> argparse.Namespace:
    """Options; stages as a list of ranks. Raises ConfigError on a combination that cannot run."""
    parser = Parser(description="Trains a Hugging Face model in stages on different meshes.")
    parser.add_argument("model", metavar="MODEL", help="gpt2 or unet")
    parser.add_argument("--stages", default="1,2", metavar="N,N", help="ranks of every stage (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples per step (%(default)s)")
    args = parser.parse_args(argv)
    if args.model not in ("gpt2", "unet"):
        raise ConfigError(f"{args.model}: no such model; use gpt2 or unet")
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(f"start it with torchrun, as in {__doc__.splitlines()[3]}")
    stages = parse_stages(args.stages)
    if any(stage.tensor > 1 for stage in stages):
        even = ",".join(str(stage.ranks) for stage in stages)
        raise ConfigError(f"--stages {args.stages}: no tensor parallelism here; use --stages {even}")
    if args.model == "unet" and len(stages) != 2:
        raise ConfigError(f"--stages {args.stages}: the U-Net is cut into two stages here; use --stages N,N")
    check_run(MOST_STAGES, RunLayout(stages, args.batch, MICROBATCHES), int(os.environ["WORLD_SIZE"]))
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: must be at least 1")
    args.stages = [stage.ranks for stage in stages]
    return args


def main(argv: list[str]) -> int:
    with config_errors_exit():
        args = parse(argv)
        try:
            job = importlib.import_module(f"huggingface.{args.model}")
        except ModuleNotFoundError as error:
            missing = f"{error.name} is not installed; pip install -r requirements-hf.txt"
            raise ConfigError(missing) from None

    dist.init_process_group("meshcast")
    sizes: list[int] = args.stages
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    meshes = [DeviceMesh("cpu", list(range(a, a + n))) for a, n in zip(starts, sizes, strict=True)]
    index = max(i for i, start in enumerate(starts) if dist.get_rank() >= start)

    stage = job.make_stage(index, len(sizes), meshes[index])
    schedule = ScheduleEager1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=job.loss_fn)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    reports = dist.get_rank() == starts[-1]
    single = job.make_model() if reports else None
    single_optimizer = None if single is None else torch.optim.AdamW(single.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(args.steps):
        inputs, targets = job.batch(step, args.batch)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        if single is not None and single_optimizer is not None:
            single_optimizer.zero_grad()
            expected = job.loss_fn(job.whole(single, *inputs), targets)
            expected.backward()
            single_optimizer.step()
            loss = float(torch.stack(losses).mean())
            worst = max(worst, abs(loss - expected.item()))
            print(f"step {step + 1}: loss {loss:.6f}, one process {expected.item():.6f}", flush=True)
    if reports:
        print(f"largest difference {worst:.1e}")
    dist.destroy_process_group()
    return 0 if worst <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
