"""How a version gets from the trainers to the servers. Every way moves the same tensors between the same
ranks; a call of it is over on a rank once that rank is through."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshcast import Layout, WeightSync
from meshcast.bench.methods import PUBLISHED_METHODS, CaseBatch, CaseMove

from .models import DTYPE, SERVERS, TRAINERS, Weights

__all__ = ["WAYS", "Way"]

_LIMIT = 180.0  # seconds


class Way(Protocol):
    """copies: of a server's part, that its memory holds in the end and that the state dict does not have."""

    copies: int

    def run(self, version: int) -> None: ...

    def received(self) -> Mapping[str, torch.Tensor]:
        """On servers: their local tensors."""
        ...

    def after(self) -> None:
        """What is not timed."""

    def close(self) -> None: ...


class Sync:
    def __init__(self, weights: Weights, topology: Any, buffers: int, **options: Any) -> None:
        self.copies = buffers
        self._weights = weights
        self._sync = WeightSync(
            weights.held if weights.trains else None, weights.wanted, buffers=buffers, topology=topology,
            timeout=_LIMIT, **options,
        )  # fmt: skip

    def run(self, version: int) -> None:
        if self._weights.trains:
            self._sync.push(version)
        else:
            self._sync.pull(version)

    def received(self) -> Mapping[str, torch.Tensor]:
        return {name: x.to_local() for name, x in self._sync.state.items()}

    def after(self) -> None:
        pass

    def close(self) -> None:
        self._sync.close()


class Placed:
    """What arrives in memory that the benchmark has placed."""

    copies = 0

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def received(self) -> Mapping[str, torch.Tensor]:
        return {name: x.to_local() for name, x in self._weights.placed.items()}

    def after(self) -> None:
        pass

    def close(self) -> None:
        dist.barrier()


class Published(Placed):
    """The plan of another library, message by message on meshcast's transport. name: of the method."""

    def __init__(self, weights: Weights, topology: Any, name: str) -> None:
        super().__init__(weights)
        (self._method,) = (method for method in PUBLISHED_METHODS if method.name == name)
        layouts: list[Any] = [weights.described()]
        dist.broadcast_object_list(layouts, TRAINERS[0])
        held, placed = (
            {name: x.to_local() for name, x in each.items()} for each in (weights.held, weights.placed)
        )
        moves = [
            CaseMove(
                shape, Layout(*layouts[0][name]), Layout(*weights.wanted[name]), held.get(name),
                placed.get(name), DTYPE,
            )
            for name, shape in weights.shapes.items()
        ]  # fmt: skip
        self._batch = CaseBatch(moves, topology, dist.group.WORLD)

    def run(self, version: int) -> None:  # noqa: ARG002  a version is what the tensors hold
        self._method.run(self._batch)


class Broadcast(Placed):
    """Tensor by tensor: full_tensor() on all trainers, a broadcast of the first of them to all servers, and
    each takes its part."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._rank = dist.get_rank()
        self._group = dist.new_group([TRAINERS[0], *SERVERS])

    def run(self, version: int) -> None:  # noqa: ARG002  a version is what the tensors hold
        weights, root = self._weights, TRAINERS[0]
        for name, shape in weights.shapes.items():
            if weights.trains:
                whole = weights.held[name].full_tensor()
                if self._rank == root:
                    dist.broadcast(whole, root, self._group)
            else:
                whole = torch.empty(shape, dtype=DTYPE)
                dist.broadcast(whole, root, self._group)
                self._weights.placed[name].to_local().copy_(whole[weights.slices(name)])


class Files(Placed):
    """torch.distributed.checkpoint: the trainers save, and when all have, the servers load. The folder is
    memory of this machine, which every host reaches without a network."""

    def __init__(self, weights: Weights, folder: str) -> None:
        super().__init__(weights)
        self._folder = Path(folder)
        self._savers, self._loaders = dist.new_group(TRAINERS), dist.new_group(SERVERS)
        self._numbers = itertools.count()

    def run(self, version: int) -> None:  # noqa: ARG002  a version is what the tensors hold
        path = self._folder / str(next(self._numbers))
        if self._weights.trains:
            dcp.save(
                dict(self._weights.held), storage_writer=dcp.FileSystemWriter(path),
                process_group=self._savers,
            )  # fmt: skip
        dist.barrier()
        if self._weights.serves:
            dcp.load(
                dict(self._weights.placed),
                storage_reader=dcp.FileSystemReader(path),
                process_group=self._loaders,
            )

    def after(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._folder.iterdir():
                shutil.rmtree(path)


def files_folder() -> tempfile.TemporaryDirectory[str]:
    """For Files: on all hosts, in memory."""
    return tempfile.TemporaryDirectory(prefix="meshcast-weights-", dir="/dev/shm")


# By name: what makes it from the weights, the topology and the folder for files.
WAYS: dict[str, Callable[[Weights, Any, str], Way]] = {
    "two buffers": lambda weights, topology, _: Sync(weights, topology, 2),
    "one buffer": lambda weights, topology, _: Sync(weights, topology, 1),
    "two buffers, digest": lambda weights, topology, _: Sync(weights, topology, 2, digest=True),
    **{
        name: lambda weights, topology, _, name=name: Published(weights, topology, name)
        for name in ("Megatron plan", "NeMo-RL plan")
    },
    "broadcast": lambda weights, _, __: Broadcast(weights),
    "files": lambda weights, _, folder: Files(weights, folder),
}
