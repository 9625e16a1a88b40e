"""Transfers that start late or progress late: every value still gets to the micro-batch that it belongs to.
Four ranks.

Two kinds of delay, each on ranks of its own, so that ranks are far apart: the thread that starts transfers
behind the computing one falls behind it (all that a step asks for then comes late, in bursts, some of it out
of turn with what starts at once); and a whole process stands still now and then, its receiving and sending
threads with it.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class
from meshcast.pipelining.action import Action, ActionKind
from meshcast.transfers.medium import Medium, Statistics
from meshcast.transfers.transfer import PersistentTransfer
from multiproc.pipeline_models import CPU, TIMEOUT, train_alone
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

RANKS = 4
MICROBATCHES = 8
WIDTH = 1 << 15  # values of 256 KiB: several messages each
STEPS = 3


class Late(Medium):
    """Tensors on CPUs. Every second call, by chance, is left to the control thread, and starts up to 6 ms
    late."""

    by_host = True

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def bring(self, call: Any, src: Any, dst: Any, *, reverse: bool) -> tuple[Any, Any]:  # noqa: ARG002
        call.brought = 0.006 * self._chance.random() if self._chance.random() < 0.5 else 0.0
        return src, dst

    def ready(self, call: Any) -> bool:
        return call.brought == 0.0

    def start(self, core: Any, call: Any, agreed: Any, **arguments: Any) -> Any:
        time.sleep(call.brought)
        work = core.start(agreed, **arguments)
        return work, Statistics(work)

    def text(self) -> str:
        return ""


@contextlib.contextmanager
def starts_late(seed: int) -> Iterator[None]:
    """All transfers that are made in the meantime do so."""
    chance, own = random.Random(seed), PersistentTransfer.__init__

    def late(transfer: PersistentTransfer, *given: Any, **options: Any) -> None:
        own(transfer, *given, **(options | {"medium": Late(chance)}))

    PersistentTransfer.__init__ = late
    try:
        yield
    finally:
        PersistentTransfer.__init__ = own


# Ends only while the process runs: when its input ends, or the process has.
_FREEZER = """
import os, select, signal, sys, time
while True:
    os.kill({pid}, signal.SIGSTOP)
    time.sleep(0.015)
    os.kill({pid}, signal.SIGCONT)
    if select.select([sys.stdin], [], [], 0.015)[0]:
        break
"""


@contextlib.contextmanager
def stands_still(_: int) -> Iterator[None]:
    """This process stands still for half of the time."""
    freezer = subprocess.Popen(
        [sys.executable, "-S", "-c", _FREEZER.format(pid=os.getpid())], stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        assert freezer.stdin is not None
        freezer.stdin.close()
        freezer.wait()


class Marked(nn.Module):
    """Multiplies by a weight, and writes down which micro-batch each value and gradient that it gets is of:
    element 0 says so, which no stage changes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        weight = 1.0 + (torch.arange(WIDTH, dtype=torch.float64) + index) % 3
        weight[0] = 1.0
        self.weight = nn.Parameter(weight)
        self.forwards: list[int] = []
        self.backwards: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            self.forwards.append(int(x[0, 0]))
        return Noted.apply(x * self.weight, self.backwards)


class Noted(torch.autograd.Function):
    """Hands its input on and notes what the gradient says. A hook would keep the backward in one piece."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, notes: list[int]) -> torch.Tensor:
        ctx.notes = notes
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not isinstance(gradient, FakeTensor):
            ctx.notes.append(int(gradient[0, 0]))  # scaled when the step ends
        return gradient, None


def weighed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def numbered(seed: int) -> torch.Tensor:
    """Small whole numbers: sums and products are exact. Column 0 has the number of the micro-batch."""
    x = torch.randint(1, 8, (MICROBATCHES, WIDTH), generator=torch.Generator().manual_seed(seed)).double()
    x[:, 0] = torch.arange(MICROBATCHES)
    return x


def microbatches(row: Sequence[Action], stage: int, *kinds: ActionKind) -> list[int]:
    """In the order in which the stage gets them."""
    return [each.microbatch for each in row if each.stage == stage and each.kind in kinds]


def delay_case(name: str, delays: Mapping[int, Callable[[int], Any]], rows: Any = None, **options: Any):
    """delays: what happens to which rank. rows: the stages of each rank, where it has several."""

    def case(context) -> None:
        indices = rows[context.rank] if rows else [context.rank]
        count, group = sum(map(len, rows)) if rows else RANKS, dist.new_group()
        stages = [PipelineStage(Marked(index), index, count, CPU, group=group) for index in indices]
        schedule = get_schedule_class(name)(
            stages if rows else stages[0], MICROBATCHES, loss_fn=weighed, timeout=TIMEOUT, **options
        )
        row = schedule.actions[context.rank]
        delay = delays.get(context.rank, contextlib.nullcontext)
        for step in range(STEPS):
            x, y = numbered(2 * step), numbered(2 * step + 1)
            reference = [Marked(index) for index in range(count)]
            expected = train_alone(nn.Sequential(*reference), x, y, MICROBATCHES, weighed)
            for stage in stages:
                stage.submod.weight.grad = None
                stage.submod.forwards.clear()
                stage.submod.backwards.clear()
            # Not the first step, in which all starts are late: the ranks agree on their transfers there.
            with delay(step) if step else contextlib.nullcontext():
                losses: list[torch.Tensor] = []
                output = schedule.step(x, target=y, losses=losses)
            for stage in stages:
                index, found = stage.stage_index, stage.submod
                assert found.forwards == microbatches(row, index, ActionKind.F), f"stage {index}, forward"
                wanted = microbatches(row, index, ActionKind.B, ActionKind.I)
                # Without an input gradient all of the backward is in W.
                wanted = wanted if index else microbatches(row, index, ActionKind.B, ActionKind.W)
                assert found.backwards == wanted, f"stage {index}, backward"
                assert torch.equal(found.weight.grad, reference[index].weight.grad), f"stage {index}"
                if stage.is_last:
                    assert torch.equal(output, torch.cat(expected.outputs))
                    assert [loss.item() for loss in losses] == expected.losses

    kinds = "_".join(f"{delay.__name__}_{rank}" for rank, delay in delays.items())
    case.__name__ = f"{name}{'_'.join(['', *options])}_{kinds}"
    return case


IN_TURN = [[rank, rank + RANKS] for rank in range(RANKS)]
DOWN_AND_UP = [[rank, 2 * RANKS - 1 - rank] for rank in range(RANKS)]

CASES = [
    delay_case("1F1B", {1: starts_late}),
    delay_case("1F1B", {2: stands_still}, overlap=False),
    delay_case("Eager1F1B", {0: starts_late, 3: starts_late}),
    delay_case("Eager1F1B", {1: stands_still, 2: starts_late}, delay_weight_grad=True),
    delay_case("ZBH2", {2: starts_late}),
    delay_case("Interleaved1F1B", {0: stands_still, 2: starts_late}, IN_TURN),
    delay_case("ZBV", {1: starts_late, 3: stands_still}, DOWN_AND_UP),
]
