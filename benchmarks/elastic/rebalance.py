"""A rank becomes half as fast in the middle of a run: how soon meshcast.elastic.rebalance makes up for it.

    PYTHONPATH=python:. torchrun --nproc-per-node 4 -m benchmarks rebalance

A stage for each rank. A layer is a small matrix product and waits besides, as for a device that computes:
`--seconds` in the forward and twice as long in the backward, on a slow rank `--slower` times that. The ranks
need no cores of their own. Afterwards the cuts that should be fastest on such ranks run, and the fastest of
them is the measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import OrderedDict
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from meshcast import elastic
from meshcast.pipelining import PipelineSchedule, PipelineStage, Schedule1F1B, simulate

from ..harness import parser
from ..ranks import largest

WIDTH, ROWS, COMPARED = 256, 8, 4
Cut = tuple[int, ...]


class Speed:
    """Seconds of a layer's forward on this rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, speed: Speed) -> torch.Tensor:
        ctx.speed = speed
        time.sleep(speed.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.speed.seconds)
        return grads[0], None


class Layer(torch.nn.Module):
    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self.linear, self.speed = torch.nn.Linear(WIDTH, WIDTH), speed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Waits.apply(torch.tanh(self.linear(x)), self.speed)  # type: ignore[no-untyped-call]


class Run:
    """Training under a cut, which may change."""

    def __init__(self, cut: Cut, speed: Speed, asked: argparse.Namespace) -> None:
        self.cut, self.speed, self.asked = cut, speed, asked
        self.schedule: PipelineSchedule
        self.optimizer: Any
        self.schedule, self.optimizer = self.build(cut)

    def build(self, cut: Cut) -> tuple[PipelineSchedule, torch.optim.Optimizer]:
        rank = dist.get_rank()
        first = sum(cut[:rank])
        layers = {f"layer{i}": Layer(self.speed) for i in range(first, first + cut[rank])}
        module = torch.nn.Sequential(OrderedDict(layers))
        stage = PipelineStage(module, rank, len(cut), torch.device("cpu"))
        made = Schedule1F1B(stage, self.asked.microbatches, loss_fn=torch.nn.functional.mse_loss)
        return made, torch.optim.AdamW(module.parameters())

    def step(self) -> float:
        """Seconds of it, on the slowest rank."""
        batch = torch.zeros(ROWS * self.asked.microbatches, WIDTH)
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.schedule.step(batch, target=batch, return_outputs=False)
        self.optimizer.step()
        return largest(time.perf_counter() - begin)

    def rebalance(self) -> tuple[elastic.Rebalanced | None, float]:
        begin = time.perf_counter()
        moved = elastic.rebalance(self.schedule, self.optimizer, self.build, self.cut)
        if moved is not None:
            self.schedule, self.optimizer, self.cut = moved.schedule, moved.optimizer, moved.cut
        return moved, largest(time.perf_counter() - begin)


def promising(asked: argparse.Namespace, start: Cut) -> list[Cut]:
    """The cuts whose simulated steps are shortest on ranks of which one is half as fast."""

    def seconds(cut: Cut) -> float:
        forward = [n * (asked.slower if i == asked.slow else 1.0) for i, n in enumerate(cut)]
        backward = [2 * each for each in forward]
        return simulate("1F1B", len(cut), asked.microbatches, forward, backward, transfer=0.0).makespan

    cuts = [c for c in product(range(1, asked.layers), repeat=len(start)) if sum(c) == asked.layers]
    return sorted(cuts, key=seconds)[:COMPARED]


def main() -> None:
    given = parser("rebalance", __doc__)
    figures = {"layers": 16, "microbatches": 8, "before": 20, "after": 40, "every": 5, "slow": 1}
    for name, default in figures.items():
        given.add_argument(f"--{name}", type=int, default=default)
    given.add_argument("--seconds", type=float, default=0.003, help="of a layer's forward")
    given.add_argument("--slower", type=float, default=2.0, help="times as long on the slow rank")
    asked = given.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cut = tuple(asked.layers // ranks + (i < asked.layers % ranks) for i in range(ranks))
    speed = Speed(asked.seconds)
    run = Run(cut, speed, asked)
    run.schedule.measure(last=asked.every)
    seconds: list[float] = []
    calls: list[tuple[int, elastic.Rebalanced | None, float]] = []
    for step in range(asked.before + asked.after):
        if step == asked.before and rank == asked.slow:
            speed.seconds = asked.slower * asked.seconds
        seconds.append(run.step())
        if step % asked.every == asked.every - 1:
            moved, took = run.rebalance()
            calls.append((step + 1, moved, took))
    static = {}
    for each in promising(asked, cut):
        other = Run(each, speed, asked)
        static[each] = statistics.median([other.step() for _ in range(11)][1:])
        other.schedule.close()
    if rank == 0:
        report(asked, cut, seconds, calls, static)
    dist.destroy_process_group()


def report(
    asked: argparse.Namespace,
    cut: Cut,
    seconds: list[float],
    calls: list[tuple[int, elastic.Rebalanced | None, float]],
    static: dict[Cut, float],
) -> None:
    best = min(static, key=static.__getitem__)
    moves = [(step, moved, took) for step, moved, took in calls if moved is not None]
    late = [step for step, _, _ in moves if step > asked.before]
    during = seconds[asked.before : late[0] if late else None]
    print(f"step before: {ms(statistics.median(seconds[1 : asked.before]))} under {cut}")
    print(f"step while rank {asked.slow} is slow: {ms(statistics.median(during))} under {cut}")
    for step, moved, took in moves:
        change = f"simulated {ms(moved.before)} to {ms(moved.after)}"
        print(f"behind step {step}: to {moved.cut}, {change}; {ms(took)}")
    print(f"step after: {ms(statistics.median(seconds[-10:]))}")
    print(f"best cut from the start: {ms(static[best])} under {best}; others {show(static)}")
    idle = [took for _, moved, took in calls if moved is None]
    print(f"a call that moves nothing: {ms(statistics.median(idle))}")
    print(f"last ten steps over those of the best cut: {statistics.median(seconds[-10:]) / static[best]:.3f}")
    within = [i for i in range(asked.before, len(seconds)) if seconds[i] <= 1.15 * static[best]]
    steps = within[0] - asked.before if within else None
    print(f"steps from the slowdown until one is within 1.15 of that: {steps}")


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def show(static: dict[Cut, float]) -> str:
    return ", ".join(f"{cut} {ms(each)}" for cut, each in static.items())
