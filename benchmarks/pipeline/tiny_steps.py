"""What a step costs where stages compute next to nothing: meshcast's schedules beside torch's of that name.

    PYTHONPATH=python:. torchrun --nproc-per-node 4 -m benchmarks tiny_steps

A linear layer of 128 on each rank, and micro-batches of one row: values of 512 bytes. Both packages run the
same modules in turn, round by round; a round is some steps of each. Ratios are those of rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import meshcast.pipelining as ours
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torchs

from ..harness import machine, parser

WIDTH = 128  # float32: 512 bytes a row
SCHEDULES = ("GPipe", "1F1B")
Step = Callable[[], None]


def make(package: Any, name: str, module: torch.nn.Module, microbatches: int) -> Step:
    """A step of that schedule, on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = package.PipelineStage(module, rank, ranks, torch.device("cpu"))
    kind = getattr(package, f"Schedule{name}")
    schedule = kind(stage, microbatches, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.zeros(microbatches, WIDTH)
    given = [batch] if rank == 0 else []
    target = {"target": batch} if rank == ranks - 1 else {}

    def step() -> None:
        module.zero_grad()
        schedule.step(*given, **target)

    return step


def seconds(step: Step, steps: int) -> float:
    """Of a step, from when all ranks begin until the last has ended."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    longest = torch.tensor((time.perf_counter() - begin) / steps, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def main() -> None:
    options = parser("tiny_steps", __doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--steps", type=int, default=10, help="of each in a round")
    options.add_argument("--microbatches", type=int, default=16)
    asked = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = torch.nn.Linear(WIDTH, WIDTH)
    for name in SCHEDULES:
        pair = [make(package, name, module, asked.microbatches) for package in (ours, torchs)]
        for step in pair:
            seconds(step, 3)  # connections, shapes
        rounds = []
        for number in range(asked.rounds):
            times = dict.fromkeys((0, 1), 0.0)
            for which in ((0, 1), (1, 0))[number % 2]:
                times[which] = seconds(pair[which], asked.steps)
            rounds.append((times[0], times[1]))
        if dist.get_rank() == 0:
            report(name, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(machine("tiny_steps")))
    dist.destroy_process_group()


def report(name: str, rounds: list[tuple[float, float]]) -> None:
    mine, theirs = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(ours / torchs for ours, torchs in rounds)
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {len(rounds)} rounds"
    print(
        f"{name}: meshcast {mine:.2f} ms, torch {theirs:.2f} ms a step; "
        f"ratio {statistics.median(ratios):.3f} ({spread})"
    )
