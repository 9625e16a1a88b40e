"""JSON forms of what the ranks of a pipeline tell each other."""

from __future__ import annotations

from typing import Any

import torch

from meshcast.base.checks import dtype_name
from meshcast.base.json_reader import Reader
from meshcast.layout import Layout
from meshcast.pipelining.shapes import LocalValue

__all__ = ["decode_value", "encode_value"]


def encode_value(local: LocalValue, layout: Layout) -> dict[str, Any]:
    """A local output and the layout it is a shard of."""
    return {
        "shape": list(local.shape),
        "dtype": dtype_name(local.dtype),
        "requires_grad": local.requires_grad,
        "layout": layout.to_wire(),
    }


def decode_value(text: dict[str, Any]) -> tuple[LocalValue, Layout]:
    dtype = getattr(torch, text["dtype"])
    layout = Layout.from_wire(Reader(text["layout"], "layout"))
    return LocalValue(tuple(text["shape"]), dtype, text["requires_grad"]), layout
