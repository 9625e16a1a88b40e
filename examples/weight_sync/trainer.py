"""The trainer's side: FSDP2 over its ranks, and a background thread that pushes snapshots of the weights."""

import threading

import torch
from gpt.config import ModelConfig
from gpt.data import TextSamples, read_text
from gpt.model import build_stage, loss_fn
from meshcast import WeightSync
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weight_sync.weights import Destinations


class Trainer:
    """A GPT whose parameters are split over the ranks of `mesh`, and the batch with them."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh, batch: int, lr: float, seed: int) -> None:
        self.mesh, self.batch = mesh, batch
        self.samples = TextSamples(read_text(None), config.seq_len, seed)
        self.module = build_stage(config, 0, 1, seed)
        for block in self.module.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr, betas=(0.9, 0.95))
        self.steps = 0

    def step(self) -> float:
        """One optimiser step. Returns the loss of this rank's part of the batch."""
        (inputs,), targets = self.samples.train(self.steps, self.batch)
        mine = slice(self.mesh.get_local_rank(), None, self.mesh.size())
        loss = loss_fn(self.module(inputs[mine]), targets[mine])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()


class Sender:
    """Pushes one snapshot at a time to the rollout ranks, beside the training.

    Pushes need no order with the collectives of the training: a WeightSync has connections of its own. The
    snapshot is memory of its own, which further steps leave alone.
    """

    def __init__(self, trainer: Trainer, destinations: Destinations) -> None:
        self.module = trainer.module
        self.snapshot: dict[str, DTensor] = {
            name: value.clone() for name, value in self.module.state_dict().items()
        }
        self.sync = WeightSync(self.snapshot, destinations)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Waits for the snapshot before, raises what went wrong with it, and leaves a new one on its way."""
        self.finish()
        for name, value in self.module.state_dict().items():
            self.snapshot[name].copy_(value)
        self._thread = threading.Thread(target=self._run, args=(version,), name="weights")
        self._thread.start()

    def finish(self) -> None:
        """Waits until the last snapshot has arrived."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, version: int) -> None:
        try:
            self.sync.push(version)
        except BaseException as error:
            self._error = error
