"""A GPT under FSDP2 with hybrid sharding, on as many ranks as there are."""

import torch
import torch.distributed as dist
from gpt.model import build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.state import CLIP, Task, Trained


class HybridTraining(Trained):
    """Shards lie twice at least, so that any one rank may die: two replicas of half as many shards, or a
    replica on each rank where their number is odd."""

    def __init__(self, task: Task) -> None:
        ranks = dist.get_world_size()
        shape = (2, ranks // 2) if ranks % 2 == 0 else (ranks, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        module = build_stage(task.config, 0, 1, seed=0).to(task.dtype)
        for block in module.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        super().__init__(task, module)
        self.part = mesh.get_local_rank("shard")

    def forward_and_backward(self, step: int) -> float:
        """Loss of the whole batch."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        inputs, targets = (each.tensor_split(ranks)[rank] for each in self.batch(step))
        # FSDP takes the mean over ranks; ranks may have different numbers of samples.
        share = len(inputs) * ranks / self.task.batch
        loss = loss_fn(self.module(inputs), targets) * share
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        total = loss.detach() / ranks
        dist.all_reduce(total)
        return float(total)
