"""torch.distributed.pipelining.schedules under the same name here: our schedules, the rest is torch's."""

from __future__ import annotations

from meshcast.pipelining import classes
from meshcast.pipelining.auto import ScheduleAuto, get_schedule_class
from meshcast.pipelining.classes import *  # noqa: F403  its __all__, private names of torch's included
from meshcast.pipelining.compat import WAIT_REDUCE_GRAD, PipelineStageInfo, names_of_torch
from meshcast.pipelining.liveness import PipelineActivationLiveness, analyze_pipeline_activation_liveness
from meshcast.pipelining.stage import PipelineStage

__all__ = [
    *classes.__all__,
    "WAIT_REDUCE_GRAD",
    "PipelineActivationLiveness",
    "PipelineStage",
    "PipelineStageInfo",
    "ScheduleAuto",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]

__getattr__, __dir__ = names_of_torch("schedules", globals())
