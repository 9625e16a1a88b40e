"""torch.distributed.pipelining.schedules under the same name here: our schedules, the rest is torch's."""

from __future__ import annotations

from meshcast.pipelining.classes import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBV,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
    get_schedule_class,
)
from meshcast.pipelining.compat import names_of_torch
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "ScheduleZBVZeroBubble",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "get_schedule_class",
]

__getattr__, __dir__ = names_of_torch("schedules", globals())
