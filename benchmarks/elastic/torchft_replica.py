"""The training of examples/elastic as a replica of torchft, which has the whole model: the samples of a step
are shared out among the replicas that are there.

Run by torchft_job.py, in an environment that has torchft. The arguments are those of
examples/elastic/train.py.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
from elastic.alone import LoneTraining
from elastic.state import CLIP, Task
from elastic.told import Teller
from elastic.train import parser, task_of
from gpt.model import loss_fn
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo


class ReplicaTraining(LoneTraining):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(
                timeout=timedelta(seconds=5)
            ),  # this and the next as in torchft's train_ddp.py
            timeout=timedelta(seconds=30),
            min_replica_size=1,
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            replica_id=f"replica_{os.environ['REPLICA']}",
            store_addr="127.0.0.1",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            hostname="127.0.0.1",
            use_async_quorum=False,  # who shares the samples is known before the forward pass
            init_sync=False,  # all have the same weights from the start
        )

    def forward_and_backward(self, step: int) -> float:
        """Loss of the whole batch."""
        ranks, rank = self.manager.num_participants(), self.manager.participating_rank()
        inputs, targets = (each.tensor_split(ranks)[rank] for each in self.batch(step))
        loss = loss_fn(self.module(inputs), targets) * (len(inputs) / self.task.batch)
        loss.backward()
        parameters = list(self.module.parameters())
        gradients = [parameter.grad.flatten() for parameter in parameters]
        flat = torch.cat([*gradients, loss.detach()[None]])
        self.manager.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
        for parameter, gradient in zip(parameters, flat[:-1].split([len(g) for g in gradients]), strict=True):
            parameter.grad.copy_(gradient.view_as(parameter))
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        return float(flat[-1])


def main() -> None:
    options = parser().parse_args()
    task, file = task_of(options), Teller(options.metrics).file
    wait_for_others(Path(os.environ["READY"]), int(os.environ["REPLICAS"]))
    training = ReplicaTraining(task)
    manager = training.manager
    while manager.current_step() < options.steps:
        time.sleep(options.pause)
        manager.start_quorum()
        step, ranks, rank = manager.current_step(), manager.num_participants(), manager.participating_rank()
        loss = training.forward_and_backward(step)
        if manager.should_commit():
            training.update()
            said = {"step": step, "loss": loss, "group": f"{ranks} replicas", "rank": rank, "ranks": ranks}
            print(json.dumps({**said, "part": 0, "time": time.time()}), file=file, flush=True)
    manager.shutdown(wait=False)
    os._exit(0)  # threads of the manager may wait for others that have ended


def wait_for_others(ready: Path, replicas: int) -> None:
    """At the start of the job, so that all begin together."""
    (ready / str(os.getpid())).touch()
    while len(list(ready.iterdir())) < replicas:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
