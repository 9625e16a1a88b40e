"""The tables of docs/end_to_end.md."""

from __future__ import annotations

import statistics
from typing import Any

from meshcast.bench.report import calibration_text

from ..transports.page import table
from .models import MODELS

__all__ = ["WAYS", "ratio", "text"]

Found = dict[str, Any]
MIB = 1 << 20
WAYS = {
    "two buffers": "`WeightSync`, two buffers",
    "one buffer": "`WeightSync`, one buffer",
    "two buffers, digest": "`WeightSync`, two buffers, `digest=True`",
    "Megatron plan": "Megatron's plan, same transport",
    "NeMo-RL plan": "NeMo-RL's plan, same transport",
    "broadcast": "`full_tensor()` and broadcast",
    "files": "`torch.distributed.checkpoint`, files in memory that all hosts share",
}
_NO_NETWORK = {"files"}  # ways that the links do not bound
_ALLOWED = 64.0  # MiB of a rank beyond the state dicts


def ratio(model: Found, way: str) -> float | None:
    """Median time over the lower bound; None if the way did not run, or uses no network."""
    found = model["ways"].get(way)
    return None if found is None or way in _NO_NETWORK else _median(found) / model["bound"]


def text(results: Found) -> str:
    """A section for each model, below what the figures are of."""
    head = results["header"]
    said = (
        f"`{head['command']}`: commit {head['commit']}, {head['cores']} cores, kernel {head['kernel']}, "
        f"torch {head['torch']}, links of {head['link_mbit']:g} Mbit/s; medians of {head['repeats']} rounds "
        f"by turns, where a way that takes more than three times the bound has one; "
        f"{calibration_text(results['calibration'])}."
    )
    parts = [said]
    for model in results["models"]:
        parts += _section(model)
    return "\n\n".join(parts)


def _section(model: Found) -> list[str]:
    lines = []
    for way, found in model["ways"].items():
        seconds, times = _median(found), ratio(model, way)
        ours = model["ways"].get("two buffers")
        lines.append(
            [
                WAYS[way],
                f"{seconds:.2f}",
                "-" if times is None else f"{times:.3f}",
                "-" if ours is None else f"{seconds / _median(ours):.2f}",
                f"{found['first']:.2f}",
                f"{statistics.median(found['cpu']):.2f}",
                f"{max(statistics.median(found['busy']), 0):.0%}",
                f"{found['memory']['trainers'] / MIB:.0f}",
                f"{found['memory']['servers'] / MIB:.0f}",
                str(found["wrong_bytes"]),
            ]
        )
    columns = [
        "", "s", "/ bound", "/ two buffers", "first call, s", "CPU of all ranks, s", "cores busy",
        "trainer, MiB", "server, MiB", "wrong bytes",
    ]  # fmt: skip
    what = MODELS[model["name"]].what if model["name"] in MODELS else model["name"]
    said = (
        f"{what[0].upper()}{what[1:]}. {model['tensors']} tensors, {model['nbytes'] / MIB:.0f} MiB of "
        f"bfloat16, of which a server gets {model['part'] / MIB:.0f}. Lower bound {model['bound']:.2f} s."
    )
    return [
        f"### {model['name'].capitalize()}",
        said,
        table(columns, lines),
        *_targets(model),
    ]


def _targets(model: Found) -> list[str]:
    """What WeightSync has to reach, and what it does."""
    lines = []
    for way in ("two buffers", "one buffer"):
        found, times = model["ways"].get(way), ratio(model, way)
        if found is None or times is None:
            continue
        later, first = _median(found) - model["bound"], found["first"] - model["bound"]
        memory = max(found["memory"]["trainers"], found["memory"]["servers, without the spare copy"]) / MIB
        name = WAYS[way]
        lines += [
            [f"{name}: time over the bound", f"{times:.3f}", "1.10"],
            [f"{name}: first call beyond the bound, s", f"{first:.2f}", f"{3 * max(later, 0):.2f}"],
            [f"{name}: CPU time of one rank in its first call, s", f"{found['first_cpu']:.3f}", ""],
            [f"{name}: memory beyond state dicts and spare copy, MiB", f"{memory:.0f}", f"{_ALLOWED:g}"],
        ]
        if "idle" in found:
            idle = f"{found['idle']:.2%} ({model['idle']:.2%} without it)"
            lines.append([f"{name}: of a core, while nothing is pushed", idle, ""])
    return [table(["", "measured", "at most"], lines)] if lines else []


def _median(found: Found) -> float:
    return statistics.median(found["seconds"])
