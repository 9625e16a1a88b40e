"""Pipeline training over stages on unlike meshes. The names mirror torch.distributed.pipelining.

A schedule is data (`action`, `schedules`), made runnable by passes (`lower`, `validate`), then simulated
(`simulate`) or run (`schedule`, `runtime`). The values between stages are resharded from mesh to mesh by
`meshcast.transfer` (`wiring`).
"""

from __future__ import annotations

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
from meshcast.pipelining.lower import lower
from meshcast.pipelining.simulate import SimulationReport, simulate
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.validate import validate

__all__ = [
    "Action",
    "ActionKind",
    "Edge",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleEager1F1B",
    "ScheduleError",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "SimulationReport",
    "dump_csv",
    "get_schedule_class",
    "load_csv",
    "lower",
    "simulate",
    "validate",
]
