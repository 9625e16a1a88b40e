"""What is compared. ROWS: each row adds one part of the method to the one before it. CHOICES: the schedules
for stages that are alone on their ranks, and the one that chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AUTO", "BASELINE", "CHOICES", "FREE", "FREE_DELAYED", "OURS", "ROWS", "TORCH", "Row", "rows_for"]

_WAITS = {"send_model": "rendezvous", "buffers": 0}


@dataclass(frozen=True)
class Row:
    """strategy: of the transfers. options: of the schedule. simulated: further arguments of `simulate`.
    free: messages of one element stand in for the values, what the paper calls signal send/recv."""

    name: str
    schedule: str
    strategy: str = "multicast"
    options: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)
    free: bool = False
    peer: bool = False  # torch.distributed.pipelining
    replicas: bool = False  # only where stages have several ranks: else the same as the row before


BASELINE = "send/recv, 1F1B"
OURS = "+ weight delaying"
FREE = "free transfers, 1F1B"
FREE_DELAYED = "free transfers, eager 1F1B, delaying"
TORCH = "torch.distributed.pipelining, 1F1B"
AUTO = "auto"

_DELAY = {"delay_weight_grad": True}

ROWS = (
    Row(BASELINE, "1F1B", "send_recv", {"overlap": False}, _WAITS),
    Row("broadcast, 1F1B", "1F1B", "broadcast", {"overlap": False}, _WAITS, replicas=True),
    Row("multicast, overlap", "1F1B"),
    Row("+ eager 1F1B", "Eager1F1B"),
    Row(OURS, "Eager1F1B", "multicast", _DELAY, _DELAY),
    Row(FREE, "1F1B", free=True),
    Row(FREE_DELAYED, "Eager1F1B", "multicast", _DELAY, _DELAY, free=True),
    Row(TORCH, "1F1B", "send_recv", peer=True),
)

CHOICES = (
    Row(AUTO, "auto"),
    *(Row(name, name) for name in ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2")),
    *(Row(f"{name}, delayed", name, "multicast", _DELAY, _DELAY) for name in ("GPipe", "1F1B", "Eager1F1B")),
)


def rows_for(ranks_per_stage: int) -> list[Row]:
    return [row for row in ROWS if ranks_per_stage > 1 or not row.replicas]
