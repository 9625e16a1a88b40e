"""Closing table and picture of a run from its metrics file.

python examples/training/summary.py out/metrics.jsonl --plot out/loss.png
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.plot import draw


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Table and picture of a training run.")
    parser.add_argument("metrics", type=Path, help="JSON lines that train.py --metrics wrote")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curve there")
    args = parser.parse_args(argv)
    if not args.metrics.is_file():
        parser.error(f"{args.metrics}: no such file; train.py --metrics {args.metrics} writes it")
    records = [json.loads(line) for line in args.metrics.read_text().splitlines()]
    starts = [r for r in records if r["event"] == "start"]
    steps = [r for r in records if r["event"] == "step"]
    if not starts or not steps:
        parser.error(f"{args.metrics}: holds no finished step")
    across = f" across {len(starts[-1]['stages'])} meshes" if len(starts[-1]["stages"]) > 1 else ""
    table = Table(title=f"{starts[-1]['name']}{across}", show_header=False)
    for name, value in rows(starts[-1], steps):
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if args.plot is not None:
        draw(starts[-1], steps, args.plot)
        print(f"loss curve: {args.plot}")
    return 0


def rows(start: dict[str, Any], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) lines of the table; the single-process lines only where steps were verified."""
    ranks = " -> ".join(str(n) for n in start["stages"])
    # The first step also plans, connects and agrees, so the median speaks for the rest.
    speed = statistics.median(s["units_per_s"] for s in steps)
    found = [
        ("model", f"{start['parameters'] / 1e6:.2f} M parameters, {start['layers']} layers"),
        ("stages", f"{ranks} ranks, {start['schedule']}, {start['microbatches']} micro-batches"),
        ("loss, first step", f"{steps[0]['loss']:.3f}"),
        (f"loss, step {steps[-1]['step']}", f"{steps[-1]['loss']:.3f}"),
        ("loss on held-out data", f"{steps[-1]['held_out_loss']:.3f}")
        if "held_out_loss" in steps[-1]
        else None,
        (f"{start['unit']} per second, median step", f"{speed:,.0f}"),
        ("time in training steps", f"{sum(s['seconds'] for s in steps):.1f} s"),
        ("moved between the meshes", f"{sum(s['moved_bytes'] for s in steps) / 1e6:,.1f} MB"),
    ]
    verified = [s for s in steps if "reference_loss" in s]
    if verified:
        loss = max(abs(s["loss"] - s["reference_loss"]) for s in verified)
        found.append((f"largest difference of the loss, {len(verified)} steps", f"{loss:.1e}"))
        for stage in range(len(start["stages"])):
            worst = max(s["gradient_differences"][stage] for s in verified)
            found.append((f"largest difference of a gradient, stage {stage}", f"{worst:.1e}"))
        found.append(("accepted", f"{start['tolerance']:.0e}"))
    return [row for row in found if row is not None]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
