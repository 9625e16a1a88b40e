"""What is compared: schedules of meshcast, each with the options of its simulation, and of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from meshcast import pipelining as ours
from torch import nn
from torch.distributed import pipelining as theirs

__all__ = ["METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """One column. make: (module, rank, stages, micro-batches, loss_fn) -> a schedule with torch's step().
    simulated: arguments of `simulate` beyond the times; None for what is not ours."""

    name: str
    make: Callable[..., Any]
    simulated: dict[str, Any] | None
    traced: bool = field(default=False)  # its steady-state period is read off the trace


def _meshcast(cls: type[Any], **options: Any) -> Callable[..., Any]:
    def make(module: nn.Module, rank: int, stages: int, microbatches: int, loss_fn: Any) -> Any:
        stage = ours.PipelineStage(module, rank, stages, torch.device("cpu"))
        return cls(stage, microbatches, loss_fn=loss_fn, **options)

    return make


def _torch(cls: type[Any]) -> Callable[..., Any]:
    def make(module: nn.Module, rank: int, stages: int, microbatches: int, loss_fn: Any) -> Any:
        stage = theirs.PipelineStage(module, rank, stages, torch.device("cpu"), group=dist.group.WORLD)
        return cls(stage, microbatches, loss_fn=loss_fn)

    return make


METHODS = (
    Method(
        "1F1B, no overlap",
        _meshcast(ours.Schedule1F1B, overlap=False),
        {"schedule": "1F1B", "send_model": "rendezvous", "buffers": 0},
    ),
    Method("1F1B", _meshcast(ours.Schedule1F1B), {"schedule": "1F1B"}),
    Method("Eager1F1B", _meshcast(ours.ScheduleEager1F1B), {"schedule": "Eager1F1B"}, traced=True),
    Method(
        "Eager1F1B, delayed",
        _meshcast(ours.ScheduleEager1F1B, delay_weight_grad=True),
        {"schedule": "Eager1F1B", "delay_weight_grad": True},
        traced=True,
    ),
    Method("torch 1F1B", _torch(theirs.Schedule1F1B), None),
    Method("torch GPipe", _torch(theirs.ScheduleGPipe), None),
)
