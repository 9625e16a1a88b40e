"""Rows on two ranks become columns on three others.

torchrun --standalone --nproc-per-node 5 examples/quickstart.py
"""

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("meshcast")
two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])
x = distribute_tensor(torch.arange(24).view(4, 6), two, [Shard(0)], src_data_rank=None)
y = meshcast.reshard(x, three, [Shard(1)])
print(f"rank {dist.get_rank()}: x {x.to_local().tolist()}  y {y.to_local().tolist()}\n", end="", flush=True)
dist.destroy_process_group()
