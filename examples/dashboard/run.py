"""Moves a tensor from two ranks to the others, step after step, and shows what that costs on TensorBoard.

torchrun --standalone --nproc-per-node 4 examples/dashboard/run.py --logdir out/dashboard
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.tensorboard import SummaryWriter

from dashboard.board import Board


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", type=Path, required=True, help="each rank gets a folder in it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1024, help="of 1,024 float32 each")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 3:
        sys.exit("give it three ranks or more: two hold the tensor, the others get it")
    source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", list(range(2, world)))
    x = distribute_tensor(torch.ones(args.rows, 1024), source, [Shard(0)], src_data_rank=None)
    with Board(SummaryWriter(str(args.logdir / f"rank{rank}"))) as board:
        for step in range(args.steps):
            handle = meshcast.reshard(x, target, [Shard(1)], async_op=True)
            torch.ones(256, 256) @ torch.ones(256, 256)  # what a job would do meanwhile
            handle.wait()
            board.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
