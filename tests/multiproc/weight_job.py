"""A WeightSync between processes, and the weights of each version."""

from __future__ import annotations

import re

import meshcast
import pytest
import torch
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import Replicate, Shard

TRAINERS = [0, 1]
# No size is a multiple of the number of its ranks.
SHAPES = {"w": (7, 5), "v": (11, 3), "b": (3,)}


def raises(kind: type[Exception], text: str, function) -> Exception:
    """The error, whose message has `text`."""
    with pytest.raises(kind, match=re.escape(text)) as caught:
        function()
    return caught.value


def values(version: int) -> dict[str, torch.Tensor]:
    """The whole weights of a version: float32, and bfloat16 for "v"."""
    full = {name: unique_fill(shape, torch.float32, version) for name, shape in SHAPES.items()}
    return full | {"v": full["v"].remainder(97).to(torch.bfloat16)}


class Job:
    """The weights on this rank, and where they go. where: of "w" and "v"; "b" is whole on each server."""

    def __init__(self, context, trainers=TRAINERS, servers=None, **options) -> None:
        self.context, self.rank, self.trainers = context, context.rank, trainers
        self.servers = list(range(len(trainers), context.world)) if servers is None else servers
        mesh = quiet_mesh(self.servers)
        self.where = {"w": (mesh, [Shard(1)]), "v": (mesh, [Shard(0)]), "b": (mesh, [Replicate()])}
        self.trains, self.serves = self.rank in trainers, self.rank in self.servers
        self.held = {
            name: sharded(full, quiet_mesh(trainers), [Shard(0)], self.rank)
            for name, full in values(0).items()
        }
        self.sync = meshcast.WeightSync(self.held if self.trains else None, self.where, **options)

    def become(self, version: int) -> None:
        """A step of the optimiser, in place."""
        for name, full in values(version).items():
            self.held[name].to_local().copy_(
                sharded(full, quiet_mesh(self.trainers), [Shard(0)], self.rank).to_local()
            )

    def push(self, version: int) -> None:
        self.become(version)
        self.sync.push(version)

    def turn(self, version: int) -> None:
        """The next version, on either side. Meet before another one: two buffers hold the newest only."""
        if self.trains:
            self.push(version)
        else:
            assert self.sync.pull(version) == version
            self.check(version)

    def check(self, version: int, state=None) -> None:
        """This rank serves exactly that version."""
        state = self.sync.state if state is None else state
        assert state.version == version, state.version
        for name, full in values(version).items():
            mesh, placements = self.where[name]
            part = cut(full, mesh.mesh.shape, coordinates(mesh.mesh)[self.rank], placements)
            assert state[name].dtype == full.dtype
            assert torch.equal(state[name].to_local(), part), (name, version)

    def meet(self, name: str, limit: float = 30.0) -> None:
        self.context.wait_for_all(name, limit=limit)

    def close(self) -> None:
        self.meet(f"close {self.sync._name}")
        self.sync.close()
