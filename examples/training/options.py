"""The command line, checked as a whole before torch is imported or a socket opened."""

import argparse
import math
import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training import layout
from training.command_line import Parser, check_name, check_writable
from training.job import Job, JobType
from training.layout import ConfigError, RunLayout

# Of losses and gradients against one process: the order of sums differs, and in bf16 each rounds to 8 bits.
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2}
DEVICES = ("cpu", "cuda")
SCHEDULES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2")
_LR = 3e-3


@dataclass(frozen=True)
class Options:
    """Everything a run needs; equal on all ranks."""

    job: Job
    run: RunLayout
    schedule: str
    steps: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    data: str | None
    eval_every: int
    verify: int  # steps to compare with one process
    tolerance: float
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    metrics: Path | None
    tensorboard: Path | None
    profile: Path | None
    precision: str
    recompute: bool
    device: str


def parse(job_type: JobType, argv: list[str], ranks: int | None) -> Options:
    """Options from a command line and the number of ranks under torchrun, None without torchrun.

    Raises ConfigError on a combination that cannot run.
    """
    args = _parser(job_type).parse_args(argv)
    check_name("schedule", args.schedule, SCHEDULES)
    check_name("precision", args.precision, TOLERANCE)
    check_name("device", args.device, DEVICES)
    if ranks is None:
        raise ConfigError(f"start it with torchrun, as in {job_type.example}")
    job = job_type.from_arguments(args)
    stages = layout.even_stages(2, ranks) if args.stages is None else layout.parse_stages(args.stages)
    run = RunLayout(stages, args.batch, args.microbatches, args.accumulate)
    layout.check_run(job.layers, run, ranks)
    job.check(run)
    for name, least in (("steps", 1), ("checkpoint_every", 1), ("verify", 0), ("eval_every", 0)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    _check_numbers(args)
    for name in ("checkpoint", "tensorboard", "profile"):
        check_writable(name, getattr(args, name), "folder")
    check_writable("metrics", args.metrics, "file")
    if find_spec("rich") is None:
        raise ConfigError("rich, which shows the progress, is not installed; pip install rich")
    if args.tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard: not installed; pip install tensorboard")
    if args.resume and args.checkpoint is None:
        raise ConfigError("--resume needs --checkpoint DIR: the folder that the earlier run wrote")
    if args.resume and args.verify:
        raise ConfigError(
            "--verify starts from the initial weights and cannot --resume; leave one of them out"
        )
    values: dict[str, Any] = {field.name: getattr(args, field.name, None) for field in fields(Options)}
    values |= {"job": job, "run": run}
    if args.tolerance is None:
        values["tolerance"] = TOLERANCE[args.precision]
    if args.warmup is None:
        values["warmup"] = max(20, args.steps // 10)
    return Options(**values)


def _check_numbers(args: argparse.Namespace) -> None:
    if not 0 < args.lr < math.inf:
        raise ConfigError(f"--lr {args.lr}: must be above 0, as in --lr {_LR}")
    if not args.clip > 0:
        raise ConfigError(f"--clip {args.clip}: must be above 0; --clip inf clips nothing")
    for name in ("weight_decay", "warmup", "tolerance"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {value}: must be at least 0, as in {option} 0")


def _parser(job_type: JobType) -> argparse.ArgumentParser:
    parser = Parser(prog="train.py", description=job_type.title, epilog=f"example: {job_type.example}")
    job_type.add_arguments(parser)
    add = parser.add_argument_group("layout").add_argument
    stages = "ranks of every stage, or data x tensor parallel degrees (two stages, as even as may be)"
    add("--stages", metavar="N,NxN", help=stages)
    add("--schedule", default="1F1B", metavar="NAME", help=f"{', '.join(SCHEDULES)} (%(default)s)")
    add("--batch", type=int, default=24, metavar="N", help="samples per step over all ranks (%(default)s)")
    add(
        "--microbatches",
        type=int,
        default=4,
        metavar="N",
        help="pieces of a batch in the pipeline (%(default)s)",
    )
    passes = "passes through the pipeline, of equal parts of the batch, whose gradients add up (%(default)s)"
    add("--accumulate", type=int, default=1, metavar="N", help=passes)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=200, metavar="N", help="optimiser steps (%(default)s)")
    add("--lr", type=float, default=_LR, metavar="X", help="peak learning rate (%(default)s)")
    add("--warmup", type=int, metavar="N", help="steps of linear warm-up (a tenth of --steps, at least 20)")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices (%(default)s)")
    add(
        "--clip",
        type=float,
        default=1.0,
        metavar="X",
        help="largest gradient norm over all stages (%(default)s)",
    )
    precision = f"{', '.join(TOLERANCE)}; bf16 by autocast (%(default)s)"
    add("--precision", default="float32", metavar="NAME", help=precision)
    device = "cpu, or cuda: every rank takes the GPU of its local rank (%(default)s)"
    add("--device", default="cpu", metavar="NAME", help=device)
    add("--recompute", action="store_true", help="compute activations again in the backward, not keep them")
    add("--seed", type=int, default=0, metavar="N", help="of initial weights and data order (%(default)s)")
    add("--eval-every", type=int, default=0, metavar="N", help="held-out loss every N steps (at the end)")
    add = parser.add_argument_group("check").add_argument
    verify = "train in one process as well and compare the first N steps (all, where N is left out)"
    add("--verify", type=int, nargs="?", const=sys.maxsize, default=0, metavar="N", help=verify)
    accepted = ", ".join(f"{value:g} with {name}" for name, value in TOLERANCE.items())
    add("--tolerance", type=float, metavar="X", help=f"largest difference accepted ({accepted})")
    add = parser.add_argument_group("output").add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="write checkpoints there")
    add(
        "--checkpoint-every",
        type=int,
        default=100,
        metavar="N",
        help="steps between them (%(default)s; and at the end)",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    add("--metrics", type=Path, metavar="FILE", help="append one JSON object per step")
    add("--tensorboard", type=Path, metavar="DIR", help="write the same for TensorBoard")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="write there what each rank did in the last training step",
    )
    return parser
