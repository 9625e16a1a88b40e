"""Memory of activations stays within the formula of each schedule: cases that pipeline_module_cases.py runs.
Four ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class
from meshcast.pipelining._backward import SplitBackward
from meshcast.pipelining.action import Action, ActionKind
from multiproc.pipeline_models import CPU, TIMEOUT
from multiproc.pipeline_value_cases import mse
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 4
MICROBATCHES = 12
ROWS = 48  # of a micro-batch
WIDTH = 8


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that are alive; remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        before = {value.untyped_storage()._cdata for value in known}
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in before:
                storage = value.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def deep(hidden: int = 2048) -> nn.Module:
    """Holds far more for its backward than what travels between stages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(hidden, WIDTH))


def measured(run: Callable[[], Any]) -> tuple[int, int]:
    """Most bytes alive during the call, and those alive after it while its result is."""
    with Live() as live:
        kept = run()
        after = live.now()
        del kept
    return live.most, after


class Bytes:
    """Of one micro-batch in one stage, measured on its own.

    fresh: between its forward and its backward. late: between I and W, where the backward is split: what the
    layers with weights have kept, and the gradients that W starts from.
    height: the most, from the beginning of the forward to the end of the backward.
    """

    def __init__(self, split: bool) -> None:
        module, x = deep(), torch.randn(ROWS, WIDTH)
        module(x).sum().backward()  # the parameters have gradients from now on

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            given = x.detach().requires_grad_()
            return given, module(given)

        def inputs() -> SplitBackward:
            given, output = forward()
            backward = SplitBackward([output], [torch.ones_like(output)], [given])
            backward.input_gradients()
            assert backward.whole is None
            return backward

        def whole() -> None:
            if split:
                inputs().weight_gradients()
            else:
                forward()[1].sum().backward()

        self.fresh = measured(forward)[1]
        self.late = measured(inputs)[1] if split else 0
        self.height = measured(whole)[0]

    def allowed(self, row: Sequence[Action]) -> tuple[int, int, int]:
        """Most micro-batches that a rank holds at once, and the bytes that it must and may hold by that: all
        between two actions, and all but one, that one being at the height of its own."""
        fresh = late = most = nbytes = 0
        for action in row:
            if action.kind is ActionKind.F:
                fresh += 1
            elif action.kind is ActionKind.W:
                late -= 1
            elif action.kind.is_compute:
                fresh -= 1
                late += action.kind is ActionKind.I
            most = max(most, fresh + late)
            nbytes = max(nbytes, fresh * self.fresh + late * self.late)
        return most, nbytes, nbytes + self.height - max(self.fresh, self.late)


def memory_case(name: str, held: Callable[[int], int], rows: Sequence[Sequence[int]] = (), **options: Any):
    """The schedule holds as many micro-batches as its formula says, and a step as many bytes as these have.

    held: micro-batches of one stage that a rank holds. rows: the stages of each rank, where it has several.
    """

    def case(context) -> dict:
        indices = rows[context.rank] if rows else [context.rank]
        count, group = sum(map(len, rows)) or RANKS, dist.new_group()
        stages = [PipelineStage(deep(), index, count, CPU, group=group) for index in indices]
        schedule = get_schedule_class(name)(
            stages if rows else stages[0], MICROBATCHES, loss_fn=mse, timeout=TIMEOUT, **options
        )
        x = torch.randn(ROWS * MICROBATCHES, WIDTH)
        schedule.step(x, target=x)
        row = schedule.actions[context.rank]
        sizes = Bytes(any(action.kind is ActionKind.I for action in row))
        number, least, allowed = sizes.allowed(row)
        assert number == held(context.rank), f"{number} micro-batches, its formula says {held(context.rank)}"
        assert f"held {number} micro-batches at most" in schedule.summary()
        most, _ = measured(lambda: schedule.step(x, target=x, return_outputs=False))
        assert most <= 1.05 * allowed, f"{most} bytes, {allowed} allowed for {number} micro-batches"
        # Else the figure would not be of activations.
        assert most >= 0.95 * least, f"{most} bytes, {number} micro-batches have {least}"
        return {"over": most / allowed, "of_formula": most / least}

    case.__name__ = f"memory_{name}{'_'.join(['', *options, *map(str, options.values())])}"
    return case


IN_TURN = [[rank, rank + RANKS] for rank in range(RANKS)]
DOWN_AND_UP = [[rank, 2 * RANKS - 1 - rank] for rank in range(RANKS)]

CASES = [
    memory_case("GPipe", lambda _: MICROBATCHES),
    memory_case("1F1B", lambda rank: RANKS - rank),
    memory_case("Eager1F1B", lambda rank: 2 * (RANKS - rank) - 1),
    memory_case("Eager1F1B", lambda rank: 2 * (RANKS - rank) - 1, delay_weight_grad=True),
    memory_case("ZBH1", lambda _: RANKS),
    memory_case("ZBH2", lambda _: 2 * RANKS - 1),
    memory_case("ZBV", lambda _: 2 * RANKS, DOWN_AND_UP),
    memory_case("Interleaved1F1B", lambda rank: RANKS + (RANKS - 1 - rank) + 1, IN_TURN, warmup="1f1b"),
    memory_case("Interleaved1F1B", lambda rank: RANKS + 2 * (RANKS - 1 - rank) + 1, IN_TURN, warmup="eager"),
]
