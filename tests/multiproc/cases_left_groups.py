"""DTensors after a rank has left all its process groups, as survivors of a job that goes on do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from meshcast.elastic.remesh import leave_groups
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


def meshes_that_are_equal_are_not_those_of_before(context) -> None:
    """torch keeps what it found for a mesh, and an equal mesh finds it: with names of process groups that are
    gone, or that others have now."""
    full = torch.arange(1.0, 25.0).reshape(4, 6)
    for number in range(3):
        for _ in range(number):  # names of groups are counted
            dist.new_group([0, 3])
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        x = distribute_tensor(full + number, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        norm = torch.linalg.vector_norm(x).full_tensor()
        torch.testing.assert_close(norm, torch.linalg.vector_norm(full + number))
        for dim in (0, 1):
            total = x.sum(dim).full_tensor()
            torch.testing.assert_close(total, (full + number).sum(dim))
        leave_groups("the ranks change")
        store = dist.PrefixStore(f"anew {number}", context.store)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world)


CASES = [meshes_that_are_equal_are_not_those_of_before]
