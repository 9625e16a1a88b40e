"""Trainers and rollouts as Ray actors on two hosts: weights travel by WeightSync while the trainers go on.

python examples/ray_weights/run.py --trainers 2 --rollouts 2
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt.config import MODELS, model_config
from training.command_line import Parser, config_errors_exit
from training.layout import ConfigError


def parse(argv: list[str]) -> argparse.Namespace:
    """Options; raises ConfigError on a combination that cannot run."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="tiny", metavar="NAME", help=f"{', '.join(MODELS)} (%(default)s)")
    add("--trainers", type=int, default=2, metavar="N", help="actors that train (%(default)s)")
    add("--rollouts", type=int, default=2, metavar="N", help="actors that serve (%(default)s)")
    add("--versions", type=int, default=4, metavar="N", help="of the weights (%(default)s)")
    add("--every", type=int, default=10, metavar="N", help="optimiser steps between two (%(default)s)")
    add("--batch", type=int, default=24, metavar="N", help="samples per step (%(default)s)")
    add("--limit", type=float, default=60.0, metavar="S", help="seconds for a push (%(default)s)")
    add("--kill", type=int, metavar="V", help="kill a rollout while version V is trained and sent")
    args = parser.parse_args(argv)
    heads = model_config(args.model).heads
    if args.rollouts < 1 or heads % args.rollouts:
        fit = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(args.rollouts, 1))
        raise ConfigError(f"--rollouts {args.rollouts}: {heads} heads cannot be shared evenly; use {fit}")
    if args.trainers < 1:
        raise ConfigError(f"--trainers {args.trainers}: must be at least 1")
    if args.batch % args.trainers or args.batch < args.trainers:
        fit = max(1, args.batch // args.trainers) * args.trainers
        raise ConfigError(
            f"--batch {args.batch}: {args.trainers} trainers cannot share it; use --batch {fit}"
        )
    if args.versions < 1 or args.every < 1:
        raise ConfigError(f"--versions {args.versions} --every {args.every}: both must be at least 1")
    if not 0 < args.limit < math.inf:
        raise ConfigError(f"--limit {args.limit}: seconds, above 0")
    if args.kill is not None and not 2 <= args.kill <= args.versions:
        raise ConfigError(f"--kill {args.kill}: use a version from 2 to --versions {args.versions}")
    return args


def main(argv: list[str]) -> int:
    with config_errors_exit():
        args = parse(argv)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("Ray is not installed: pip install ray numpy")
    # Only now, so that a wrong command line is answered at once.
    from ray_weights.hosts import emulated_hosts

    with emulated_hosts([args.trainers, args.rollouts]):
        return run(args)


def run(args: argparse.Namespace) -> int:
    """With Ray up. Exit status: 0 where every version arrived as it was sent, and where each survivor of
    --kill heard of it."""
    from ray_weights.job import Job, lose

    job = Job(args.model, args.trainers, args.rollouts, args.batch, args.limit)
    for rank, host in enumerate(job.hosts):
        print(f"rank {rank}: {'trains' if rank < args.trainers else 'serves'} on {host}")
    print(f"{'version':>7} {'MiB':>7} {'s':>7} {'stopped, s':>11} {'loss':>7} {'held out':>9}  equal")
    last = args.versions if args.kill is None else args.kill - 1
    good = True
    for row in job.rounds(range(1, last + 1), args.every):
        good &= row.equal
        print(
            f"{row.version:>7} {row.bytes / 2**20:>7.2f} {row.seconds:>7.3f} {row.stopped:>11.3f} "
            f"{row.loss:>7.3f} {row.held_out:>9.3f}  {'yes' if row.equal else 'NO'}",
            flush=True,
        )
    if args.kill is not None:
        good &= lose(job, args.kill, args.every)
    else:
        job.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
