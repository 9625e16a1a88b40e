"""JSON forms of what the ranks of a pipeline tell each other."""

from __future__ import annotations

from typing import Any

import torch

from meshcast.base.checks import Reader, dtype_name
from meshcast.layout import Layout
from meshcast.pipelining.shapes import LocalValue, SentDTensor

__all__ = ["decode_value", "encode_value"]

_RANKS = torch.tensor([0])


def encode_value(local: LocalValue, layout: Layout) -> dict[str, Any]:
    """A local output and the layout it is a shard of."""
    return {
        "shape": list(local.shape),
        "dtype": dtype_name(local.dtype),
        "requires_grad": local.requires_grad,
        "layout": layout.to_wire(),
        "sent": None if local.sent is None else _encode(local.sent),
    }


def decode_value(text: dict[str, Any]) -> tuple[LocalValue, Layout]:
    dtype = getattr(torch, text["dtype"])
    layout = Layout.from_wire(Reader(text["layout"], "layout"))
    sent = None if text["sent"] is None else _decode(text["sent"])
    return LocalValue(tuple(text["shape"]), dtype, text["requires_grad"], None, sent), layout


def _encode(sent: SentDTensor) -> dict[str, Any]:
    # A layout of as many ranks has the placements' wire form.
    placements = Layout(_RANKS.reshape([1] * len(sent.placements)), sent.placements).to_wire()
    return {"placements": placements, "shape": sent.shape, "names": sent.names, "mesh": sent.layout}


def _decode(text: dict[str, Any]) -> SentDTensor:
    placements = Layout.from_wire(Reader(text["placements"], "placements")).placements
    mesh = None if text["mesh"] is None else tuple(text["mesh"])
    return SentDTensor(placements, tuple(text["shape"]), tuple(text["names"]), mesh)
