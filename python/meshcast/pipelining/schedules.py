"""torch.distributed.pipelining.schedules under the same name here: our schedules, the rest is torch's."""

from __future__ import annotations

from meshcast.pipelining import classes
from meshcast.pipelining.classes import *  # noqa: F403  its __all__, private names of torch's included
from meshcast.pipelining.compat import names_of_torch
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = [*classes.__all__, "PipelineStage"]

__getattr__, __dir__ = names_of_torch("schedules", globals())
