"""Train in stages, then serve the whole model with its experts over all ranks.

Weights go from the expert layout of each stage to that of the server by reshard_state_dict, without a
checkpoint.

torchrun --standalone --nproc-per-node 5 examples/moe/serve.py --stages 2,3 --experts 5 --steps 40
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.command_line import config_errors_exit
from training.options import parse

from moe.job import MoEJobType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from training.trainer import Trainer


def move(
    source: nn.Module | None, target: nn.Module | None, mesh: DeviceMesh, names: Mapping[str, str]
) -> None:
    """Weights of one module into another; a collective of all ranks.

    Args:
        source: what this rank has of the model, or None. What ranks have under one name are parts of one
            tensor, or copies.
        target: on the ranks of `mesh`, with all the parameters of the model; None on others.
        names: {name in the source: name in the target} of those that differ.
    """
    from meshcast import reshard_state_dict
    from torch.distributed.tensor import DTensor, Replicate

    held = {} if source is None else dict(source.named_parameters())
    out = {} if target is None else {name: value.detach() for name, value in target.named_parameters()}
    where = {
        name: (value.device_mesh, value.placements)
        if isinstance(value, DTensor)
        else (mesh, [Replicate()] * mesh.ndim)
        for name, value in out.items()
    }
    reshard_state_dict({names.get(name, name): value.detach() for name, value in held.items()}, where, out)


def held_out_loss(trainer: Trainer, server: nn.Module) -> float:
    """As Trainer.held_out_loss, every rank with its part of the samples."""
    import torch
    import torch.distributed as dist
    from training.trainer import EVAL_BATCHES

    rank, ranks, job = dist.get_rank(), dist.get_world_size(), trainer.options.job
    total = torch.zeros((), dtype=torch.float64)
    for index in range(EVAL_BATCHES):
        (tokens,), targets = trainer.samples.held_out(index, trainer.options.run.batch)
        samples = len(tokens)
        tokens, targets = (each.tensor_split(ranks)[rank].to(trainer.device) for each in (tokens, targets))
        with torch.no_grad():
            outputs = server(tokens)  # without samples too: other ranks want its experts
        if len(tokens):
            total += job.loss(outputs, targets).double().cpu() * len(tokens) / samples
    dist.all_reduce(total)
    return total.item() / EVAL_BATCHES


def main(argv: list[str]) -> int:
    with config_errors_exit():
        options = parse(
            MoEJobType(), argv, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
        )
    # Only now, so that a wrong command line is answered at once.
    from dataclasses import replace

    import meshcast  # noqa: F401  (registers the backend)
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from training.device import take_device
    from training.modules import build
    from training.trainer import Trainer

    device = take_device(options.device, options.precision)
    samples = options.job.samples(options.seed, options.data)
    dist.init_process_group("meshcast")
    try:
        trainer = Trainer(options, samples, device)
        for step in range(options.steps):
            trainer.gradients(step)
            trainer.update(step)
        ranks = torch.arange(dist.get_world_size()).unsqueeze(1)
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("data", "tensor"))
        # Other initial weights: all that it answers with has come over.
        server = build(replace(options, seed=options.seed + 1), 0, 1, device, mesh)
        move(trainer.module, server, mesh, {local: name for name, local in trainer.shared_names.items()})
        trained, served = trainer.held_out_loss(), held_out_loss(trainer, server)
        if dist.get_rank() == 0:
            there = f"{served:.6f} over all {len(ranks)} ranks"
            print(f"held out: {trained:.6f} in stages on {options.run}, {there}")
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
