"""The U-Transformer as a job of the training program."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from training.layout import RunLayout, check_heads

from unet.config import LAYERS, MODELS, UNetConfig, model_config

if TYPE_CHECKING:
    from meshcast.pipelining import Edge
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from unet.data import NoisySamples


@dataclass(frozen=True)
class UNetJob:
    """A U-Transformer of one size that learns to remove noise. See training.job.Job."""

    config: UNetConfig
    name: str = "U-Transformer"
    unit: str = "images"
    loss_unit: str = "mean square error of the noise"
    layers: int = LAYERS
    units_per_sample: int = 1

    def parameters(self) -> int:
        import torch

        with torch.device("meta"):
            return sum(p.numel() for p in self._stage(0, 1, 0).parameters())

    def check(self, run: RunLayout) -> None:
        check_heads(run, self.config.heads, lambda _: "a wider --model")

    def about(self) -> dict[str, Any]:
        return asdict(self.config)

    def build_stage(self, stage: int, n_stages: int, seed: int) -> nn.Module:
        return self._stage(stage, n_stages, seed)

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        from unet.model import UNetStage, parallelize

        assert isinstance(module, UNetStage)
        if mesh["tensor"].size() > 1:
            parallelize(module, mesh["tensor"])

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        from unet.model import UNetStage

        assert isinstance(module, UNetStage)
        return list(module.layers.values())

    def shared_parameters(self, stage: int, n_stages: int) -> dict[str, str]:  # noqa: ARG002
        return {}

    def edges(self, n_stages: int) -> list[Edge] | None:
        from unet.model import crossing

        return crossing(n_stages).edges() if n_stages > 1 else None

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from unet.model import loss_fn

        return loss_fn(outputs, targets)

    def samples(self, seed: int, data: str | None) -> NoisySamples:
        from unet.data import NoisySamples, read_images

        return NoisySamples(*read_images(data, self.config), seed)

    def _stage(self, stage: int, n_stages: int, seed: int) -> nn.Module:
        from unet.model import UNetStage

        return UNetStage(self.config, stage, n_stages, seed)


class UNetJobType:
    """The command line of the U-Transformer."""

    title = "Train a U-Transformer over pipeline stages on different device meshes."
    example = "torchrun --standalone --nproc-per-node 5 examples/unet/train.py --stages 2,3"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("model").add_argument
        add("--model", default="tiny", metavar="NAME", help=f"{', '.join(MODELS)} (%(default)s)")
        add("--data", metavar="PATH", help="folder with a folder of images per label (scikit-learn's digits)")

    def from_arguments(self, args: argparse.Namespace) -> UNetJob:
        return UNetJob(model_config(args.model))
