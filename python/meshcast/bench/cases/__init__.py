"""The cases that are measured. Every process builds the same list."""

from __future__ import annotations

from . import random_layouts, tables
from .case import RANKS_PER_HOST, Case, CaseSetting, Tensor

__all__ = ["CASES", "RANKS_PER_HOST", "Case", "CaseSetting", "Tensor", "find"]

CASES: list[Case] = [
    *tables.N_TO_M, *tables.ONE_TO_M, *random_layouts.CASES, *tables.ODD, *tables.PARTIAL, *tables.NICS,
    *tables.UNEQUAL, *tables.STATE_DICT, *tables.SMALL, *tables.SIZES, *tables.BACKEND, *tables.SCALING,
    *tables.IN_HOST,
]  # fmt: skip


def find(names: list[str]) -> list[Case]:
    """Cases by name, or by group name (all of the group). Raises ValueError naming what is known."""
    chosen: list[Case] = []
    for name in names:
        found = [case for case in CASES if name in (case.name, case.group)]
        if not found:
            groups = sorted({case.group for case in CASES})
            raise ValueError(f"unknown case {name!r}; known are {', '.join(case.name for case in CASES)}, "
                             f"and the groups {', '.join(groups)}")  # fmt: skip
        chosen += [case for case in found if case not in chosen]
    return chosen
