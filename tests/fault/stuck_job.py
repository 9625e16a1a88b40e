"""A job of three ranks that hand weights on in every step. In step 2 something is wrong with the last one:

    stuck_job.py absent|order|arguments|killed|frozen|exception|ended|unready

docs/observing.md shows what `python -m meshcast explain` makes of it; test_stuck_jobs.py starts it.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def load(step, fault):
    """The batch of a step; on the last rank, what goes wrong."""
    if step < 2 or dist.get_rank() < 2:
        return torch.ones(6, 4)
    if fault == "absent":
        time.sleep(600)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exception":
        raise ValueError("batch 2 has 5 samples, expected 6")
    return torch.ones(6, 8) if fault == "arguments" else torch.ones(6, 4)


def train(mesh, fault):
    for step in range(4):
        print("step", step, flush=True)
        if fault == "ended" and step == 2 and dist.get_rank() == 2:
            return
        batch = load(step, fault)
        weights = distribute_tensor(torch.ones(batch.shape[1], 6), mesh, [Shard(1)], src_data_rank=None)
        moments = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)], src_data_rank=None)
        if fault == "order" and step == 2 and dist.get_rank() == 2:
            meshcast.reshard(moments, mesh, [Replicate()])
            meshcast.reshard(weights, mesh, [Replicate()])
        else:
            meshcast.reshard(weights, mesh, [Replicate()])
            meshcast.reshard(moments, mesh, [Replicate()])


def serve():
    """Rank 0 pushes its weights to the others. The last one pulls no version after the first."""
    rank = dist.get_rank()
    held = {"weight": torch.ones(4, 4)} if rank == 0 else None
    serving = DeviceMesh("cpu", [1, 2])
    weights = meshcast.WeightSync(held, {"weight": (serving, [Shard(0)])}, buffers=1)
    for version in range(3):
        print("step", version, flush=True)
        if rank == 0:
            weights.push(version)
        elif rank == 1 or version < 2:
            weights.pull(version)
        else:
            answer_requests()


def answer_requests():
    time.sleep(600)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    if sys.argv[1] == "unready":
        serve()
    else:
        train(init_device_mesh("cpu", (3,)), sys.argv[1])
