"""Transfers between GPUs: which transport connects them, its communicators, and the medium that uses these.

The work of a transfer is enqueued behind the caller's current stream. Waiting for it orders the stream that
is current then, and does not block the host; over CUDA IPC only until the other ranks have made the same
call."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from .. import _C
from ..base import settings
from ..base.observe import log
from ..base.settings import host_identity
from ..base.wire import pack, unpack
from ..errors import AbortedError, Caller, LayoutError, MeshcastError
from ..groups.private import PrivateGroup
from ..topology import figures_slot
from .medium import Medium, Shards, Started, Statistics, Types, types_text

__all__ = [
    "AUTO",
    "CUDA_IPC",
    "CudaLanes",
    "GpuMedium",
    "GpuOffer",
    "NCCL",
    "SHARING_SWITCH",
    "TRANSPORT_SWITCH",
    "attach_gpu",
    "blocks_of",
    "choose_transport",
    "connect_lanes",
    "gpu_of",
    "own_offer",
    "own_proof",
    "staging",
    "staging_of",
]


T = TypeVar("T")

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
    may_share: NCCL is set to let ranks share a GPU; wants: the transport asked for, "auto", "nccl" or
    "cuda_ipc"; reaches: uuids of the other GPUs whose memory it can read; blocks: multiprocessors on which no
    communicator of its process counts; link_rate: bytes/s of its NVLinks, 0 where unknown; free, staging:
    bytes of its memory that are free, and that its process may use as staging (0: a part of the former).
    no_nccl, no_ipc: why it cannot use that transport. obstacle: why this rank cannot take part at all, the
    rest is then empty."""

    host: str = ""
    device: int = -1
    uuid: str = ""
    gpu: str = ""
    nccl: str = ""
    may_share: bool = False
    wants: str = AUTO
    reaches: tuple[str, ...] = ()
    blocks: int = 0
    link_rate: int = 0
    free: int = 0
    staging: int = 0
    no_nccl: str = ""
    no_ipc: str = ""
    obstacle: str = ""


def several_gpus(devices: Sequence[int]) -> str:
    """Returns the error text for tensors of one call on several GPUs of a rank."""
    return (
        f"the tensors of one call are on several GPUs of this rank, {sorted(devices)}; results are made on "
        "the current one: call torch.cuda.set_device with that of the source first"
    )


def own_offer(device: int) -> GpuOffer:
    """Returns the description of GPU `device` that this process gives to others."""
    try:
        properties = torch.cuda.get_device_properties(device)
        nccl, no_nccl = _own_nccl()
        wanted = settings.CUDA_TRANSPORT.choice()
        return GpuOffer(
            host=host_identity(),
            device=device,
            uuid=str(properties.uuid),
            gpu=properties.name,
            nccl=nccl,
            may_share=os.environ.get(SHARING_SWITCH) == "1",
            wants=wanted,
            reaches=_reachable(device),
            blocks=_C.nccl_blocks_left(device),
            link_rate=_nvlink_rate(str(properties.uuid), properties.major),
            free=torch.cuda.mem_get_info(device)[0],
            staging=settings.CUDA_STAGING_MB.integer() << 20,
            no_nccl=no_nccl,
            no_ipc="" if wanted == NCCL else _C.cuda_ipc_obstacle(device),  # it takes memory of the GPU
        )
    except Exception as error:  # of CUDA; the other ranks must learn of it
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


_MOST_NVLINKS = 18


def _nvlink_rate(uuid: str, major: int) -> int:
    """Bytes/s of all NVLinks of a GPU together, in one direction, as many as NVML says are active; 0 where it
    is missing or knows none. major: of the compute capability, by which a link has its rate."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        gpu, active, links = ctypes.c_void_p(), ctypes.c_uint(), 0
        if nvml.nvmlInit_v2() != 0:
            return 0
        try:
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(gpu)) != 0:
                return 0
            for link in range(_MOST_NVLINKS):
                state = nvml.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(active))
                links += state == 0 and active.value == 1
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one that lacks a function
        return 0
    return int(links * (20e9 if major < 7 else 25e9 if major < 10 else 50e9))


_OP = "connect"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_PROOF_SECONDS = 10.0  # ranks that share a GPU take turns on it
_NAMESPACES = (
    "containers of one host need one IPC and one PID namespace for it (docker run --ipc=host --pid=host)"
)
_SHARING = (2, 30, 3)  # the first NCCL that can serve several ranks on one GPU


def choose_transport(offers: Mapping[int, GpuOffer], rank: int) -> str:
    """The transport that connects the GPUs of these ranks: `CUDA_IPC` where that is asked for, or where ranks
    share a GPU; else `NCCL`.

    Raises unless there is one that can: MeshcastError where a rank cannot take part, ranks ask for different
    things, or NCCL differs; LayoutError where the GPUs are not where it needs them.
    """
    for other, offer in sorted(offers.items()):
        if offer.obstacle:
            raise _unfit(MeshcastError, rank, other, f"rank {other} cannot use its GPU: {offer.obstacle}")
    first = min(offers)
    for other, offer in sorted(offers.items()):
        if offer.wants != offers[first].wants:
            text = (
                f"rank {first} has {TRANSPORT_SWITCH}={offers[first].wants}, rank {other} has "
                f"{TRANSPORT_SWITCH}={offer.wants}: set it to the same on all ranks"
            )
            raise _unfit(MeshcastError, rank, other, text)
    wanted = offers[first].wants
    obstacle = _ipc_obstacle(offers)
    if wanted == CUDA_IPC:
        if obstacle is not None:
            other, why = obstacle
            text = f"{TRANSPORT_SWITCH}=cuda_ipc cannot serve these ranks: {why}; or set it to auto"
            raise _unfit(LayoutError, rank, other, text)
        return CUDA_IPC
    if wanted == AUTO and obstacle is None and _sharing(offers):
        return CUDA_IPC
    _refuse_nccl(offers, rank, "" if obstacle is None else obstacle[1])
    return NCCL


# Of a lane at most, and at least; of a process at least: bytes.
_LANE_STAGING, _LEAST_LANE_STAGING, _LEAST_STAGING = 256 << 20, 8 << 20, 512 << 20
_MOST_BLOCKS = 16  # that drive a few NVLinks; not measured
_LANES = 8  # that find room at a time


def staging_of(offers: Mapping[int, GpuOffer]) -> tuple[int, dict[int, int]]:
    """Bytes of staging: the goal for each lane, by which all ranks cut plans into rounds, and the limit of
    each rank. A process that names none may use a quarter of what is free on its GPU, which it shares with
    the other ranks there."""
    sharing = Counter((offer.host, offer.uuid) for offer in offers.values())
    limits = {
        rank: offer.staging or max(offer.free // 4 // sharing[offer.host, offer.uuid], _LEAST_STAGING)
        for rank, offer in offers.items()
    }
    goal = min(limits.values()) // _LANES
    return min(max(goal, _LEAST_LANE_STAGING), _LANE_STAGING), limits


def blocks_of(offers: Mapping[int, GpuOffer], lanes: int) -> list[int]:
    """The most blocks of a kernel of NCCL, for each of so many new communicators: powers of two, as NCCL
    rounds them, so that the kernels of all communicators of a process fit on its GPU at once. Each takes at
    most half of what is left."""
    left = min(offer.blocks for offer in offers.values())
    found = []
    for _ in range(lanes):
        half = max(left // 2, 1)
        found.append(min(1 << half.bit_length() - 1, _MOST_BLOCKS))
        left -= found[-1]
    if left < 0:
        log.warning(
            "more communicators of NCCL than fit on a GPU at once: calls of several groups may wait for one "
            "another unless all ranks make them in one order; use fewer groups"
        )
    return found


def staging(device: int | None = None) -> dict[str, int]:
    """Figures of this process's staging for CUDA IPC on a GPU, by default the current one; that of NCCL is in
    `torch.cuda.memory_stats`.

    In bytes: `limit`, `in_use`, `spare` (which serves the next call, or returns to the GPU) and `peak` (of
    `in_use`). Counts: `allocations` of the GPU, and blocks that were `returned` to it.
    """
    return dict(_C.cuda_staging(torch.cuda.current_device() if device is None else device))


def _ipc_obstacle(offers: Mapping[int, GpuOffer]) -> tuple[int, str] | None:
    """Why CUDA IPC cannot serve these ranks, with what to do, and the rank that shows it."""
    first = min(offers)
    for other, offer in sorted(offers.items()):
        if offer.host != offers[first].host:
            return other, f"ranks {first} and {other} are on two hosts: use NCCL between hosts"
        if offer.no_ipc:
            return other, f"on rank {other}, {offer.no_ipc}"
    for one, offer in sorted(offers.items()):
        for other, peer in sorted(offers.items()):
            if peer.uuid != offer.uuid and peer.uuid not in offer.reaches:
                return other, (
                    f"the GPU of rank {one}, {offer.uuid}, cannot read the memory of rank {other}'s, "
                    f"{peer.uuid}: let CUDA_VISIBLE_DEVICES of every rank name all GPUs of the group, choose "
                    "one by torch.cuda.set_device, and look at `nvidia-smi topo -p2p r`"
                )
    return None


def _sharing(offers: Mapping[int, GpuOffer]) -> tuple[int, int] | None:
    """The first two ranks on one GPU."""
    owners: dict[tuple[str, str], int] = {}
    for other, offer in sorted(offers.items()):
        owner = owners.setdefault((offer.host, offer.uuid), other)
        if owner != other:
            return owner, other
    return None


def _refuse_nccl(offers: Mapping[int, GpuOffer], rank: int, no_ipc: str) -> None:
    """Raises unless NCCL can connect these ranks. no_ipc: why CUDA IPC cannot; empty: NCCL is asked for."""
    first = min(offers)
    for other, offer in sorted(offers.items()):
        if offer.no_nccl:
            raise _unfit(MeshcastError, rank, other, f"rank {other} cannot use its GPU: {offer.no_nccl}")
        if _numbers(offer.nccl)[:2] != _numbers(offers[first].nccl)[:2]:
            text = (
                f"rank {first} has NCCL {offers[first].nccl}, rank {other} has NCCL "
                f"{offer.nccl}: install one version everywhere"
            )
            raise _unfit(MeshcastError, rank, other, text)
    pair = _sharing(offers)
    may_share = all(offer.may_share and _numbers(offer.nccl) >= _SHARING for offer in offers.values())
    if pair is None or may_share:
        return
    owner, other = pair
    offer = offers[other]
    needed = ".".join(map(str, _SHARING))
    instead = (
        f"cuda_ipc cannot: {no_ipc}" if no_ipc else f"so does cuda_ipc, which {TRANSPORT_SWITCH}=nccl forbids"
    )
    text = (
        f"ranks {owner} and {other} both use GPU {offer.uuid} ({offer.gpu}; cuda:"
        f"{offers[owner].device} and cuda:{offer.device}): give each rank its own, for example "
        f"torch.cuda.set_device(local rank) before the first call; NCCL {needed} or newer with "
        f"{SHARING_SWITCH}=1 on all ranks lets them share, here it is {offer.nccl}; {instead}"
    )
    raise _unfit(LayoutError, rank, other, text)


def _unfit(kind: type[MeshcastError], rank: int, peer: int, text: str) -> MeshcastError:
    return Caller(_OP, rank, "connect").error(kind, text, peer=peer)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


_KEY = "gpu"  # among what is attached to a group


class CudaLanes:
    """The communicators of a group by lane, all on GPU `device` of this process. Only commands touch them."""

    def __init__(
        self,
        core: Any,
        device: int,
        transport: str,
        staging_bytes: int,
        link_rate: int,
        round_ns: int = 0,
    ) -> None:
        self.core = core
        self.device = device
        self.transport = transport  # "nccl" or "cuda_ipc": all lanes have one
        self.staging_bytes = staging_bytes  # goal for each lane
        self.link_rate = link_rate  # bytes/s between GPUs of a host, 0: unknown
        self.round_ns = round_ns  # of a round apart from its bytes, 0: not measured
        self.lanes: set[int] = set()

    def abort(self, reason: str) -> None:
        self.core.abort(reason)

    def close(self) -> None:
        self.core.shutdown()

    def check_device(self, device: int) -> None:
        """Raises LayoutError for tensors on another GPU than that of the communicators."""
        if device != self.device:
            raise LayoutError(
                f"the tensors are on cuda:{device}, but this group's communicators are on "
                f"cuda:{self.device}, where its first call was; keep the tensors of a group on one GPU of "
                "each rank"
            )


def gpu_of(group: PrivateGroup) -> CudaLanes | None:
    """The GPU side of a group; None until its ranks first moved tensors on GPUs."""
    found = group.attached(_KEY)
    assert found is None or isinstance(found, CudaLanes)
    return found


def attach_gpu(group: PrivateGroup, gpu: CudaLanes) -> None:
    group.attach(_KEY, gpu)


class _Part(NamedTuple):
    """A rank's part in connecting GPUs. ids: of NCCL, by lane that is missing; the first rank's
    count."""

    offer: GpuOffer
    ids: tuple[bytes, ...]


class _Proof(NamedTuple):
    """The card of a rank, for others to try. problem: why it has none."""

    card: bytes
    problem: str = ""


class _Tried(NamedTuple):
    """Why a rank cannot open what another has shown; empty where it can open all of it."""

    problem: str = ""


class _Addresses(NamedTuple):
    """The sockets at which a rank awaits the others, by lane."""

    of_lanes: tuple[str, ...]


def connect_lanes(
    group: PrivateGroup,
    control: _C.GroupCore,
    lanes: Sequence[int],
    place: _Mark,
    call: tuple[int, int],
    deadline: float,
) -> None:
    """Makes the communicators of those `lanes` that have none, together with all ranks of the group, which do
    so within the same `call` (lane, ordinal).

    Raises MeshcastError or LayoutError, on all ranks, where they do not fit together;
    DeadlineExceededError, PeerLostError or AbortedError where a rank is missing, which ends the group.
    """
    gpu = gpu_of(group)
    known = gpu.lanes if gpu is not None else set()
    missing = [lane for lane in lanes if lane not in known]
    if not missing:
        return
    topic = f"gpu/{call[0]}/{call[1]}"
    offer = own_offer(place.device) if place.problem is None else GpuOffer(obstacle=str(place.problem))
    ids: list[bytes] = []
    if group.rank == group.ranks[0] and not offer.obstacle and not offer.no_nccl:
        try:
            ids = [_C.nccl_unique_id() for _ in missing]
        except MeshcastError as error:
            offer = replace(offer, no_nccl=str(error))
    gathered = _gather(group, control, topic, _Part(offer, tuple(ids)), deadline)
    offers = {rank: said.offer for rank, said in gathered.items()}
    transport = choose_transport(offers, group.rank)
    if transport == NCCL and os.environ.get(_QUEUES) == "1":
        log.warning(
            "rank %d: %s=1 puts all streams into one queue: calls of several groups and lanes over NCCL wait "
            "for one another unless all ranks make them in one order",
            group.rank,
            _QUEUES,
        )
    if gpu is None:
        if transport == CUDA_IPC:
            offers = _tried(group, control, offers, f"{topic}/proof", deadline)
            transport = choose_transport(offers, group.rank)
        core = _C.GpuGroupCore(
            control, group.control, list(group.ranks), group.rank, group.name, place.device
        )
        goal, limits = staging_of(offers)
        if offers[group.rank].staging or not _C.cuda_staging(place.device)["limit"]:
            _C.limit_cuda_staging(place.device, limits[group.rank])
        gpu = CudaLanes(core, place.device, transport, goal, *_costs(group, offers, transport))
        attach_gpu(group, gpu)
    try:
        if gpu.transport == NCCL:
            blocks = blocks_of(offers, len(missing))
            for lane, unique, most in zip(missing, gathered[group.ranks[0]].ids, blocks, strict=True):
                left = max(deadline - time.monotonic(), 1e-3)
                gpu.core.connect(lane, unique, most, gpu.staging_bytes, gpu.link_rate, gpu.round_ns, left)
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


def _costs(group: PrivateGroup, offers: Mapping[int, GpuOffer], transport: str) -> tuple[int, int]:
    """The rate of links inside a host and the cost of a round, by which all ranks cut plans into rounds: as
    measured, or else the rate that NVML reports, and 0 for what C++ guesses."""
    slot = figures_slot(transport, _sharing(offers) is not None)
    figures = group.figures
    if figures is not None and figures.slot == slot:
        return figures.local_rate, figures.round_ns
    if figures is not None:
        log.warning(
            "rank %d: calls between the GPUs of ranks %s are planned with figures for %s, but go over %s: "
            'call meshcast.measure_topology(device="cuda") on them, or give a topology',
            group.rank,
            group.name,
            figures.slot,
            slot,
        )
    return (min(offer.link_rate for offer in offers.values()) if transport == NCCL else 0), 0


def _tried(
    group: PrivateGroup,
    control: _C.GroupCore,
    offers: Mapping[int, GpuOffer],
    topic: str,
    deadline: float,
) -> dict[int, GpuOffer]:
    """The offers after every rank has tried to open memory and an event of every other. A driver exports both
    in any container, but opens only what belongs to its own namespaces."""
    proof, mine = own_proof(offers[group.rank].device)
    shown = _gather(group, control, topic, mine, deadline)
    problem = mine.problem
    for rank, (card, theirs) in sorted(shown.items()):
        if problem or theirs or rank == group.rank:
            continue
        found = proof.check(card, min(max(deadline - time.monotonic(), 1e-3), _PROOF_SECONDS))
        if found:
            problem = f"the GPU memory of rank {rank} cannot be opened: {found}; {_NAMESPACES}"
    # Each keeps its proof until all have tried it.
    verdicts = _gather(group, control, f"{topic}/found", _Tried(problem), deadline)
    changed = {
        rank: replace(offers[rank], no_ipc=said.problem) for rank, said in verdicts.items() if said.problem
    }
    for rank, offer in sorted(changed.items())[:1]:
        log.warning(
            "rank %d: CUDA IPC cannot connect the GPUs of ranks %s: on rank %d, %s",
            group.rank,
            group.name,
            rank,
            offer.no_ipc,
        )
    return {**offers, **changed}


def own_proof(device: int) -> tuple[Any, _Proof]:
    """Memory of GPU `device` that other processes can try to open, and its card."""
    try:
        proof = _C.IpcProof(device)
        return proof, _Proof(proof.card)
    except Exception as error:  # of CUDA; the other ranks must learn of it
        return None, _Proof(b"", str(error))


def _connect_ipc(
    group: PrivateGroup,
    control: _C.GroupCore,
    gpu: CudaLanes,
    lanes: Sequence[int],
    topic: str,
    deadline: float,
) -> None:
    """Listens, publishes the address, and connects with all others, lane by lane."""
    meetings = [_C.IpcMeeting() for _ in lanes]
    addresses = _Addresses(tuple(meeting.address for meeting in meetings))
    gathered = _gather(group, control, topic, addresses, deadline)
    for number, (lane, meeting) in enumerate(zip(lanes, meetings, strict=True)):
        of_lane = [gathered[rank].of_lanes[number] for rank in group.ranks]
        left = max(deadline - time.monotonic(), 1e-3)
        gpu.core.connect_ipc(lane, meeting, of_lane, gpu.staging_bytes, gpu.link_rate, gpu.round_ns, left)
        gpu.lanes.add(lane)


def _gather(group: PrivateGroup, control: _C.GroupCore, topic: str, mine: T, deadline: float) -> dict[int, T]:
    """Posts what this rank says, and returns what all said. Ends the group where a rank is missing."""

    def check() -> None:
        cause = control.error() or group.posted_cause()
        if cause is not None:
            text = f"group {group.name} was aborted while its GPUs were being connected: {cause}"
            raise Caller(_OP, group.rank, "connect").error(AbortedError, text)

    late = (
        f"rank {group.rank}: ranks {{missing}} did not come to connect their GPUs within {{elapsed}} s "
        "(stuck elsewhere, or dead)"
    )
    try:
        group.conversation.say(topic, pack(mine))
        said = group.conversation.hear(topic, group.ranks, deadline, late, "connect", "connect", check)
    except MeshcastError as error:
        control.abort(str(error))  # the ranks no longer count calls the same way
        raise
    return {rank: unpack(type(mine), text) for rank, text in said.items()}


class GpuMedium(Medium):
    """Tensors on GPUs, one GPU per rank. lanes: that need communicators, the transfer's own first. types: of
    the tensors on the way there and back, see casts.types_of. hop_by_hop: each message has a round of its
    own, as measure_topology wants it."""

    by_host = False

    def __init__(
        self,
        group: PrivateGroup,
        lanes: tuple[int, ...],
        types: tuple[tuple[Types, ...], tuple[Types, ...]],
        *,
        hop_by_hop: bool = False,
    ) -> None:
        self._group, self._lanes, self._types = group, lanes, types
        self._hop_by_hop = hop_by_hop

    def check(self, shards: Shards) -> None:
        gpu = gpu_of(self._group)
        if gpu is not None:
            for shard in shards:
                if shard is not None:
                    gpu.check_device(shard.device.index)
        if torch.cuda.is_current_stream_capturing():
            raise LayoutError(CAPTURED)

    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:  # noqa: ARG002
        # In the caller's thread: the transfer comes behind the current work of its stream, even if it is
        # started much later.
        call.brought = _Mark((*src, *dst))
        return src, dst

    def ready(self, call: _C.MediumCall) -> bool:  # noqa: ARG002
        gpu = gpu_of(self._group)
        return gpu is not None and gpu.lanes.issuperset(self._lanes)

    def connect(self, core: _C.GroupCore, call: _C.MediumCall, ordinal: int) -> None:
        number = (self._lanes[0], ordinal)
        connect_lanes(self._group, core, self._lanes, call.brought, number, call.deadline)

    def start(
        self,
        core: _C.GroupCore,  # noqa: ARG002  the GPU's own core moves them
        call: _C.MediumCall,
        agreed: _C.AgreedPlan,
        **arguments: Any,
    ) -> Started:
        mark, gpu = call.brought, gpu_of(self._group)
        if mark.problem is not None:
            raise MeshcastError(str(mark.problem)) from mark.problem
        if gpu is None:
            raise MeshcastError("the call itself has failed")
        gpu.check_device(mark.device)
        gpu_core = gpu.core  # also after the group was closed
        types = self._types[arguments["reverse"]]
        work = gpu_core.start(
            agreed, types=types, after=mark.event.cuda_event, hop_by_hop=self._hop_by_hop, **arguments
        )
        return work, Statistics(work, gpu_core)

    def text(self) -> str:
        forth, back = (types_text(types) for types in self._types)
        casts = (f"; {forth}" if forth else "") + (f"; gradient {back}" if back else "")
        return f"; on cuda{casts}"


class _Mark:
    """The GPU that a call is on, and an event behind what its caller's stream held. problem: why there is
    none."""

    def __init__(self, shards: Sequence[torch.Tensor | None]) -> None:
        self.device = -1
        self.problem: Exception | None = None
        try:
            devices = sorted({shard.device.index for shard in shards if shard is not None})
            if len(devices) > 1:
                raise LayoutError(several_gpus(devices))
            self.device = devices[0] if devices else torch.cuda.current_device()
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(self.device))
        except Exception as error:  # of CUDA; raised where the call is counted, and the others are notified
            self.problem = error
