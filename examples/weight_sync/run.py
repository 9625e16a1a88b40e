"""A trainer on one mesh, rollouts on another: weights travel by WeightSync while the trainer goes on.

torchrun --standalone --nproc-per-node 5 examples/weight_sync/run.py --trainers 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt.config import MODELS, model_config
from training.command_line import Parser, check_writable, config_errors_exit
from training.layout import ConfigError

if TYPE_CHECKING:
    from meshcast import WeightSync
    from torch.distributed.device_mesh import DeviceMesh

    from weight_sync.weights import Destinations


def parse(argv: list[str]) -> argparse.Namespace:
    """Options; raises ConfigError on a combination that cannot run."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="tiny", metavar="NAME", help=f"{', '.join(MODELS)} (%(default)s)")
    add(
        "--trainers",
        type=int,
        default=3,
        metavar="N",
        help="ranks that train; the others write (%(default)s)",
    )
    add("--steps", type=int, default=120, metavar="N", help="optimiser steps (%(default)s)")
    add("--every", type=int, default=30, metavar="N", help="steps between snapshots (%(default)s)")
    add("--batch", type=int, default=24, metavar="N", help="samples per step (%(default)s)")
    add("--lr", type=float, default=3e-3, metavar="X", help="(%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    add("--metrics", type=Path, metavar="FILE", help="one JSON object per snapshot")
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(f"start it with torchrun, as in {__doc__.splitlines()[2]}")
    ranks = int(os.environ["WORLD_SIZE"])
    heads = model_config(args.model).heads
    if not 1 <= args.trainers < ranks:
        raise ConfigError(f"--trainers {args.trainers} of {ranks} ranks; use 1 to {ranks - 1}")
    if heads % (ranks - args.trainers):
        fit = max(n for n in range(1, ranks - args.trainers) if heads % n == 0)
        raise ConfigError(
            f"{heads} heads cannot be shared evenly by {ranks - args.trainers} rollout ranks; "
            f"use --trainers {ranks - fit}"
        )
    if args.batch % args.trainers or args.batch < args.trainers:
        fit = max(1, args.batch // args.trainers) * args.trainers
        raise ConfigError(
            f"--batch {args.batch}: {args.trainers} trainers cannot share it; use --batch {fit}"
        )
    if args.steps < 1 or args.every < 1:
        raise ConfigError(f"--steps {args.steps} --every {args.every}: both must be at least 1")
    if args.every > args.steps:
        raise ConfigError(
            f"--every {args.every}: no snapshot within --steps {args.steps}; use --every {args.steps}"
        )
    if not 0 < args.lr < math.inf:
        raise ConfigError(f"--lr {args.lr}: must be above 0, as in --lr {parser.get_default('lr')}")
    check_writable("metrics", args.metrics, "file")
    return args


def main(argv: list[str]) -> int:
    with config_errors_exit():
        args = parse(argv)
    # Only now, so that a wrong command line is answered at once.
    import meshcast  # noqa: F401  (registers the backend)
    import torch.distributed as dist
    from gpt.model import build_stage
    from torch.distributed.device_mesh import DeviceMesh

    from weight_sync.weights import destinations

    dist.init_process_group("meshcast")
    try:
        ranks = list(range(dist.get_world_size()))
        trainers = DeviceMesh("cpu", ranks[: args.trainers])
        rollouts = DeviceMesh("cpu", ranks[args.trainers :])
        config = model_config(args.model)
        names = [name for name, _ in build_stage(config, 0, 1, args.seed).named_parameters()]
        where = destinations(names, rollouts)
        snapshots = range(args.every, args.steps + 1, args.every)
        if dist.get_rank() < args.trainers:
            sync = train(args, trainers, where, snapshots)
        else:
            sync = write(args, rollouts, where, snapshots)
        dist.barrier()  # whoever closes it ends it for all
        sync.close()
    finally:
        dist.destroy_process_group()
    return 0


def train(
    args: argparse.Namespace,
    mesh: DeviceMesh,
    where: Destinations,
    snapshots: range,
) -> WeightSync:
    """On every rank of the trainer mesh."""
    from weight_sync.trainer import Sender, Trainer

    trainer = Trainer(model_config(args.model), mesh, args.batch, args.lr, args.seed)
    sender = Sender(trainer, where)
    begin = time.perf_counter()
    waited = 0.0
    for step in range(1, args.steps + 1):
        loss = trainer.step()
        if step in snapshots:
            stopped = time.perf_counter()
            sender.send(version=step)
            waited += time.perf_counter() - stopped
            if mesh.get_local_rank() == 0:
                print(f"trainer: step {step}, loss {loss:.3f}; weights on their way", flush=True)
    seconds = time.perf_counter() - begin
    sender.finish()
    if mesh.get_local_rank() == 0:
        print(
            f"trainer: {args.steps} steps in {seconds:.1f} s, of which {waited:.2f} s for snapshots",
            flush=True,
        )
    return sender.sync


def write(
    args: argparse.Namespace,
    mesh: DeviceMesh,
    where: Destinations,
    snapshots: range,
) -> WeightSync:
    """On every rank of the rollout mesh: text with each version of the weights."""
    from weight_sync.rollout import Rollout

    rollout = Rollout(model_config(args.model), mesh, where, args.seed)
    for step in snapshots:
        version = rollout.receive(step)
        record = {"version": version, "held_out_loss": rollout.held_out_loss(), "text": rollout.text()}
        if mesh.get_local_rank() != 0:
            continue
        print(
            f"rollout: version {version}, held out {record['held_out_loss']:.3f}: {record['text']!r}",
            flush=True,
        )
        if args.metrics is not None:
            with args.metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return rollout.sync


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
