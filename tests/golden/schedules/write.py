"""Writes the golden schedules anew. Run it after a deliberate change and read the difference."""

from __future__ import annotations

from pathlib import Path

from meshcast.pipelining import dump_csv, lower
from meshcast.pipelining.schedules import BUILDERS, build

if __name__ == "__main__":
    for name in BUILDERS:
        for stages, microbatches in ((1, 1), (2, 4), (4, 2), (4, 8)):
            path = Path(__file__).with_name(f"{name.lower()}_{stages}x{microbatches}.csv")
            dump_csv(lower(build(name, stages, microbatches)), path)
