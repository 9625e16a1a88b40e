"""Several senders, several receivers: the nine cases of arXiv 2211.05322, section 5.1.2.

Cases 7 and 8 are one and the same in the code published with the paper; both are run, as there.
"""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case

_CUBE = (1024, 1024, 512)

_TABLE = [
    ("1", _CUBE, "2x4:S0RR", "2x4@8:S0RR"),
    ("2", _CUBE, "2x4:RRR", "2x4@8:S0RR"),
    ("3", _CUBE, "2x4:RS0R", "2x4@8:S0RR"),
    ("4", _CUBE, "2x4:RS01R", "2x4@8:S01RR"),
    ("5", _CUBE, "2x4:S1RR", "2x4@8:S0RR"),
    ("6", (3072, 1024, 170), "2x4:S0RR", "3x4@8:S0RR"),
    ("7", _CUBE, "1x4:S1RR", "2x4@4:RRR"),
    ("8", _CUBE, "1x4:S1RR", "2x4@4:RRR"),
    ("9", _CUBE, "2x4:RS0R", "2x4@8:RRS0"),
]


def _case(name: str, shape: tuple[int, ...], source: str, target: str) -> Case:
    src, dst = Layout.parse(source), Layout.parse(target)
    return Case(f"n-to-m {name}", "n-to-m", shape, src, dst, f"{source} to {target}")


CASES = [_case(*row) for row in _TABLE]
