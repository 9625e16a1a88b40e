"""Layouts that do not divide: uneven and empty shards, meshes of unlike size, overlapping or identical."""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case

_TABLE = [
    ("3 to 5 ranks", (1000, 700, 380), "3:S0RR", "5@4:RS0R"),
    ("7 to 2x3 ranks", (1000, 700, 380), "7:S0RR", "2x3@8:RS1S0"),
    ("more ranks than rows", (6, 1 << 25), "8:S0R", "2x4@8:S01R"),
    ("overlapping in half of the ranks", (1000, 700, 380), "2x4:S01RR", "2x4@4:RS01R"),
    ("identical meshes", (1000, 700, 380), "2x4:S0S1R", "2x4:RRS01"),
    ("one mesh inside the other", (1000, 700, 380), "4x4:S01RR", "1x4:RS1R"),
]


def _case(name: str, shape: tuple[int, ...], source: str, target: str) -> Case:
    return Case(name, "odd", shape, Layout.parse(source), Layout.parse(target), f"{source} to {target}")


CASES = [_case(*row) for row in _TABLE]
