"""Pipeline training over stages on different meshes. The names mirror torch.distributed.pipelining.

A schedule is data (`action`, `schedules`), made runnable by passes (`lower`, `validate`), then simulated
(`simulate`) or run (`schedule`, `runtime`). The values between stages are resharded from mesh to mesh by
`meshcast.transfers.transfer` (`wiring`). The modules
`schedules`, `stage`, `microbatch`, `_utils` and `_backward` have all the names of torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.pipelining import SplitPoint, pipe_split

from meshcast.pipelining import _backward, _utils, microbatch, schedules, stage  # noqa: F401
from meshcast.pipelining._utils import names_of_torch
from meshcast.pipelining.action import Action, ActionKind, ScheduleError, dump_csv, load_csv, lower
from meshcast.pipelining.compat import PipelineStageInfo
from meshcast.pipelining.edge import Edge
from meshcast.pipelining.recipe import validate
from meshcast.pipelining.runtime import microbatch_seed
from meshcast.pipelining.schedule import PipelineSchedule, ScheduleOptions
from meshcast.pipelining.schedules import (
    MultiScheduleOptions,
    PipelineActivationLiveness,
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
    _ScheduleForwardOnly,  # noqa: F401  torch has it here
    analyze_pipeline_activation_liveness,
    get_schedule_class,
)
from meshcast.pipelining.simulate import SimulationReport, simulate
from meshcast.pipelining.stage import Pipe, PipelineStage, build_stage, pipeline
from meshcast.pipelining.trace import StageTimes

if TYPE_CHECKING:
    from meshcast.pipelining.checkpoint import load, save
    from meshcast.pipelining.norms import GradScaler, clip_grad_norm_, grad_norm
    from meshcast.tuning.candidates import Candidate, Times
    from meshcast.tuning.choose import Choice, ScheduleAuto, choose
    from meshcast.tuning.partition import Partition, partition
    from meshcast.tuning.search import Layer, Value

__all__ = [
    "Action",
    "ActionKind",
    "Candidate",
    "Choice",
    "Edge",
    "GradScaler",
    "Layer",
    "MultiScheduleOptions",
    "Partition",
    "Pipe",
    "PipelineActivationLiveness",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleError",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleOptions",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "ScheduleZBVZeroBubble",
    "SimulationReport",
    "SplitPoint",
    "StageTimes",
    "Times",
    "Value",
    "analyze_pipeline_activation_liveness",
    "build_stage",
    "choose",
    "clip_grad_norm_",
    "dump_csv",
    "get_schedule_class",
    "grad_norm",
    "load",
    "load_csv",
    "lower",
    "microbatch_seed",
    "pipe_split",
    "pipeline",
    "partition",
    "save",
    "simulate",
    "validate",
]

# Loaded when they are first used: few programs need them.
_LATER = {
    "Candidate": "tuning.candidates",
    "Choice": "tuning.choose",
    "GradScaler": "pipelining.norms",
    "Layer": "tuning.search",
    "Partition": "tuning.partition",
    "ScheduleAuto": "tuning.choose",
    "Times": "tuning.candidates",
    "Value": "tuning.search",
    "choose": "tuning.choose",
    "clip_grad_norm_": "pipelining.norms",
    "grad_norm": "pipelining.norms",
    "load": "pipelining.checkpoint",
    "partition": "tuning.partition",
    "save": "pipelining.checkpoint",
}

__getattr__, __dir__ = names_of_torch("", globals(), _LATER)
