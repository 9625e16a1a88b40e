"""The schedule classes, named and called as those of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Unpack

from meshcast.base.arguments import typed_arguments
from meshcast.errors import LayoutError
from meshcast.pipelining.refused import reason_against
from meshcast.pipelining.schedule import Options, PipelineSchedule
from meshcast.pipelining.stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "get_schedule_class",
]


class PipelineScheduleSingle(PipelineSchedule):
    """Base of the schedules of one stage on each rank. Arguments beyond `stage`: see `PipelineSchedule`."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            **options,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """Base of the schedules of several stages on each rank. Arguments beyond these: see `PipelineSchedule`.

    backward_requires_autograd must be True; defer_pp_recv changes nothing: receives are posted ahead anyway.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,  # noqa: ARG002  torch has it
        **options: Unpack[Options],
    ) -> None:
        if not backward_requires_autograd:
            self._refused = "backward_requires_autograd=False is not supported: backward runs autograd here"
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            **options,
        )


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards; see `meshcast.pipelining.orders.gpipe`."""

    name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One backward and one forward in turn; see `meshcast.pipelining.orders.one_f_one_b`."""

    name = "1F1B"


class ScheduleEager1F1B(PipelineScheduleSingle):
    """1F1B with a longer warm-up, which hides forward transfers; see
    `meshcast.pipelining.orders.eager_1f1b`."""

    name = "Eager1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """Weight gradients fill bubbles, with the memory of 1F1B; see
    `meshcast.pipelining.orders.zero_bubble`."""

    name = "ZBH1"


class ScheduleZBH2(PipelineScheduleSingle):
    """Weight gradients fill all bubbles, with about twice the memory of 1F1B; see
    `meshcast.pipelining.orders.zero_bubble`."""

    name = "ZBH2"


class ScheduleZBV(PipelineScheduleMulti):
    """Two stages on each rank, down the ranks and up again; see `meshcast.pipelining.orders.zb_v`."""

    name = "ZBV"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """Several stages on each rank, stage s on rank s mod p; see
    `meshcast.pipelining.orders.interleaved`."""

    name = "Interleaved1F1B"


_CLASSES: dict[str, type[PipelineSchedule]] = {
    cls.name.lower(): cls
    for base in (PipelineScheduleSingle, PipelineScheduleMulti)
    for cls in base.__subclasses__()
}
_CLASSES["zbvzerobubble"] = ScheduleZBV  # torch's name for it


@typed_arguments()
def get_schedule_class(name: str) -> type[PipelineSchedule]:
    """The class of a schedule, in any case, with or without "Schedule" before its name. torch's names are
    accepted where the schedule is there.

    Raises LayoutError that lists the names there are, or says why one of torch's is not among them.
    """
    wanted = name.lower().removeprefix("schedule")
    if wanted in _CLASSES:
        return _CLASSES[wanted]
    reason = reason_against(wanted)
    if reason is not None:
        raise LayoutError(f"schedule {name!r} is not offered: {reason}")
    known = ", ".join(cls.name for cls in dict.fromkeys(_CLASSES.values()))
    raise LayoutError(f"there is no schedule {name!r}; choose one of {known}")
