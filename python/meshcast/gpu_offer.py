"""What a rank says of its GPU before the ranks of a group connect theirs, and what speaks against it.

Every rank reads what all have said and judges by the same rules, so all of them go on or all raise alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

from . import _C
from ._host import host_identity
from .errors import LayoutError, MeshcastError

__all__ = ["GpuOffer", "gpu_obstacle", "own_offer", "refuse_unfit", "require_gpu", "shared_device_type"]

_OP = "connect"
_SHARING = (2, 30, 3)  # the first NCCL that can serve several ranks on one GPU
_SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class GpuOffer:
    """One rank's GPU. device: its index in that process; uuid: of the GPU itself; nccl: version, "2.28.9";
    may_share: NCCL is told to let ranks share a GPU. obstacle: why this rank cannot take part, the rest is
    then empty."""

    host: str = ""
    device: int = -1
    uuid: str = ""
    gpu: str = ""
    nccl: str = ""
    may_share: bool = False
    obstacle: str = ""

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> GpuOffer:
        return cls(**json.loads(text))


def shared_device_type(types: Iterable[str], op: str) -> str:
    """The device type that all meshes of a call have, "cpu" or "cuda". Raises LayoutError for a mixture and
    for another one."""
    found = sorted(set(types))
    if len(found) > 1:
        raise LayoutError(
            f"{op}: the meshes are on {' and '.join(found)}; all of one call must be on one kind of device: "
            "move the tensor within its own mesh first, for example x.cpu() or x.cuda()"
        )
    kind = found[0] if found else "cpu"
    if kind not in ("cpu", "cuda"):
        raise LayoutError(f"{op}: the meshes are on {kind}; tensors on cpu and cuda can be moved")
    return kind


def require_gpu(op: str) -> None:
    """Raises LayoutError where this process can move nothing on GPUs."""
    reason = gpu_obstacle(hasattr(_C, "CudaGroup"), torch.version.cuda, torch.cuda.is_available())
    if reason:
        raise LayoutError(f"{op}: the meshes are on cuda, but {reason}", op=op)


def gpu_obstacle(built: bool, torch_cuda: str | None, available: bool) -> str:
    """Why a process cannot use a GPU; empty if it can. built: meshcast has CUDA code; torch_cuda: the CUDA of
    torch."""
    if torch_cuda is None:
        return "torch is a CPU build: install a CUDA build of torch and build meshcast for it"
    if not built:
        return "this build of meshcast has no CUDA code: build it again with nvcc found, or MESHCAST_CUDA=ON"
    if not available:
        return "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES and the driver"
    return ""


def own_offer(device: int) -> GpuOffer:
    """What this process says of its GPU `device`."""
    try:
        properties = torch.cuda.get_device_properties(device)
        return GpuOffer(
            host=host_identity(),
            device=device,
            uuid=str(properties.uuid),
            gpu=properties.name,
            nccl=_C.nccl_version(),
            may_share=os.environ.get(_SHARING_SWITCH) == "1",
        )
    except Exception as error:  # of CUDA or NCCL: the other ranks must hear of it
        return GpuOffer(obstacle=str(error))


def refuse_unfit(offers: Mapping[int, GpuOffer], rank: int) -> None:
    """Raises unless the GPUs of all ranks can be connected: MeshcastError where one cannot take part, or NCCL
    differs; LayoutError where two ranks have one GPU that NCCL cannot share."""
    for other, offer in sorted(offers.items()):
        if offer.obstacle:
            raise MeshcastError(
                f"rank {rank}: rank {other} cannot use its GPU: {offer.obstacle}",
                rank=rank,
                peer=other,
                op=_OP,
                phase="connect",
            )
    first = min(offers)
    for other, offer in sorted(offers.items()):
        if _numbers(offer.nccl)[:2] != _numbers(offers[first].nccl)[:2]:
            raise MeshcastError(
                f"rank {rank}: rank {first} has NCCL {offers[first].nccl}, rank {other} has NCCL "
                f"{offer.nccl}: install one version everywhere",
                rank=rank,
                peer=other,
                op=_OP,
                phase="connect",
            )
    owners: dict[tuple[str, str], int] = {}
    for other, offer in sorted(offers.items()):
        owner = owners.setdefault((offer.host, offer.uuid), other)
        shares = offers[owner].may_share and offer.may_share and _numbers(offer.nccl) >= _SHARING
        if owner == other or shares:
            continue
        needed = ".".join(map(str, _SHARING))
        raise LayoutError(
            f"rank {rank}: ranks {owner} and {other} both use GPU {offer.uuid} ({offer.gpu}; cuda:"
            f"{offers[owner].device} and cuda:{offer.device}): give each rank its own, for example "
            f"torch.cuda.set_device(local rank) before the first call; NCCL {needed} or newer with "
            f"{_SHARING_SWITCH}=1 on all ranks lets them share, here it is {offer.nccl}",
            rank=rank,
            peer=other,
            op=_OP,
            phase="connect",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
