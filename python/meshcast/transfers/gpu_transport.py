"""Which transport connects the GPUs of a group, NCCL or CUDA IPC, and what speaks against either.

Every rank reads what all have said (gpu_offer.py) and judges by the same rules, so all of them go on or all
raise alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import LayoutError, MeshcastError
from .gpu_offer import AUTO, CUDA_IPC, NCCL, SHARING_SWITCH, TRANSPORT_SWITCH, GpuOffer

__all__ = ["choose_transport"]

_OP = "connect"
_SHARING = (2, 30, 3)  # the first NCCL that can serve several ranks on one GPU


def choose_transport(offers: Mapping[int, GpuOffer], rank: int) -> str:
    """The transport that connects the GPUs of these ranks: `CUDA_IPC` where that is asked for, or where ranks
    share a GPU; else `NCCL`.

    Raises unless there is one that can: MeshcastError where a rank cannot take part, ranks ask for unlike
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
                f"{TRANSPORT_SWITCH}={offer.wants}: set it alike on all ranks"
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
    return kind(f"rank {rank}: {text}", rank=rank, peer=peer, op=_OP, phase="connect")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
