"""torch.distributed.broadcast itself: on a group with the backend meshcast, beside gloo's own and a reshard
to replicas."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from meshcast.layout import Layout

from .case import RANKS_PER_HOST, Case

_ELEMENTS = 1 << 28


def _case(hosts: int, per_host: int) -> Case:
    ranks = [host * RANKS_PER_HOST + index for host in range(hosts) for index in range(per_host)]
    src, dst = Layout([0], [Replicate()]), Layout(ranks, [Replicate()])
    name = f"broadcast, {hosts} hosts of {per_host}"
    return Case(
        name, "backend", (_ELEMENTS,), src, dst, f"1 to {hosts}x{per_host} replicas, itself among them",
        methods=("auto", "multicast", "broadcast", "backend broadcast", "gloo broadcasts", "Open MPI bcast",
                 "Open MPI pipeline", "MPICH bcast"),
    )  # fmt: skip


CASES = [_case(2, 4), _case(4, 1), _case(4, 2)]
