"""Facts that the ranks of a group exchange once, over torch's own collective; ranks that share a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ..errors import LayoutError, MeshcastError, PlanMismatchError
from . import forks
from .checks import shown

__all__ = ["gather_facts", "ranks_by_host"]


def gather_facts(
    fact: tuple[Any, ...], group: dist.ProcessGroup | None, check: Callable[[], Any] = lambda: None
) -> dict[int, Any]:
    """Returns what every rank of `group` (None: the default one) says, by global rank; a collective of them.

    check(): of this rank's arguments. Where it raises, here or on another rank, all raise.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise MeshcastError("no process group; call torch.distributed.init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise LayoutError(f"group {shown(group)}: expected a process group that this rank belongs to")
    forks.check_group(group or dist.group.WORLD, "measure_topology")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise LayoutError(f"rank {dist.get_rank()} is not in the group of ranks {ranks}")
    refused: MeshcastError | None = None
    try:
        check()
    except MeshcastError as error:
        refused = error
    facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(facts, (fact, None if refused is None else str(refused)), group)
    if refused is not None:
        raise refused
    for rank, (_, why) in zip(ranks, facts, strict=True):
        if why is not None:
            raise PlanMismatchError(f"rank {rank} refused its arguments: {why}", peer=rank)
    return {rank: said for rank, (said, _) in zip(ranks, facts, strict=True)}


def ranks_by_host(identities: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Ranks by host, hosts by their lowest rank, from {rank: host_identity()}."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(identities):
        ranks_of.setdefault(identities[rank], []).append(rank)
    return [tuple(ranks) for ranks in ranks_of.values()]
