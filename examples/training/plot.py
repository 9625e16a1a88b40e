"""The loss curve as a picture, with the single process laid over the verified steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9822b", "#3a8f5c", "#8a8f98"
STAGE_COLOURS = (BLUE, GREEN, "#8457a8", "#b0473f")
SMALLEST_SHOWN = 1e-9  # an exact zero has no place on a logarithmic axis


def draw(start: dict[str, Any], steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of the records of one run: its loss and, where it was verified, the differences."""
    verified = [s for s in steps if "reference_loss" in s]
    figure, axes = plt.subplots(
        1, 2 if verified else 1, figsize=(11 if verified else 7, 4.2), squeeze=False, layout="constrained"
    )
    _loss(axes[0][0], start["loss_unit"], steps, verified)
    if verified:
        _differences(axes[0][1], start, verified)
    ranks = " → ".join(str(n) for n in start["stages"])
    size = f"{start['parameters'] / 1e6:.2f} M parameters"
    figure.suptitle(f"{start['name']}, {size}, stages on {ranks} ranks, {start['schedule']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _loss(axis: Axes, unit: str, steps: Sequence[dict[str, Any]], verified: Sequence[dict[str, Any]]) -> None:
    axis.plot(
        [s["step"] for s in steps], [s["loss"] for s in steps], color=BLUE, lw=1.4, label="pipeline, training"
    )
    if verified:
        at, losses = [s["step"] for s in verified], [s["reference_loss"] for s in verified]
        axis.plot(at, losses, "o", color=ORANGE, ms=5, mfc="none", mew=1.3, label="one process, training")
    held_out = [s for s in steps if "held_out_loss" in s]
    at, losses = [s["step"] for s in held_out], [s["held_out_loss"] for s in held_out]
    axis.plot(at, losses, "s", color=GREEN, ms=5, label="pipeline, held-out data")
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss ({unit})")
    axis.set_title("Loss", loc="left", fontsize=10)
    _tidy(axis)


def _differences(axis: Axes, start: dict[str, Any], verified: Sequence[dict[str, Any]]) -> None:
    at = [s["step"] for s in verified]
    loss = [max(abs(s["loss"] - s["reference_loss"]), SMALLEST_SHOWN) for s in verified]
    axis.semilogy(at, loss, "o-", color=ORANGE, ms=4, lw=1, label="loss")
    for stage, ranks in enumerate(start["stages"]):
        gradients = [max(s["gradient_differences"][stage], SMALLEST_SHOWN) for s in verified]
        colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
        axis.semilogy(
            at, gradients, "s-", color=colour, ms=4, lw=1, label=f"gradients, stage {stage} ({ranks} ranks)"
        )
    axis.axhline(start["tolerance"], color=GREY, ls="--", lw=1)
    axis.annotate(
        "tolerance", (at[0], start["tolerance"]), xytext=(0, 3), textcoords="offset points", color=GREY
    )
    axis.set_ylim(SMALLEST_SHOWN / 2, start["tolerance"] * 300)
    axis.set_xlabel("step")
    axis.set_title(
        f"Largest absolute difference from one process (0 drawn at {SMALLEST_SHOWN:.0e})",
        loc="left",
        fontsize=10,
    )
    _tidy(axis)


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)
