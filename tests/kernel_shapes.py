"""Thirty boxes inside tensors, from long runs to lone elements, to test and to measure the kernels with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """A box of a tensor of shape `full`, whose dimensions are then put in the order `order`."""

    name: str
    full: tuple[int, ...]
    box: tuple[slice, ...]
    order: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.box].permute(self.order)


def _rows(name: str, rows: int, width: int, taken: int, start: int = 0) -> Box:
    return Box(name, (rows, width), (slice(None), slice(start, start + taken)), (0, 1))


# Runs are given in elements. With float32: 16 B to 64 KiB.
RUNS = [
    _rows(f"runs of {n}", max(2**22 // (2 * n), 1), 2 * n, n)
    for n in (4, 8, 16, 32, 64, 128, 512, 4096, 16384)
]
ODD = [
    _rows("odd start", 4096, 1024, 512, start=1),
    _rows("odd row", 4096, 1023, 512),
    _rows("odd run", 4096, 1024, 511),
    _rows("odd in all", 4096, 1023, 509, start=3),
    _rows("short odd", 65536, 37, 5, start=2),
    _rows("single column", 65536, 16, 1, start=3),
    _rows("one row", 1, 1 << 20, 1 << 19, start=7),
]
MANY_DIMS = [
    Box("3-d middle", (64, 64, 256), (slice(3, 60), slice(5, 50), slice(0, 256)), (0, 1, 2)),
    Box("3-d inner", (64, 64, 256), (slice(None), slice(None), slice(32, 96)), (0, 1, 2)),
    Box("4-d image", (16, 32, 64, 64), (slice(None), slice(4, 20), slice(1, 63), slice(1, 63)), (0, 1, 2, 3)),
    Box(
        "5-d",
        (8, 8, 8, 8, 64),
        (slice(1, 7), slice(None), slice(2, 5), slice(None), slice(16, 48)),
        (0, 1, 2, 3, 4),
    ),
    Box("6-d", (4, 6, 4, 6, 4, 32), (slice(1, 3),) * 5 + (slice(None),), (0, 1, 2, 3, 4, 5)),
    Box("8-d", (3, 4, 3, 4, 3, 4, 3, 8), (slice(1, 3),) * 7 + (slice(2, 6),), (0, 1, 2, 3, 4, 5, 6, 7)),
    Box("steps", (512, 512), (slice(0, 512, 2), slice(1, 512, 3)), (0, 1)),
]
TURNED = [
    Box("transposed", (2048, 2048), (slice(None), slice(None)), (1, 0)),
    Box("transposed part", (2048, 2048), (slice(0, 1000), slice(24, 1400)), (1, 0)),
    Box("batched transposed", (32, 128, 256), (slice(None), slice(None), slice(None)), (0, 2, 1)),
    Box("channels last", (16, 64, 32, 32), (slice(None),) * 4, (0, 2, 3, 1)),
    Box("heads", (8, 512, 16, 64), (slice(None),) * 4, (0, 2, 1, 3)),
    Box("reversed", (16, 32, 24, 40), (slice(None),) * 4, (3, 2, 1, 0)),
]
EMPTY = [Box("empty", (64, 64), (slice(5, 5), slice(None)), (0, 1))]
ALL = RUNS + ODD + MANY_DIMS + TURNED + EMPTY
