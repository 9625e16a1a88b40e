"""A rank of a pipeline dies behind a step. What the others add up with it ends with an error that says so,
and says nothing of arguments."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshcast import LayoutError, MeshcastError
from meshcast.pipelining import PipelineStage, Schedule1F1B, clip_grad_norm_, grad_norm

LEAVE_UP = True  # the case ends the group itself

VICTIM = 1


def clips_without_a_rank(context) -> None:
    rank, layer = context.rank, torch.nn.Linear(4, 4)
    stage = PipelineStage(layer, rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, loss_fn=torch.nn.functional.mse_loss)
    schedule.step(torch.ones(6, 4), target=torch.ones(6, 4))
    assert clip_grad_norm_(stage, 1.0) > 0
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: list[Any] = [lambda: clip_grad_norm_(stage, 1.0), lambda: grad_norm(stage)]
    for call in calls[rank // 2 :]:  # one of them begins with another
        with pytest.raises(MeshcastError, match="all-reduce") as caught:
            call()
        assert not isinstance(caught.value, LayoutError)
        assert caught.value.rank == rank
        assert f"rank {rank}" in str(caught.value)
    dist.destroy_process_group()


CASES = [clips_without_a_rank]
