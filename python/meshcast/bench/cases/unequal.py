"""Hosts with links of unlike rate: who sends what, and who comes last in a chain, then decides."""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case, Setting

_CUBE = (1024, 1024, 512)
_TABLE = [
    ("one source at half the rate", "2x4:RS0R", "2x4@8:S0RR", (1.0, 0.5, 1.0, 1.0)),
    ("one target at half the rate", "1x4:S0RR", "3x4@4:RRR", (1.0, 1.0, 1.0, 0.5)),
    ("fast sources, slow targets", "2x4:RRR", "2x4@8:S0RR", (1.0, 1.0, 0.25, 0.5)),
]


def _case(name: str, source: str, target: str, rates: tuple[float, ...]) -> Case:
    src, dst = Layout.parse(source), Layout.parse(target)
    setting = Setting(rates=rates)
    return Case(name, "unequal", _CUBE, src, dst, f"{source} to {target}", setting=setting)


CASES = [_case(*row) for row in _TABLE]
