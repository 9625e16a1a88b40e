"""How soon the survivors of a lost rank know: the fault cases of the tests, timed. Three ranks, 256 MiB from
rank 0 to ranks 1 and 2; each row is a run of its own. Prints a Markdown table.

PYTHONPATH=python:tests:. python -m benchmarks.time_to_error
"""

from __future__ import annotations

import itertools
from pathlib import Path

from multiproc.harness import run_world

_CASES = Path(__file__).resolve().parents[1] / "tests/fault/cases_lost_peer.py"
_ROLES = {0: "root", 1: "rank 1, relays over loopback", 2: "rank 2, last over loopback"}
_MOMENTS = ("before", "first use", "middle")
_LIMITS = {"killed": 30.0, "frozen": 4.0}  # seconds that the call allows itself
_COLUMNS = (
    "fault",
    "of the",
    "moment",
    "data go through",
    "error of the survivors",
    "after, s",
    "ended in, s",
)


def main() -> None:
    _print_row(_COLUMNS)
    _print_row(["---"] * len(_COLUMNS))
    for fault, victim, moment, shm in itertools.product(_LIMITS, _ROLES, _MOMENTS, ("1", "0")):
        if (victim, moment) == (2, "before"):
            continue  # the first rank of a chain is through before it could know of the last
        world = run_world(
            _CASES,
            3,
            limit=150.0,
            env={
                "VICTIM": str(victim),
                "FAULT": fault,
                "MOMENT": moment,
                "LIMIT": str(_LIMITS[fault]),
                "MESHCAST_SHM": shm,
            },
        )
        survivors = [rank for rank in _ROLES if rank != victim]
        world.check("lost_peer", survivors)
        found = [world.value("lost_peer", rank) for rank in survivors]
        errors = ", ".join(sorted({value["error"] for value in found}))
        elapsed, destroyed = (max(value[key] for value in found) for key in ("elapsed", "destroyed"))
        through = "shared memory" if shm == "1" else "loopback"
        _print_row([fault, _ROLES[victim], moment, through, errors, f"{elapsed:.2f}", f"{destroyed:.2f}"])


def _print_row(cells: list[str] | tuple[str, ...]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
