"""One sender, several receivers that each need everything: arXiv 2211.05322, section 5.1.1."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from meshcast.layout import Layout

from .case import RANKS_PER_HOST, Case

_ELEMENTS = 1 << 28  # int32: 1 GiB


def _case(hosts: int, per_host: int) -> Case:
    src = Layout([0], [Replicate()])
    rows = [
        [(1 + host) * RANKS_PER_HOST + index for index in range(per_host)] for host in range(hosts)
    ]  # the sender has a host of its own
    dst = Layout(rows, [Replicate(), Replicate()])
    name, notation = f"1-to-{hosts}x{per_host}", f"1 to {hosts}x{per_host} replicas"
    return Case(name, "1-to-m", (_ELEMENTS,), src, dst, notation)


CASES = [_case(*shape) for shape in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2)]]
