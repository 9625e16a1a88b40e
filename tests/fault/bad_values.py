"""Values that no argument should have, by name, so that a draw can be printed and made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Shard

__all__ = ["DTYPES", "NUMBERS", "PLACEMENTS", "SHARDS", "SHAPES", "TIMEOUTS", "WRONG", "spoiled"]

Values = Mapping[str, Callable[[], Any]]


class _Hostile:
    """Raises whatever it is asked."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no text for this")

    def __iter__(self) -> Any:
        raise RuntimeError("nothing to iterate over")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


WRONG: Values = {
    "a number": lambda: 3,
    "text": lambda: "text",
    "bytes": lambda: b"bytes",
    "an object": object,
    "a hostile object": _Hostile,
    "a set": lambda: {1, 2},
    "a mapping": lambda: {"a": 1},
    "a function": lambda: print,
    "a plain tensor": lambda: torch.zeros(2, 2),
    "a type": lambda: int,
    "an exception": lambda: ValueError("x"),
    "nested lists": lambda: [[[[[[[1]]]]]]],
    "nan": lambda: float("nan"),
}

NUMBERS: Values = {
    "huge": lambda: 2**70,
    "infinite": lambda: float("inf"),
    "nan": lambda: float("nan"),
    "negative": lambda: -1,
    "half": lambda: 0.5,
    "complex": lambda: 1j,
    "text": lambda: "7",
    "truth": lambda: True,
    "list": lambda: [1],
}

TIMEOUTS: Values = {
    "text": lambda: "soon",
    "infinite": lambda: float("inf"),
    "nan": lambda: float("nan"),
    "huge": lambda: 10**400,
    "1e300": lambda: 1e300,
    "zero": lambda: 0,
    "negative": lambda: -1.0,
    "list": lambda: [1.0],
    "truth": lambda: True,
    "tensor": lambda: torch.ones(2),
    "hostile": _Hostile,
}

DTYPES: Values = {
    "text": lambda: "float32",
    "type": lambda: float,
    "number": lambda: 6,
    "hostile": _Hostile,
    **{
        name: lambda name=name: getattr(torch, name)
        for name in ("int4", "uint3", "bits8", "bits16", "quint8", "qint32")
    },
}

PLACEMENTS: Values = {
    "none": lambda: None,
    "empty": list,
    "too many": lambda: [Shard(0)] * 4,
    "text": lambda: "S0",
    "numbers": lambda: [0],
    "beyond": lambda: [Shard(7)],
    "far beyond": lambda: [Shard(-(2**40))],
    "partial": lambda: [Partial()],
    "odd partial": lambda: [Partial("median")],
    "empty generator": lambda: (p for p in ()),
    "generator that raises": lambda: (1 / 0 for _ in range(1)),
    "hostile": _Hostile,
}

SHAPES: Values = {
    "none": lambda: None,
    "text": lambda: "66",
    "number": lambda: 36,
    "negative": lambda: (6, -6),
    "huge": lambda: (2**62, 2**62),
    "more than memory": lambda: (2**40, 6),
    "floats": lambda: (6.0, 6.0),
    "nine dimensions": lambda: (1,) * 9,
    "other": lambda: (5, 6),
    "unhashable": lambda: [[6], [6]],
    "hostile": _Hostile,
}


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.element_size())
    return tensor


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


SHARDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "meta": lambda t: t.to("meta"),
    "fake": _fake,
    "freed": _freed,
    "cut": _cut,
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "one dimension more": lambda t: t[None],
    "scalar": lambda t: t.sum(),
    "another type": lambda t: t.to(torch.int16),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}


def spoiled(x: DTensor, how: str) -> DTensor:
    """The same with another local tensor."""
    x._local_tensor = SHARDS[how](x._local_tensor.detach().clone())
    return x
