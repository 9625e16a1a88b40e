"""The same script with torch.distributed.pipelining and with meshcast.pipelining: only the import differs,
outputs, losses and gradients do not. Three ranks, one stage each or two."""

from __future__ import annotations

from types import ModuleType

import meshcast.pipelining as ours
import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from multiproc.pipeline_models import CPU, batch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Takes a keyword argument in the first stage, drops nothing, may recompute its activations."""

    def __init__(self, seed: int, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)).double()
        self.recompute = recompute

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return x + y * scale


def stages_of(schedule: str, rank: int, world: int) -> list[int]:
    if schedule == "ScheduleZBVZeroBubble":
        return [rank, 2 * world - 1 - rank]
    return [rank, rank + world] if schedule == "ScheduleInterleaved1F1B" else [rank]


def script(library: ModuleType, schedule_name: str, rank: int, world: int, recompute: bool, options: dict):
    """What a user of torch.distributed.pipelining writes."""
    indices = stages_of(schedule_name, rank, world)
    count = world * len(indices)
    modules = [Block(index, recompute) for index in indices]
    stages = [
        library.PipelineStage(module, index, count, CPU)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule_class = getattr(library, schedule_name, None) or library.get_schedule_class(schedule_name)
    first = stages if len(stages) > 1 else stages[0]
    schedule = schedule_class(first, 6, loss_fn=nn.functional.mse_loss, **options)
    results = []
    for seed in (1, 2):
        # torch divides by the micro-batches what earlier steps have left in .grad once more; here it stays.
        for module in modules:
            module.zero_grad()
        x, y = batch(12, seed=seed)
        losses: list[torch.Tensor] = []
        output = None
        arguments = (x,) if 0 in indices else ()
        if count - 1 in indices:
            output = schedule.step(*arguments, target=y, losses=losses)
        else:
            schedule.step(*arguments)
        gradients = [parameter.grad.clone() for module in modules for parameter in module.parameters()]
        results.append((output, [loss.detach() for loss in losses], gradients))
    return results


def dropin_case(schedule: str, recompute: bool = False, **options):
    def case(context) -> None:
        found, expected = (
            script(library, schedule, context.rank, context.world, recompute, options)
            for library in (ours, theirs)
        )
        for (output, losses, gradients), (their_output, their_losses, their_gradients) in zip(
            found, expected, strict=True
        ):
            assert (output is None) == (their_output is None)
            if output is not None:
                assert torch.equal(output, their_output)
                assert torch.equal(torch.stack(losses), torch.stack(their_losses))
            for mine, other in zip(gradients, their_gradients, strict=True):
                assert (mine - other).abs().max().item() <= 1e-14
        dist.barrier()

    case.__name__ = "_".join([schedule, *(["recompute"] if recompute else []), *options])
    return case


CASES = [
    dropin_case("ScheduleGPipe"),
    dropin_case("Schedule1F1B"),
    dropin_case("Schedule1F1B", scale_grads=False),
    dropin_case("Schedule1F1B", recompute=True),
    dropin_case("ScheduleInterleaved1F1B"),
    dropin_case("ScheduleZBVZeroBubble"),
]
