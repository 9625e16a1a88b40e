"""Inside one host, where memory and not a link is the limit: 64 MiB between four ranks."""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case, Setting

_SHAPE = (4096, 4096)  # int32: 64 MiB

_TABLE = [
    ("rows to columns", "4:S0R", "4:RS0"),
    ("shards to replicas", "4:S0R", "4:RR"),
    ("two ranks to the other two", "2:S0R", "2@2:S0R"),
    ("one rank to three", "1:RR", "3@1:RR"),
]


def _case(name: str, source: str, target: str) -> Case:
    src, dst = Layout.parse(source), Layout.parse(target)
    setting = Setting(own_cores=False)
    return Case(name, "in-host", _SHAPE, src, dst, f"{source} to {target}", fixed=True, setting=setting)


CASES = [_case(*row) for row in _TABLE]
