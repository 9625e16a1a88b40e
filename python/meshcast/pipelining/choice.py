"""Choice: what `choose` found, as an object and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshcast.pipelining.candidates import Candidate, Times
from meshcast.pipelining.classes import PipelineScheduleMulti
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.schedule import PipelineSchedule

__all__ = ["Choice", "listed_stages"]

_SHOWN = 12  # rows of the table: the fastest, and the fastest of each schedule that is not among them


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `choose`, the same on every rank.

    Attributes:
        schedule: the class.
        microbatches: into how many it cuts a batch.
        options: keyword arguments of the class that belong to it: ``warmup``, ``delay_weight_grad``.
        candidates: all that were simulated, with seconds of a step and bytes held; those that cannot run say
            why not.
        times: what was measured, one entry for each size of a micro-batch.
    """

    schedule: type[PipelineSchedule]
    microbatches: int
    options: Mapping[str, Any]
    candidates: Sequence[Candidate]
    times: Sequence[Times]
    chosen: Candidate

    def make(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        loss_fn: Callable[..., Any] | None = None,
        **more: Any,
    ) -> PipelineSchedule:
        """The schedule. more: further arguments of its class."""
        listed = listed_stages(stages)
        given: Any = listed if issubclass(self.schedule, PipelineScheduleMulti) else listed[0]
        made: Any = self.schedule
        return made(given, self.microbatches, loss_fn=loss_fn, **{**self.options, **more})

    def explain(self) -> str:
        """The table: what was measured, and what the schedules would take, fastest first."""
        chosen, most = self.chosen, max(self.chosen.held, default=0.0)
        lines = [
            (
                f"{chosen.name} with {self.microbatches} micro-batches: a step of {_ms(chosen.seconds)} ms, "
                f"bubble {chosen.bubble:.1%}, at most {most / 1e6:.4g} MB of activations on a rank"
            ),
            "",
        ]
        for times in self.times:
            lines += [f"measured, micro-batches of {times.samples:.4g} samples, ms and MB:", _measured(times)]
        lines += ["", "simulated, ms and MB:", _simulated(self.candidates, self.chosen)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def listed_stages(stages: PipelineStage | Sequence[PipelineStage]) -> list[PipelineStage]:
    """Returns the stages as a list, also where there is only one."""
    return list(stages) if isinstance(stages, Sequence) else [stages]


def _ms(value: float) -> str:
    return f"{value * 1e3:.4g}"


def _measured(times: Times) -> str:
    rows = [["stage", "forward", "backward", "I", "W", "sends", "held", "more between I and W"]]
    for stage, forward in enumerate(times.forward):
        sends = max((value for (source, _), value in times.transfer.items() if source == stage), default=0.0)
        shown_times = (forward, times.backward[stage], times.inputs[stage], times.weights[stage], sends)
        held = (times.held[stage], times.between[stage])
        rows.append([str(stage), *map(_ms, shown_times), *(f"{each / 1e6:.4g}" for each in held)])
    return _table(rows)


def _simulated(found: Sequence[Candidate], chosen: Candidate) -> str:
    ordered = sorted(found, key=lambda each: (bool(each.why_not), each.seconds))
    fastest: dict[str, Candidate] = {}
    for each in ordered:
        fastest.setdefault(each.schedule, each)
    kept = [
        each for each in ordered if each in ordered[:_SHOWN] or each in fastest.values() or each is chosen
    ]
    rows: list[list[str]] = [["schedule", "micro-batches", "step", "bubble", "held", ""]]
    for each in kept:
        ran = each.seconds != float("inf")
        rows.append(
            [
                each.name,
                str(each.microbatches),
                _ms(each.seconds) if ran else "-",
                f"{each.bubble:.1%}" if ran else "-",
                f"{max(each.held) / 1e6:.4g}" if each.held else "-",
                "chosen" if each is chosen else each.why_not,
            ]
        )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
