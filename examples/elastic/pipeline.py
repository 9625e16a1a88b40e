"""A GPT over two pipeline stages, each a mesh of its own size: 2 and 3 ranks of five, 2 and 2 of four."""

import torch
import torch.distributed as dist
from gpt.model import build_stage, loss_fn
from meshcast.pipelining import PipelineStage, Schedule1F1B, clip_grad_norm_
from torch.distributed.device_mesh import DeviceMesh

from elastic.state import CLIP, Task, Trained

MICROBATCHES = 2


class PipelineTraining(Trained):
    """The ranks of a stage have its layers alike: with four ranks or more, any one may die. The batch must
    divide by the numbers of ranks of both stages, times the micro-batches."""

    def __init__(self, task: Task) -> None:
        ranks = dist.get_world_size()
        n_stages = min(2, ranks)
        first = ranks // n_stages
        parts = [range(first), range(first, ranks)][:n_stages]
        # DeviceMesh makes process groups, so every rank makes every stage's mesh, in the same order.
        meshes = [DeviceMesh("cpu", list(part), mesh_dim_names=("data",)) for part in parts]
        self.part = index = next(i for i, part in enumerate(parts) if dist.get_rank() in part)
        super().__init__(task, build_stage(task.config, index, n_stages, seed=0).to(task.dtype))
        self.reporter = parts[-1][0]  # knows the loss
        self.stage = PipelineStage(self.module, index, n_stages, torch.device("cpu"), mesh=meshes[index])
        self.schedule = Schedule1F1B(self.stage, n_microbatches=MICROBATCHES, loss_fn=loss_fn)

    def forward_and_backward(self, step: int) -> float:
        """Loss of the whole batch."""
        inputs, targets = self.batch(step)
        losses: list[torch.Tensor] = []
        self.schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
        clip_grad_norm_(self.stage, CLIP)
        total = torch.zeros((), dtype=self.task.dtype)
        if dist.get_rank() == self.reporter:
            total = torch.stack(losses).mean().detach()
        dist.all_reduce(total)
        return float(total)
