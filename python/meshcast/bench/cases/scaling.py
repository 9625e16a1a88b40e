"""How the ratio to the bound changes with the number of hosts, and with the ranks of a host: one host of
shards to replicas on all the others. Rates fall with the number of hosts, so that the cores can drive all
links."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from meshcast.layout import Layout

from .case import Case, Setting

_ELEMENTS = 1 << 28


def _case(group: str, name: str, hosts: int, per_host: int, rate: float) -> Case:
    rows = [[host * per_host + index for index in range(per_host)] for host in range(hosts)]
    src, dst = Layout(rows[0], [Shard(0)]), Layout(rows[1:], [Replicate(), Replicate()])
    return Case(
        name, group, (_ELEMENTS,), src, dst, f"{per_host} shards to {hosts - 1}x{per_host} replicas",
        setting=Setting(per_host, rates=(rate,) * hosts),
    )  # fmt: skip


CASES = [
    *(_case("hosts", f"{hosts} hosts", hosts, 2, min(1.0, 4 / hosts)) for hosts in (2, 4, 8, 16)),
    *(_case("ranks", f"3 hosts of {ranks}", 3, ranks, 1.0) for ranks in (1, 2, 4, 8)),
]
