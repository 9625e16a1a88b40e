"""What the runtime itself costs, per action, and what shapes that vary cost, per step: stages that do next to
nothing, values of a few bytes."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, Schedule1F1B
from torch import nn

__all__ = ["measure_overhead"]

_STEPS = 15
_NEW_SHAPES = 5
_WIDTH = 16
_CPU = torch.device("cpu")


def measure_overhead(microbatches: int) -> dict[str, float]:
    """Seconds per action of a rank, where not said otherwise; called by all ranks.

    alone: one stage on one rank, nothing travels. CPU time of the thread that runs the actions.
    chain: a stage on each rank and values of 64 bytes, of a rank in the middle. The same.
    chain_wall: wall time of that step, which holds the latency of the links and whatever else the cores
        have to do.
    fixed_step, varying_step: wall time of a step of that chain, and of one whose micro-batches may vary in
        shape.
    new_shape: how much longer a step takes whose micro-batches have a shape that none had before.

    Of the CPU times, the same forwards and backwards in a plain loop are taken off.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    found = {"alone": _alone(groups[dist.get_rank()], microbatches)} | _chain(microbatches)
    found |= _varying(microbatches)
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return {"alone": gathered[0]["alone"]} | {
        name: max(each[name] for each in gathered[1:-1] or gathered) for name in found if name != "alone"
    }


def _alone(group: dist.ProcessGroup, microbatches: int) -> float:
    module = nn.Linear(_WIDTH, _WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, _CPU, group=group), microbatches, loss_fn=_loss)
    x = torch.ones(microbatches, _WIDTH)

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    found = 0.0
    if dist.get_rank() == 0:  # one rank at a time has the cores
        plain = _typical(lambda: _plain(module, x, microbatches), time.thread_time)
        found = (_typical(step, time.thread_time) - plain) / (2 * microbatches)
    schedule.close()
    dist.barrier()
    return found


def _chain(microbatches: int) -> dict[str, float]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(_WIDTH, _WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, rank, stages, _CPU), microbatches, loss_fn=_loss)
    x = torch.ones(microbatches, _WIDTH)

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    actions = len(schedule.actions[rank])
    plain = _typical(lambda: _plain(module, x.requires_grad_(), microbatches), time.thread_time)
    x.requires_grad_(False)
    cpu, wall = _typical(step, time.thread_time), _typical(step, time.perf_counter)
    schedule.close()
    return {"chain": (cpu - plain) / actions, "chain_wall": wall / actions, "fixed_step": wall}


def _varying(microbatches: int) -> dict[str, float]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(_WIDTH, _WIDTH), rank, stages, _CPU)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss, varying_shapes=True)

    def step(rows: int) -> None:
        x = torch.ones(rows * microbatches, _WIDTH)
        schedule.step(x, target=x, return_outputs=False)

    known = _typical(lambda: step(1), time.perf_counter)
    fresh = []
    for rows in range(2, 2 + _NEW_SHAPES):
        dist.barrier()
        begin = time.perf_counter()
        step(rows)
        fresh.append(time.perf_counter() - begin)
    schedule.close()
    return {"varying_step": known, "new_shape": statistics.median(fresh) - known}


def _plain(module: nn.Module, x: torch.Tensor, microbatches: int) -> None:
    for part in x.detach().chunk(microbatches):
        (_loss(module(part.requires_grad_(x.requires_grad)), part.detach()) / microbatches).backward()


def _typical(run: Any, clock: Any) -> float:
    """Median of several runs; two before them do not count."""
    times = []
    for _ in range(_STEPS + 2):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times[2:])


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()
