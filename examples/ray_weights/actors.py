"""What runs in the actors: trainer and rollout of examples/weight_sync, as ranks of one process group."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from gpt.config import MODELS
from gpt.model import build_stage
from meshcast.topology import host_identity
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weight_sync.rollout import Rollout
from weight_sync.trainer import Sender, Trainer
from weight_sync.weights import Destinations, destinations

SEED = 0
LEARNING_RATE = 3e-3


class Member:
    """A rank. The driver calls `found` on the first one, then `join` on all, and `leave` at the end."""

    store: dist.TCPStore | None = None

    def found(self) -> tuple[str, int]:
        """Where all ranks meet: a store in this process, at a port that the system has chosen."""
        address = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, address: str, port: int, rank: int, world: int, limit: float) -> str:
        """On all ranks at once. limit: seconds, of every call of the group that has none of its own. Returns
        the host that meshcast takes this rank to be on."""
        store = self.store or dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=limit))
        dist.init_process_group(
            "meshcast", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
        )
        return host_identity()

    def meshes(self, model: str, trainers: int) -> tuple[DeviceMesh, DeviceMesh, Destinations]:
        """Of the ranks that train and of the others, and where weights go. Made by all ranks alike."""
        ranks = list(range(dist.get_world_size()))
        training, serving = (DeviceMesh("cpu", part) for part in (ranks[:trainers], ranks[trainers:]))
        names = [name for name, _ in build_stage(MODELS[model], 0, 1, SEED).named_parameters()]
        return training, serving, destinations(names, serving)

    def leave(self) -> None:
        """On all ranks, once none needs another. An actor that ends without it is lost to the others."""
        dist.destroy_process_group()


class TrainerActor(Member):
    """FSDP2 over the trainers."""

    def start(self, model: str, trainers: int, batch: int) -> None:
        mesh, _, where = self.meshes(model, trainers)
        self.trainer = Trainer(MODELS[model], mesh, batch, LEARNING_RATE, SEED)
        self.sender = Sender(self.trainer, where)

    def train(self, steps: int) -> float:
        """That many steps of the optimiser. Returns the last loss."""
        return [self.trainer.step() for _ in range(steps)][-1]

    def send(self, version: int) -> tuple[str, float]:
        """Leaves the weights as they are on their way. Returns their digest, and the seconds that training
        stood still: for the push before and for a copy. Raises what went wrong with the push before."""
        begin = time.perf_counter()
        self.sender.send(version)
        seconds = time.perf_counter() - begin
        return digest(self.sender.snapshot.items()), seconds

    def finish(self) -> int:
        """Waits until the last push is over, and raises what went wrong with it. Returns the bytes that this
        rank sent in it."""
        self.sender.finish()
        stats = self.sender.sync.stats
        return 0 if stats is None else stats.bytes_sent


class RolloutActor(Member):
    """Tensor parallelism in bfloat16 over the rollouts."""

    def start(self, model: str, trainers: int, batch: int) -> None:  # noqa: ARG002  as of a trainer
        _, mesh, where = self.meshes(model, trainers)
        self.rollout = Rollout(MODELS[model], mesh, where, SEED)

    def receive(self, version: int) -> dict[str, float | str]:
        """Takes in that version, and serves it: its loss on held-out text stands in for a rollout."""
        found = self.rollout.receive(version)
        stats = self.rollout.sync.stats
        assert stats is not None  # something was pulled
        return {
            "version": found,
            "bytes": stats.bytes_received,
            "seconds": stats.seconds,
            "loss": self.rollout.held_out_loss(),
            "digest": digest(self.rollout.module.named_parameters()),
        }

    def serves(self) -> int | None:
        """The version in its weights; None where they are torn."""
        return self.rollout.sync.version


@torch.no_grad()
def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of names and of all values in bfloat16. On all ranks of the mesh that shares them: each tensor in turn
    is put together there, which is for the check alone."""
    total = hashlib.sha256()
    for name, value in sorted(weights, key=lambda each: each[0]):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        bits = whole.to(torch.bfloat16).contiguous().view(torch.int16)
        total.update(name.encode() + bits.numpy().tobytes())
    return total.hexdigest()
