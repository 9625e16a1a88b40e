"""Writes the golden schedules anew. Run it after a deliberate change and read the difference."""

from __future__ import annotations

from pathlib import Path

from meshcast.pipelining import dump_csv, lower
from meshcast.pipelining.orders import SCHEDULES, build

if __name__ == "__main__":
    for name in SCHEDULES:
        for stages, microbatches in ((1, 1), (2, 4), (4, 2), (4, 8)):
            if stages == 1 and name in ("ZBV", "Interleaved1F1B"):
                continue
            path = Path(__file__).with_name(f"{name.lower()}_{stages}x{microbatches}.csv")
            dump_csv(lower(build(name, stages, microbatches)), path)
    dump_csv(
        lower(build("Eager1F1B", 4, 8, delay_weight_grad=True)),
        Path(__file__).with_name("eager1f1b_4x8_delayed.csv"),
    )
