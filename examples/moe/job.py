"""The GPT with experts as a job of the training program."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt.job import GptJob, GptJobType

from moe.config import MoEConfig, sparse

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MoEJob(GptJob):
    """A GPT with experts on byte-level text. See training.job.Job."""

    config: MoEConfig
    name: str = "GPT with experts"
    loss_unit: str = "nats per byte, and the balance of experts"

    def build_stage(self, stage: int, n_stages: int, seed: int) -> nn.Module:
        from moe.model import build_stage

        return build_stage(self.config, stage, n_stages, seed)

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        from moe.model import MoEStage, parallelize

        assert isinstance(module, MoEStage)
        parallelize(module, mesh)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from moe.model import loss_fn

        return loss_fn(self.config, outputs, targets)


class MoEJobType(GptJobType):
    """The command line of the GPT, and its experts."""

    title = "Train a GPT with experts over pipeline stages on different device meshes."
    example = "torchrun --standalone --nproc-per-node 5 examples/moe/train.py --stages 2,3"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument_group("experts").add_argument
        experts, active, balance = MoEConfig.experts, MoEConfig.active, MoEConfig.balance
        add("--experts", type=int, default=experts, metavar="N", help="MLPs in each layer (%(default)s)")
        add("--active", type=int, default=active, metavar="N", help="that a token goes to (%(default)s)")
        weight = "weight of the routers' loss, which spreads the tokens over the experts (%(default)s)"
        add("--balance", type=float, default=balance, metavar="X", help=weight)

    def from_arguments(self, args: argparse.Namespace) -> MoEJob:
        dense = super().from_arguments(args).config
        return MoEJob(sparse(dense, args.experts, args.active, args.balance))
