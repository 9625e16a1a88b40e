"""A job for meshcast.elastic.run whose state is nested as torch's Stateful objects have it.

nested_job.py VICTIM...: these workers, named "LOCAL_RANK.RESTART", die by SIGKILL in step 2 of 4. With "lazy"
among them, the optimizer makes its state in the first step only. With "late", the state has one more small
tensor from the second step on, and with "late optimizer" that of an optimizer which begins then.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from meshcast import elastic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

NAME = f"{os.environ['LOCAL_RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"


class Trained:
    """Momentum of one weight: a DTensor that is sharded in two copies, or lies whole on each rank."""

    def __init__(self, *, lazy: bool) -> None:
        ranks = dist.get_world_size()
        shape, placements = ((2, 2), [Replicate(), Shard(0)]) if ranks == 4 else ((ranks,), [Replicate()])
        mesh = init_device_mesh("cpu", shape)
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6), mesh, placements))
        self.model = torch.nn.ParameterDict({"weight": weight})
        self.optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
        if not lazy:
            weight.grad = torch.zeros_like(weight)
            self.optimizer.step()
        self.seen: list[Any] = [torch.tensor(0), {"epoch": 0}]
        self.late: dict[str, Any] = {}
        self.second = torch.optim.SGD([weight], lr=0.0, momentum=0.5)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "data": {"seen": self.seen, **self.late},
            "second": self.second.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        self.seen = state["data"]["seen"]

    def update(self) -> None:
        self.optimizer.step()
        self.seen[0] += 1
        if self.seen[0] == 2 and "late" in sys.argv:
            self.late = {"scale": torch.tensor(2.0)}
        if self.seen[0] == 2 and "late optimizer" in sys.argv:
            self.second.step()
        self.seen[1]["epoch"] += 1


def meet() -> None:
    """Waits for all ranks in the store, which is not theirs: values that gloo has sent may be lost if their
    sender ends before they are read."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()} has all values", "")
    store.wait([f"rank {rank} has all values" for rank in range(dist.get_world_size())])


def main() -> None:
    torch.set_num_threads(1)
    victims = sys.argv[1:]
    job = elastic.Job(
        lambda: Trained(lazy="lazy" in victims), backend="gloo", timeout=timedelta(seconds=60), grace=120.0
    )
    with job:
        while job.steps < 4:
            with job.attempt() as trained:
                weight = trained.model["weight"]
                weight.grad = torch.ones_like(weight)
                if job.steps == 2 and NAME in victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                job.commit(trained.update)
        full = weight.full_tensor().tolist()
        meet()
    # -lr times 1 + 1.5 + 1.75 + 1.875
    assert full == [-3.0625] * 6, full
    assert (int(trained.seen[0]), trained.seen[1]) == (4, {"epoch": 4}), trained.seen
    print(f"worker {NAME} has ended well", flush=True)


if __name__ == "__main__":
    main()
