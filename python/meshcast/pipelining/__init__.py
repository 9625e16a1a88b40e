"""Pipeline training over stages on unlike meshes. The names mirror torch.distributed.pipelining.

A schedule is data (`action`, `schedules`), made runnable by passes (`lower`, `validate`), then simulated
(`simulate`) or run (`schedule`, `runtime`). The values between stages are resharded from mesh to mesh by
`meshcast.transfers.persistent` (`wiring`). `Pipe`, `SplitPoint`, `pipe_split` and `pipeline` are torch's own.
"""

from __future__ import annotations

from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline

from meshcast.pipelining.action import Action, ActionKind, dump_csv, load_csv
from meshcast.pipelining.classes import (
    Schedule1F1B,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBV,
    get_schedule_class,
)
from meshcast.pipelining.edge import Edge
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.grad_scaler import GradScaler
from meshcast.pipelining.lower import lower
from meshcast.pipelining.norms import clip_grad_norm_, grad_norm
from meshcast.pipelining.partition import Layer, Partition, Value, partition
from meshcast.pipelining.randomness import microbatch_seed
from meshcast.pipelining.refused import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    build_stage,
)
from meshcast.pipelining.simulate import SimulationReport, simulate
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.validate import validate

ScheduleZBVZeroBubble = ScheduleZBV  # torch's name for it

__all__ = [
    "Action",
    "ActionKind",
    "Edge",
    "GradScaler",
    "Layer",
    "Partition",
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleError",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "ScheduleZBVZeroBubble",
    "SimulationReport",
    "SplitPoint",
    "build_stage",
    "Value",
    "clip_grad_norm_",
    "dump_csv",
    "get_schedule_class",
    "grad_norm",
    "load_csv",
    "lower",
    "microbatch_seed",
    "pipe_split",
    "pipeline",
    "partition",
    "simulate",
    "validate",
]
