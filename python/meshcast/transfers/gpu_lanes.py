"""The GPU side of a private group: its communicators (NCCL's, or connections over CUDA IPC), made when its
ranks first move tensors on GPUs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from .. import _C
from ..base.observe import log
from ..errors import AbortedError, LayoutError, MeshcastError
from ..groups.private import PrivateGroup
from .gpu_offer import CUDA_IPC, NCCL, GpuOffer, own_offer
from .gpu_transport import choose_transport

__all__ = ["CudaLanes", "attach_gpu", "connect_lanes", "gpu_of"]

_KEY = "gpu"  # among what is attached to a group


class Place(Protocol):
    """Where a call is. problem: why this rank cannot take part; the others hear of it."""

    device: int
    problem: Exception | None


class CudaLanes:
    """The communicators of a group by lane, all on GPU `device` of this process. Only commands touch them."""

    def __init__(self, core: Any, device: int, transport: str) -> None:
        self.core = core
        self.device = device
        self.transport = transport  # "nccl" or "cuda_ipc": all lanes have one
        self.lanes: set[int] = set()

    def abort(self, reason: str) -> None:
        self.core.abort(reason)

    def close(self) -> None:
        self.core.shutdown()

    def check_device(self, device: int, op: str) -> None:
        """Raises LayoutError for tensors on another GPU than that of the communicators."""
        if device != self.device:
            raise LayoutError(
                f"{op}: the tensors are on cuda:{device}, but this group's communicators are on "
                f"cuda:{self.device}, where its first call was; keep the tensors of a group on one GPU of "
                "each rank",
                op=op,
            )


def gpu_of(group: PrivateGroup) -> CudaLanes | None:
    """The GPU side of a group; None until its ranks first moved tensors on GPUs."""
    found = group.attached(_KEY)
    assert found is None or isinstance(found, CudaLanes)
    return found


def attach_gpu(group: PrivateGroup, gpu: CudaLanes) -> None:
    group.attach(_KEY, gpu)


def connect_lanes(
    group: PrivateGroup,
    control: _C.GroupCore,
    lanes: Sequence[int],
    place: Place,
    call: tuple[int, int],
    deadline: float,
) -> None:
    """Makes the communicators of those `lanes` that have none, together with all ranks of the group, which do
    so within the same `call` (lane, ordinal).

    Raises MeshcastError or LayoutError, alike on all ranks, where they do not fit together;
    DeadlineExceededError, PeerLostError or AbortedError where a rank is missing, which ends the group.
    """
    gpu = gpu_of(group)
    known = gpu.lanes if gpu is not None else set()
    missing = [lane for lane in lanes if lane not in known]
    if not missing:
        return
    topic = f"gpu/{call[0]}/{call[1]}"
    offer = own_offer(place.device) if place.problem is None else GpuOffer(obstacle=str(place.problem))
    ids: list[str] = []
    if group.rank == group.ranks[0] and not offer.obstacle and not offer.no_nccl:
        try:
            ids = [_C.nccl_unique_id().hex() for _ in missing]
        except MeshcastError as error:
            offer = replace(offer, no_nccl=str(error))
    try:
        told = _gather(group, control, topic, json.dumps([offer.as_text(), ids]), deadline)
    except MeshcastError as error:
        control.abort(str(error))  # the ranks no longer count calls alike
        raise
    transport = choose_transport(
        {rank: GpuOffer.from_text(text) for rank, (text, _) in told.items()}, group.rank
    )
    if gpu is None:
        core = _C.GpuGroupCore(
            control, group.control, list(group.ranks), group.rank, group.name, place.device
        )
        gpu = CudaLanes(core, place.device, transport)
        attach_gpu(group, gpu)
    try:
        if gpu.transport == NCCL:
            for lane, text in zip(missing, told[group.ranks[0]][1], strict=True):
                gpu.core.connect(lane, bytes.fromhex(text), max(deadline - time.monotonic(), 1e-3))
                gpu.lanes.add(lane)
        else:
            _connect_ipc(group, control, gpu, missing, f"{topic}/{CUDA_IPC}", deadline)
    except MeshcastError as error:
        control.abort(str(error))
        raise
    log.info(
        "rank %d: GPUs of ranks %s connected over %s for lanes %s",
        group.rank,
        group.name,
        gpu.transport,
        missing,
    )


def _connect_ipc(
    group: PrivateGroup,
    control: _C.GroupCore,
    gpu: CudaLanes,
    lanes: Sequence[int],
    topic: str,
    deadline: float,
) -> None:
    """Every rank listens, tells where, and connects with all others, lane by lane."""
    meetings = [_C.IpcMeeting() for _ in lanes]
    addresses = json.dumps([meeting.address for meeting in meetings])
    told = _gather(group, control, topic, addresses, deadline)
    for number, (lane, meeting) in enumerate(zip(lanes, meetings, strict=True)):
        of_lane = [told[rank][number] for rank in group.ranks]
        gpu.core.connect_ipc(lane, meeting, of_lane, max(deadline - time.monotonic(), 1e-3))
        gpu.lanes.add(lane)


def _gather(
    group: PrivateGroup, control: _C.GroupCore, topic: str, mine: str, deadline: float
) -> dict[int, list[Any]]:
    """Posts what this rank says, a list as JSON, and returns what all of them said."""

    def check() -> None:
        cause = control.error() or group.posted_cause()
        if cause is not None:
            raise AbortedError(
                f"rank {group.rank}: group {group.name} was aborted while its GPUs were being connected: "
                f"{cause}",
                rank=group.rank,
                op="connect",
                phase="connect",
            )

    late = (
        f"rank {group.rank}: ranks {{missing}} did not come to connect their GPUs within {{elapsed}} s "
        "(stuck elsewhere, or dead)"
    )
    group.conversation.say(topic, mine)
    said = group.conversation.hear(topic, group.ranks, deadline, late, "connect", "connect", check)
    return {rank: json.loads(text) for rank, text in said.items()}
