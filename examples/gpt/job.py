"""The GPT as a job of the training program."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from training.layout import RunLayout, check_heads, nearest_multiple

from gpt.config import MODELS, ModelConfig, model_config

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from gpt.data import TextSamples

_SIZES = ("layers", "heads", "width", "seq_len")


@dataclass(frozen=True)
class GptJob:
    """A GPT of one size on byte-level text. See training.job.Job."""

    config: ModelConfig
    name: str = "GPT"
    unit: str = "tokens"
    loss_unit: str = "nats per byte"

    @property
    def layers(self) -> int:
        return self.config.layers

    @property
    def units_per_sample(self) -> int:
        return self.config.seq_len

    def parameters(self) -> int:
        return self.config.parameters()

    def check(self, run: RunLayout) -> None:
        heads, width = self.config.heads, self.config.width

        def remedy(ranks: int) -> str:
            fit = nearest_multiple(heads, ranks)
            return f"--heads {fit}" + ("" if width % fit == 0 else f" --width {nearest_multiple(width, fit)}")

        check_heads(run, heads, remedy)

    def about(self) -> dict[str, Any]:
        return asdict(self.config)

    def build_stage(self, stage: int, n_stages: int, seed: int) -> nn.Module:
        from gpt.model import build_stage

        return build_stage(self.config, stage, n_stages, seed)

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        from gpt.model import GPTStage, parallelize

        assert isinstance(module, GPTStage)
        if mesh["tensor"].size() > 1:
            parallelize(module, mesh["tensor"])

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        from gpt.model import GPTStage

        assert isinstance(module, GPTStage)
        return list(module.layers.values())

    def shared_parameters(self, stage: int, n_stages: int) -> dict[str, str]:
        if not self.config.tied or n_stages == 1:
            return {}
        from gpt.model import TIED

        return {0: {TIED: TIED}, n_stages - 1: {TIED: "head.output.weight"}}.get(stage, {})

    def edges(self, n_stages: int) -> None:  # noqa: ARG002
        return None  # the hidden state goes from each stage to the next

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from gpt.model import loss_fn

        return loss_fn(outputs, targets)

    def samples(self, seed: int, data: str | None) -> TextSamples:
        from gpt.data import TextSamples, read_text

        return TextSamples(read_text(data), self.config.seq_len, seed)


class GptJobType:
    """The command line of the GPT."""

    title = "Train a GPT over pipeline stages on different device meshes."
    example = "torchrun --standalone --nproc-per-node 5 examples/gpt/train.py --stages 2,3"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("model").add_argument
        add("--model", default="tiny", metavar="NAME", help=f"{', '.join(MODELS)} (%(default)s)")
        for name in _SIZES:
            add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"replace the model's {name}")
        add("--tied", action="store_true", help="one matrix for embedding and head")
        add("--data", metavar="PATH", help="text file or folder (the sources of Python's standard library)")

    def from_arguments(self, args: argparse.Namespace) -> GptJob:
        sizes = {name: getattr(args, name) for name in _SIZES}
        return GptJob(model_config(args.model, tied=args.tied, **sizes))
