"""accelerate's `prepare_pippy` with the pipelines of meshcast: ``import meshcast.integrations.accelerate``.

Importing this module is all, before or after ``from accelerate.inference import prepare_pippy``. Pipelines
that accelerate makes from then on are those of meshcast.pipelining. It changes a name in accelerate's module,
and nothing in torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import PartialState, inference

from meshcast.pipelining import ScheduleGPipe, SplitPoint, pipeline

__all__: list[str] = []


def _build_pipeline(
    model: torch.nn.Module, split_points: Iterable[str], args: Any, kwargs: Any, num_chunks: int
) -> ScheduleGPipe:
    """accelerate's function of this name imports from torch where it is called; this does the same here."""
    state = PartialState()
    cuts = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=args, mb_kwargs=kwargs, split_spec=cuts)
    return ScheduleGPipe(pipe.build_stage(state.local_process_index, state.device), num_chunks)


inference.build_pipeline = _build_pipeline
