"""What is moved. One file for each kind of case; every process builds the same list."""

from __future__ import annotations

from . import (
    backend_broadcast,
    in_host,
    n_to_m,
    nics,
    odd,
    one_to_m,
    partial,
    random_layouts,
    scaling,
    sizes,
    small,
    state_dict,
    unequal,
)
from .case import RANKS_PER_HOST, Case, Setting, Tensor

__all__ = ["CASES", "RANKS_PER_HOST", "Case", "Setting", "Tensor", "find"]

_KINDS = (
    n_to_m, one_to_m, random_layouts, odd, partial, nics, unequal, state_dict, small, sizes,
    backend_broadcast, scaling, in_host,
)  # fmt: skip

CASES: list[Case] = [case for kind in _KINDS for case in kind.CASES]


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
