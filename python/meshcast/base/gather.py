"""What the ranks of a group tell each other once, over torch's own collective, and who shares a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..errors import LayoutError, MeshcastError
from . import forks

__all__ = ["gather_facts", "ranks_by_host"]


def gather_facts(fact: tuple[Any, ...], group: dist.ProcessGroup | None) -> dict[int, Any]:
    """What every rank of the group (None: the default one) says, by global rank; a collective of them."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshcastError("no process group; call torch.distributed.init_process_group first")
    forks.check_group(group or dist.group.WORLD, "measure_topology")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise LayoutError(f"rank {dist.get_rank()} is not in the group of ranks {ranks}")
    facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(facts, fact, group)
    return dict(zip(ranks, facts, strict=True))


def ranks_by_host(identities: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Ranks by host, hosts by their lowest rank, from {rank: host_identity()}."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(identities):
        ranks_of.setdefault(identities[rank], []).append(rank)
    return [tuple(ranks) for ranks in ranks_of.values()]
