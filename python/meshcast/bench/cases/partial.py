"""Partial sources: values that are still to be added up, as gradients are, on their way to another mesh."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshcast.layout import Layout

from .case import Case

_SHAPE = (1 << 14, 1 << 14)
_EIGHT = [[0, 1, 2, 3], [4, 5, 6, 7]]
_OTHERS = [[8, 9, 10, 11], [12, 13, 14, 15]]
_SUM = Partial("sum")

_TABLE: list[tuple[str, list[Placement], list[Placement], str]] = [
    ("sum over hosts to shards", [_SUM, Shard(0)], [Replicate(), Shard(0)], "2x4:+S0 to 2x4@8:RS0"),
    ("sum over hosts to replicas", [_SUM, Shard(0)], [Replicate(), Replicate()], "2x4:+S0 to 2x4@8:RR"),
    ("sum inside hosts to shards", [Shard(0), _SUM], [Shard(0), Shard(1)], "2x4:S0+ to 2x4@8:S0S1"),
]


def _case(name: str, src: list[Placement], dst: list[Placement], notation: str) -> Case:
    return Case(name, "partial", _SHAPE, Layout(_EIGHT, src), Layout(_OTHERS, dst), notation)


CASES = [_case(*row) for row in _TABLE]
