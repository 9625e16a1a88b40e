"""Hosts with several links: the same layouts over 1, 2 and 4 NICs per host. All NICs together have the rate
of one link, so that the same bytes should take the same time, whatever their number."""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case, Setting

_CUBE = (1024, 1024, 512)
_TABLE = [("shards", "2x4:S1RR", "2x4@8:S0RR"), ("replicas", "1x4:S0RR", "2x4@4:RRR")]


def _case(nics: int, name: str, source: str, target: str) -> Case:
    src, dst = Layout.parse(source), Layout.parse(target)
    return Case(
        f"{name}, {nics} NIC{'s' * (nics > 1)}", "nics", _CUBE, src, dst, f"{source} to {target}",
        setting=Setting(nics=nics, rates=(1 / nics,) * 4),
    )  # fmt: skip


CASES = [_case(nics, *row) for nics in (1, 2, 4) for row in _TABLE]
