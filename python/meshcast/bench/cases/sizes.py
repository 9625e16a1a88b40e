"""The size of the message: one sender and two hosts of two replicas, from 64 KiB to 64 MiB. What matters is
bytes over rate: 64 MiB on links of 250 Mbit/s are as 1 GiB on links of 4 Gbit/s."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from meshcast.layout import Layout

from .case import RANKS_PER_HOST, Case

_SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def _text(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"


def _case(nbytes: int) -> Case:
    rows = [[host * RANKS_PER_HOST, host * RANKS_PER_HOST + 1] for host in (1, 2)]
    src, dst = Layout([0], [Replicate()]), Layout(rows, [Replicate(), Replicate()])
    return Case(_text(nbytes), "sizes", (nbytes // 4,), src, dst, "1 to 2x2 replicas", fixed=True)


CASES = [_case(nbytes) for nbytes in _SIZES]
