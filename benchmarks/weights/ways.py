"""The models whose weights move: names and shapes as transformers has them, how trainers hold them, and what
servers want; and how a version gets from the trainers to the servers. Every way moves the same tensors
between the same ranks; a call of it is over on a rank once that rank is through."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshcast import Layout, WeightStats, WeightSync
from meshcast.bench.measure import numbered
from meshcast.bench.methods import PUBLISHED_METHODS, CaseBatch, CaseMove
from meshcast.planning.plan import plan_many
from meshcast.topology import Topology
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

TRAINERS, SERVERS = [0, 1, 2, 3], [4, 5, 6, 7]
DTYPE = torch.bfloat16
_PERIOD = 113  # of the values along a tensor: prime, so that rows differ
_VERSIONS = 100  # then the values begin again; all sums are exact in bfloat16, which has integers up to 256
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """config: arguments of the model's configuration in transformers."""

    name: str
    what: str
    kind: str
    config: dict[str, int]


MODELS = {
    model.name: model
    for model in (
        Model(
            "llama",
            "Llama 3 8B, its widths cut to an eighth: FSDP2 over 4 ranks to tensor parallelism over 4",
            "Llama",
            {
                "vocab_size": 18944, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 32,
                "num_attention_heads": 8, "num_key_value_heads": 4,
            },
        ),
        Model(
            "mixtral",
            "a Mixtral of 4 layers of 8 experts: experts over 2 ranks, FSDP2 over 2 times that, to experts "
            "over 4 and tensor-parallel attention",
            "Mixtral",
            {
                "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 896, "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
            },
        ),
    )
}  # fmt: skip


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """By name, as transformers makes the model. Raises ImportError without that package."""
    import transformers

    config = getattr(transformers, f"{model.kind}Config")(**model.config)
    with torch.device("meta"):
        made = getattr(transformers, f"{model.kind}ForCausalLM")(config)
    return {name: tuple(each.shape) for name, each in made.named_parameters()}


class _Tree(nn.Module):
    """Parameters under their names, in modules that only hold them."""

    def __init__(self, given: Shapes) -> None:
        super().__init__()
        for name, shape in given.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=DTYPE)))


class Weights:
    """One rank's part of a model. All ranks construct it: meshes make groups.

    held: of a trainer, as its state_dict() has them; wanted: where everything goes; placed: memory of a
    server for all of it, touched. torch loads modules for a second with the first DTensor of a process: all
    ranks have some here, as a model has."""

    def __init__(self, given: Shapes, rank: int) -> None:
        self.shapes, self._rank = given, rank
        self.servers = DeviceMesh("cpu", SERVERS)
        self.wanted: dict[str, tuple[DeviceMesh, list[Placement]]] = {
            name: (self.servers, [_served(name, len(shape))]) for name, shape in given.items()
        }
        self.trains, self.serves = rank in TRAINERS, rank in SERVERS
        self.held = _trained(given, self.trains)
        places: Mapping[str, Any] = {name: (x.device_mesh, x.placements) for name, x in self.held.items()}
        if self.serves:
            places = self.wanted
        # Of this rank, the values of version 0.
        self._first = {name: self._values(given[name], *place) for name, place in places.items()}
        self.placed = self._placed() if self.serves else {}

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * DTYPE.itemsize

    @property
    def nbytes_here(self) -> int:
        """Of this rank's part."""
        return sum(each.nbytes for each in self._first.values())

    def bound(self, topology: Topology, layouts: Mapping[str, Any]) -> float:
        """Seconds that no plan can beat. layouts: of the trainers, by name; see `described`."""
        problems = [
            (shape, DTYPE, Layout(*layouts[name]), Layout(*self.wanted[name]))
            for name, shape in self.shapes.items()
        ]
        return plan_many(problems, topology).lower_bound

    def described(self) -> dict[str, Any]:
        """Of a trainer: mesh and placements of each tensor, for ranks that hold none."""
        return {name: (x.device_mesh.mesh.tolist(), x.placements) for name, x in self.held.items()}

    @torch.no_grad()
    def become(self, version: int) -> None:
        """A step of the optimiser, in place."""
        for name, x in self.held.items():
            torch.add(self._first[name], version % _VERSIONS, out=x.to_local())

    def wrong(self, found: Mapping[str, torch.Tensor], version: int) -> int:
        """Bytes on this server that are not of that version."""
        bad = 0
        for name, first in self._first.items():
            expected = first + version % _VERSIONS
            if not torch.equal(found[name], expected):
                bad += DTYPE.itemsize * int((found[name] != expected).sum())
        return bad

    def slices(self, name: str) -> tuple[slice, ...]:
        """Of the whole tensor, what this server wants."""
        return slices_of(self.shapes[name], *self.wanted[name])

    def _placed(self) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(
                torch.zeros_like(self._first[name]), mesh, placements, run_check=False,
                shape=torch.Size(self.shapes[name]),
                stride=torch.empty(self.shapes[name], device="meta").stride(),
            )
            for name, (mesh, placements) in self.wanted.items()
        }  # fmt: skip

    def _values(self, shape: tuple[int, ...], mesh: DeviceMesh, placements: Any) -> torch.Tensor:
        """Of this rank's part of a tensor, which torch says where it lies."""
        box = tuple((each.start, each.stop) for each in slices_of(shape, mesh, placements))
        return (numbered(shape, box) % _PERIOD).to(DTYPE)


def slices_of(shape: tuple[int, ...], mesh: DeviceMesh, placements: Any) -> tuple[slice, ...]:
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))


def _served(name: str, ndim: int) -> Placement:
    """Tensor parallelism; whole experts."""
    if ".experts." in name:
        return Shard(0)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return Shard(1)
    if ndim == 1 or name.endswith("mlp.gate.weight"):  # norms, and what routes to the experts
        return Replicate()
    return Shard(0)


def _trained(given: Shapes, trains: bool) -> dict[str, DTensor]:
    """FSDP2, as torch does it; experts on a mesh of their own, cut along their width beyond that."""
    whole = DeviceMesh("cpu", TRAINERS)
    grid = DeviceMesh("cpu", [TRAINERS[:2], TRAINERS[2:]], mesh_dim_names=("data", "experts"))
    if not trains:
        return {}
    tree: Any = _Tree(given)
    for layer in tree.model.layers.children():
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            for name, parameter in list(experts.named_parameters()):
                own = parameter.chunk(2)[grid.get_local_rank("experts")].detach().clone()
                spread = DTensor.from_local(own, grid["experts"], [Shard(0)], run_check=False)
                experts.register_parameter(name, nn.Parameter(spread))
            fully_shard(experts, mesh=grid["data"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=whole)
    fully_shard(tree, mesh=whole)
    return dict(tree.state_dict())


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

    @property
    def stats(self) -> WeightStats:
        """Of the last version."""
        stats = self._sync.stats
        assert stats is not None
        return stats

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
