"""The same training in one process, compared with the pipeline step by step.

One rank trains the whole model on whole batches: no stages, no micro-batches, no resharding. Both start
from the same initial weights and then run on their own, so an error in one step shows in every later one.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.job import Samples
from training.modules import build, whole
from training.optimizer import learning_rate, make_optimizer, set_learning_rate
from training.options import Options
from training.trainer import Trainer


@dataclass(frozen=True)
class Difference:
    """Of one step, counted from 1: both losses and the largest difference of a gradient element per stage."""

    step: int
    loss: float
    reference_loss: float
    gradients: list[float]

    @property
    def loss_difference(self) -> float:
        return abs(self.loss - self.reference_loss)

    def within(self, tolerance: float) -> bool:
        # `not any(d > tolerance)` would let NaN pass.
        return all(d <= tolerance for d in [self.loss_difference, *self.gradients])


class SingleProcess:
    """The whole model on this rank alone."""

    def __init__(self, options: Options, samples: Samples, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.samples = samples
        self.module = build(options, 0, 1, device)
        self.optimizer = make_optimizer(self.module, options.lr, options.weight_decay)

    def gradients(self, step: int) -> tuple[float, dict[str, Tensor]]:
        """Loss of the whole batch and the gradient of every parameter by name, on the CPU: other ranks have
        other GPUs."""
        inputs, targets = self.samples.train(step, self.options.run.batch)
        inputs, targets = tuple(each.to(self.device) for each in inputs), targets.to(self.device)
        self.optimizer.zero_grad()
        loss = self.options.job.loss(self.module(*inputs), targets)
        loss.backward()
        named = self.module.named_parameters(remove_duplicate=False)
        return loss.item(), {name: p.grad.cpu() for name, p in named if p.grad is not None}

    def update(self, step: int) -> None:
        options = self.options
        lr = learning_rate(step, peak=options.lr, warmup=options.warmup, steps=options.steps)
        set_learning_rate(self.optimizer, lr)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), options.clip)
        self.optimizer.step()


class Verifier:
    """Compares every rank's own gradients with the single process, which runs on the rank that reports."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reporter = trainer.options.run.stage_ranks(trainer.n_stages - 1)[0]
        self.reference = (
            SingleProcess(trainer.options, trainer.samples, trainer.device) if trainer.reports else None
        )

    def compare(self, step: int, loss: float) -> Difference:
        """Call between `gradients` and `update`, on every rank; every rank gets the same answer."""
        answer: list[tuple[float, dict[str, Tensor]] | None] = [None]
        if self.reference is not None:
            answer[0] = self.reference.gradients(step)
        dist.broadcast_object_list(answer, src=self.reporter)
        assert answer[0] is not None
        reference_loss, expected = answer[0]
        worst = torch.zeros(self.trainer.n_stages, dtype=torch.float64)
        for name, parameter in self.trainer.module.named_parameters():
            gradient = None if parameter.grad is None else whole(parameter.grad)
            difference = largest_difference(gradient, expected[name])
            worst[self.trainer.stage_index] = max(worst[self.trainer.stage_index].item(), difference)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if self.reference is not None:
            self.reference.update(step)
        return Difference(step + 1, loss, reference_loss, worst.tolist())


def largest_difference(actual: Tensor | None, expected: Tensor) -> float:
    """Largest absolute difference; infinite where a gradient is missing or NaN, so that MAX keeps it."""
    if actual is None:
        return float("inf")
    return float((actual.cpu() - expected).abs().max().nan_to_num(nan=float("inf")))
