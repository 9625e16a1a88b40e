"""JSON forms of what the ranks of a pipeline tell each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from meshcast.errors import LayoutError
from meshcast.layout import Layout
from meshcast.pipelining.shapes import LocalValue

__all__ = ["decode_layout", "decode_value", "encode_layout", "encode_value"]


def encode_layout(layout: Layout) -> dict[str, Any]:
    return {
        "shape": list(layout.mesh_shape),
        "ranks": list(layout.ranks),
        "placements": [_encode_placement(placement) for placement in layout.placements],
    }


def decode_layout(text: dict[str, Any]) -> Layout:
    mesh = torch.tensor(text["ranks"]).reshape(text["shape"])
    return Layout(mesh, [_decode_placement(each) for each in text["placements"]])


def _encode_placement(placement: Placement) -> list[Any]:
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    if isinstance(placement, Partial):
        return ["partial", placement.reduce_op]
    if isinstance(placement, Replicate):
        return ["replicate"]
    raise LayoutError(
        f"placement {placement}: a value of a pipeline can be Shard, Replicate, Partial or _StridedShard"
    )


def _decode_placement(text: list[Any]) -> Placement:
    kind, *fields = text
    if kind == "strided":
        return _StridedShard(fields[0], split_factor=fields[1])
    if kind == "shard":
        return Shard(fields[0])
    if kind == "partial":
        return Partial(fields[0])
    return Replicate()


def encode_value(local: LocalValue, layout: Layout) -> dict[str, Any]:
    """A local output and the layout it is a shard of."""
    return {
        "shape": list(local.shape),
        "dtype": str(local.dtype).removeprefix("torch."),
        "requires_grad": local.requires_grad,
        "layout": encode_layout(layout),
    }


def decode_value(text: dict[str, Any]) -> tuple[LocalValue, Layout]:
    dtype = getattr(torch, text["dtype"])
    return LocalValue(tuple(text["shape"]), dtype, text["requires_grad"]), decode_layout(text["layout"])
