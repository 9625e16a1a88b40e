"""What a training script imports of meshcast as it reshards a tensor and a state dict and makes a step of a
pipeline, and what its objects print. Two processes."""

from __future__ import annotations

import sys

import meshcast
import torch
from meshcast.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def modules(context) -> list[str]:
    first, second = (DeviceMesh("cpu", [rank]) for rank in range(2))
    at_first = context.rank == 0

    full = torch.arange(6.0).reshape(3, 2)
    shard = DTensor.from_local(full, first, [Shard(0)]) if at_first else None
    spec = meshcast.TensorSpec(full.shape, full.dtype, first, [Shard(0)])
    for _ in range(2):
        copy = meshcast.reshard(spec if shard is None else shard, second, [Replicate()])
        assert at_first or torch.equal(copy.to_local(), full)

    state = meshcast.reshard_state_dict(
        {"w": shard, "step": 3} if at_first else None, {"w": meshcast.Layout([1], [Replicate()])}
    )
    assert at_first or torch.equal(state["w"], full)

    torch.manual_seed(context.rank)
    stage = PipelineStage(torch.nn.Linear(2, 2), context.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    if at_first:
        schedule.step(torch.ones(4, 2))
    else:
        schedule.step(target=torch.ones(4, 2), losses=[])
    assert all(each.grad is not None for each in stage.submod.parameters())
    return sorted(name for name in sys.modules if name.split(".")[0] == "meshcast")


def pipelines_say_what_they_are(context) -> None:
    from meshcast.pipelining import GradScaler, ScheduleAuto  # after `modules`, which imports neither

    stage = PipelineStage(torch.nn.Linear(2, 2), context.rank, 2, torch.device("cpu"))
    assert repr(stage) == f"<PipelineStage {context.rank} of 2, a Linear>"
    schedule = Schedule1F1B(stage, n_microbatches=3, loss_fn=torch.nn.functional.mse_loss)
    assert repr(schedule) == "<Schedule1F1B of 2 stages, 3 micro-batches>"
    auto = ScheduleAuto(stage, loss_fn=torch.nn.functional.mse_loss)
    assert repr(auto) == "<ScheduleAuto: nothing is chosen yet>"
    assert repr(GradScaler(stage, device="cpu")) == f"<GradScaler of stages [{context.rank}]>"
    sync = meshcast.WeightSync(None, {"w": meshcast.Layout([1], [Replicate()])})
    assert repr(sync).startswith("<WeightSync") and repr(sync).endswith(">")
    sync.close()


CASES = [modules, pipelines_say_what_they_are]
