"""What the runtime itself costs, per action: stages that do next to nothing, values of a few bytes."""

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
_WIDTH = 16
_CPU = torch.device("cpu")


def measure_overhead(microbatches: int) -> dict[str, float]:
    """Seconds per action; called by all ranks.

    alone: one stage on one rank, nothing travels: a step less the same forwards and backwards in a plain
        loop, over its actions.
    chain_cpu, chain_wall: a stage on each rank and values of 64 bytes: CPU time of the thread that runs the
        actions, and wall time of the step, over the actions of a rank in the middle. The wall time holds the
        latency of the links and of whatever else the cores have to do.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = _alone(groups[dist.get_rank()], microbatches)
    found = {"alone": alone} | _chain(microbatches)
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return {"alone": gathered[0]["alone"]} | {
        name: max(each[name] for each in gathered[1:-1] or gathered) for name in ("chain_cpu", "chain_wall")
    }


def _alone(group: dist.ProcessGroup, microbatches: int) -> float:
    module = nn.Linear(_WIDTH, _WIDTH)
    stage = PipelineStage(module, 0, 1, _CPU, group=group)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss)
    x = torch.ones(microbatches, _WIDTH)

    def plain() -> None:
        for part in x.chunk(microbatches):
            (_loss(module(part), part) / microbatches).backward()

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    found = 0.0
    if dist.get_rank() == 0:  # one rank at a time has the cores
        found = (_typical(step, _wall) - _typical(plain, _wall)) / (2 * microbatches)
    dist.barrier()
    return found


def _chain(microbatches: int) -> dict[str, float]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    schedule = Schedule1F1B(
        PipelineStage(nn.Linear(_WIDTH, _WIDTH), rank, stages, _CPU), microbatches, loss_fn=_loss
    )
    x = torch.ones(microbatches, _WIDTH)

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    actions = len(schedule.actions[rank])
    found = {
        "chain_cpu": _typical(step, time.thread_time) / actions,
        "chain_wall": _typical(step, _wall) / actions,
    }
    schedule.close()
    return found


def _typical(run: Any, clock: Any) -> float:
    """Median of several runs; two before them do not count."""
    times = []
    for _ in range(_STEPS + 2):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times[2:])


def _wall() -> float:
    return time.perf_counter()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()
