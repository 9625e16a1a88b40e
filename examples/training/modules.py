"""A stage's module as the options want it: tensor-parallel, recomputing, in bfloat16."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from training.options import Options


def build(
    options: Options, stage: int, n_stages: int, device: torch.device, mesh: DeviceMesh | None = None
) -> nn.Module:
    """Stage `stage` of `n_stages`, its layers shared over the ranks of `mesh` as the job does it. Equal
    weights for every cut, mesh, rank and device: they are drawn on the CPU."""
    job = options.job
    module = job.build_stage(stage, n_stages, options.seed).to(device)
    if mesh is not None and mesh.size() > 1:
        job.parallelize(module, mesh)
    if options.recompute:
        for block in job.blocks(module):
            # Keeps the block's input and runs it again in the backward: Chen et al., "Training Deep Nets with
            # Sublinear Memory Cost".
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if options.precision == "bf16":
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
    return module


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all its shards; collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
