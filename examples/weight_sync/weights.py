"""Where every weight of the GPT goes on the rollout mesh. The same on all ranks."""

from collections.abc import Iterable, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Destinations = dict[str, tuple[DeviceMesh, Sequence[Placement]]]


def destinations(names: Iterable[str], mesh: DeviceMesh) -> Destinations:
    """{name: (mesh, placements)} as gpt.model.parallelize cuts a whole model on `mesh`."""
    return {name: (mesh, [_cut(name)]) for name in names}


def _cut(name: str) -> Placement:
    if ".qkv." in name or ".up." in name:
        return Shard(0)  # outputs of the first of two layers, and its bias
    if name.endswith((".out.weight", ".down.weight")):
        return Shard(1)  # inputs of the second
    return Replicate()
