"""One rank's part of the training step: its stage of the model, the schedule, the optimiser."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, clip_grad_norm_, get_schedule_class
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from training.job import Samples
from training.layout import RunLayout
from training.modules import build
from training.optimizer import learning_rate, make_optimizer, scale_gradients, set_learning_rate
from training.options import Options

EVAL_BATCHES = 4


def stage_mesh(run: RunLayout, stage: int, device: str) -> DeviceMesh:
    """Dimension "data": ranks with samples of their own; "tensor": ranks that share every layer."""
    shape = run.stages[stage]
    ranks = torch.tensor(run.stage_ranks(stage)).view(shape.data, shape.tensor)
    return DeviceMesh(device, ranks, mesh_dim_names=("data", "tensor"))


@dataclass(frozen=True)
class BatchResult:
    """Of one batch: mean loss, bytes that all ranks sent between the meshes."""

    loss: float
    moved_bytes: int


@dataclass(frozen=True)
class UpdateResult:
    """Of one step of the optimiser: gradient norm of all stages before clipping, learning rate used."""

    norm: float
    lr: float


class Trainer:
    """Collective: every rank makes one and calls the same methods in the same order."""

    def __init__(self, options: Options, samples: Samples, device: torch.device) -> None:
        run = options.run
        self.device = device
        self.options = options
        self.samples = samples
        self.stage_index = run.stage_of(dist.get_rank())
        self.n_stages = len(run.stages)
        # DeviceMesh makes process groups, so every rank makes every stage's mesh, in the same order.
        meshes = [stage_mesh(run, i, device.type) for i in range(self.n_stages)]
        mesh = meshes[self.stage_index]
        self.module = build(options, self.stage_index, self.n_stages, device, mesh)
        self.shared_names = options.job.shared_parameters(self.stage_index, self.n_stages)
        self.stage = PipelineStage(
            self.module, self.stage_index, self.n_stages, device, mesh=mesh,
            edges=options.job.edges(self.n_stages),
            shared_parameters=self.shared_names,
        )  # fmt: skip
        schedule_class = get_schedule_class(options.schedule)
        self.schedule = schedule_class(self.stage, n_microbatches=run.microbatches, loss_fn=options.job.loss)
        self.optimizer = make_optimizer(self.module, options.lr, options.weight_decay)

    @property
    def reports(self) -> bool:
        """True on the one rank that talks: the first of the last stage, where the loss is known first."""
        return dist.get_rank() == self.options.run.stage_ranks(self.n_stages - 1)[0]

    def gradients(self, step: int) -> BatchResult:
        """Forward and backward of one batch; every rank gets the same result.

        Afterwards `parameter.grad` is the gradient of the mean over the whole batch, on every rank.
        """
        inputs, targets = self.samples.train(step, self.options.run.batch)
        self.optimizer.zero_grad()
        loss, sent_before = 0.0, self.schedule.bytes_sent
        for part, part_targets in self._passes(inputs, targets):
            losses: list[Tensor] = []
            self.schedule.step(*part, target=part_targets, losses=losses, return_outputs=False)
            loss += self._mean_loss(losses)
        scale_gradients(self.module, 1.0 / self.options.run.passes)
        loss, all_sent = self._sum_over_ranks(loss, self.schedule.bytes_sent - sent_before)
        return BatchResult(loss=loss, moved_bytes=int(all_sent))

    def update(self, step: int) -> UpdateResult:
        """Clip by the norm over all stages and apply the optimiser."""
        options = self.options
        lr = learning_rate(step, peak=options.lr, warmup=options.warmup, steps=options.steps)
        set_learning_rate(self.optimizer, lr)
        norm = clip_grad_norm_(self.stage, options.clip)
        self.optimizer.step()
        return UpdateResult(norm=norm.item(), lr=lr)

    def held_out_loss(self) -> float:
        """Mean loss over a few batches that are never trained on; on every rank."""
        total = 0.0
        for index in range(EVAL_BATCHES):
            inputs, targets = self.samples.held_out(index, self.options.run.batch)
            for part, part_targets in self._passes(inputs, targets):
                losses: list[Tensor] = []
                self.schedule.eval(*part, target=part_targets, losses=losses)
                total += self._mean_loss(losses)
        return self._sum_over_ranks(total)[0] / EVAL_BATCHES

    def profile(self, folder: Path) -> None:
        """Write what this rank did in the step that ran last, as a Chrome trace; collective."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self.schedule.trace(folder / f"rank{dist.get_rank()}.json")

    def _mean_loss(self, losses: list[Tensor]) -> float:
        """A pass's share of the mean over the batch on the rank that reports, 0 elsewhere: it is summed over
        passes and ranks."""
        return float(torch.stack(losses).mean()) / self.options.run.passes if self.reports else 0.0

    def _passes(
        self, inputs: tuple[Tensor, ...], targets: Tensor
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """The batch in as many equal parts as there are passes, on this rank's device."""
        cut = [each.to(self.device).chunk(self.options.run.passes) for each in (*inputs, targets)]
        for *part, part_targets in zip(*cut, strict=True):
            yield tuple(part), part_targets

    def _sum_over_ranks(self, *values: float) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()
