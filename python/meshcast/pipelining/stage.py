"""torch.distributed.pipelining.stage under the same name here: stages of our own, the rest is torch's."""

from __future__ import annotations

from meshcast.pipelining.compat import PipelineStageInfo, names_of_torch
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.traced import _PipelineStage, build_stage

__all__ = ["PipelineStage", "PipelineStageInfo", "_PipelineStage", "build_stage"]

__getattr__, __dir__ = names_of_torch("stage", globals())
