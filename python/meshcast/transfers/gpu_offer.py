"""What a rank says of its GPU before the ranks of a group connect theirs; gpu_transport.py judges it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from .. import _C
from ..base import settings
from ..base.host import host_identity
from ..errors import LayoutError, MeshcastError

__all__ = [
    "AUTO",
    "CUDA_IPC",
    "NCCL",
    "SHARING_SWITCH",
    "TRANSPORT_SWITCH",
    "GpuOffer",
    "DeviceTypes",
    "gpu_obstacle",
    "own_obstacle",
    "own_offer",
    "require_gpu",
    "device_types_of",
]

DeviceTypes = tuple[str, str]  # of the source and the destination of a call: "cpu" or "cuda" each

AUTO, NCCL, CUDA_IPC = "auto", "nccl", "cuda_ipc"
TRANSPORT_SWITCH = settings.CUDA_TRANSPORT.name

CAPTURED = (
    "the current stream is being captured into a CUDA graph, which a reshard cannot be part of: call it "
    "outside of the capture"
)
SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class GpuOffer:
    """One rank's GPU. device: its index in that process; uuid: of the GPU itself; nccl: version, "2.28.9";
    may_share: NCCL is told to let ranks share a GPU; wants: the transport asked for, "auto", "nccl" or
    "cuda_ipc"; reaches: uuids of the other GPUs whose memory it can read. no_nccl, no_ipc: why it cannot use
    that transport. obstacle: why this rank cannot take part at all, the rest is then empty."""

    host: str = ""
    device: int = -1
    uuid: str = ""
    gpu: str = ""
    nccl: str = ""
    may_share: bool = False
    wants: str = AUTO
    reaches: tuple[str, ...] = ()
    no_nccl: str = ""
    no_ipc: str = ""
    obstacle: str = ""

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> GpuOffer:
        fields = json.loads(text)
        return cls(**(fields | {"reaches": tuple(fields["reaches"])}))


def device_types_of(source: str, destination: str, op: str) -> DeviceTypes:
    """Where both ends of a call are, from the device types of their meshes. Raises LayoutError for one that
    is neither "cpu" nor "cuda"."""
    for kind in (source, destination):
        if kind not in ("cpu", "cuda"):
            raise LayoutError(f"{op}: the meshes are on {kind}; tensors on cpu and cuda can be moved", op=op)
    return source, destination


def require_gpu(op: str, *, copies_only: bool = False) -> None:
    """Raises LayoutError where this process can move nothing on GPUs. copies_only: nothing but torch's copies
    between a GPU and the host is needed."""
    reason = own_obstacle(copies_only=copies_only)
    if reason:
        meshes = "one of the meshes is" if copies_only else "the meshes are"
        raise LayoutError(f"{op}: {meshes} on cuda, but {reason}", op=op)


def several_gpus(devices: Sequence[int]) -> str:
    """What is wrong with tensors of one call on several GPUs of a rank."""
    return (
        f"the tensors of one call are on several GPUs of this rank, {sorted(devices)}; results are made on "
        "the current one: call torch.cuda.set_device with that of the source first"
    )


def own_obstacle(*, copies_only: bool) -> str:
    """Why this process can move nothing on GPUs; empty if it can. copies_only: see require_gpu."""
    built = copies_only or hasattr(_C, "GpuGroupCore")
    return gpu_obstacle(built, torch.version.cuda, torch.cuda.is_available())


def gpu_obstacle(built: bool, torch_cuda: str | None, available: bool) -> str:
    """Why a process cannot use a GPU; empty if it can. built: meshcast has CUDA code; torch_cuda: the CUDA of
    torch."""
    if torch_cuda is None:
        return "torch is a CPU build: install a CUDA build of torch and build meshcast for it"
    if not built:
        return "this build of meshcast has no CUDA code: build it again with MESHCAST_CUDA=ON"
    if not available:
        return "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES and the driver"
    return ""


def own_offer(device: int) -> GpuOffer:
    """What this process says of its GPU `device`."""
    try:
        properties = torch.cuda.get_device_properties(device)
        nccl, no_nccl = _own_nccl()
        wish = settings.CUDA_TRANSPORT.choice()
        return GpuOffer(
            host=host_identity(),
            device=device,
            uuid=str(properties.uuid),
            gpu=properties.name,
            nccl=nccl,
            may_share=os.environ.get(SHARING_SWITCH) == "1",
            wants=wish,
            reaches=_reachable(device),
            no_nccl=no_nccl,
            no_ipc="" if wish == NCCL else _C.cuda_ipc_obstacle(device),  # the look takes memory of the GPU
        )
    except Exception as error:  # of CUDA; the other ranks must hear of it
        return GpuOffer(obstacle=str(error))


def _own_nccl() -> tuple[str, str]:
    """The version of NCCL, or why there is none."""
    try:
        return _C.nccl_version(), ""
    except MeshcastError as error:
        return "", str(error)


def _reachable(device: int) -> tuple[str, ...]:
    """The GPUs that this process sees and whose memory `device` can read."""
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    return tuple(
        str(torch.cuda.get_device_properties(other).uuid)
        for other in others
        if torch.cuda.can_device_access_peer(device, other)
    )
