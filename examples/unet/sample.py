"""Images from a checkpoint, in one process, whatever layout wrote it.

python examples/unet/sample.py out/digits --output out/digits.png
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from training.checkpoint import ABOUT, complete
from training.command_line import Parser, check_writable, config_errors_exit
from training.layout import ConfigError
from training.rng import generator_for

from unet.config import UNetConfig
from unet.model import UNetStage

FIRST_MOMENT = 0.98  # at 1 nothing is left of the image, and what the model says about it means nothing


def load(root: Path) -> UNetStage:
    """The whole model of the newest checkpoint. Raises ConfigError where there is none of a U-Transformer."""
    folders = complete(root)
    if not folders:
        raise ConfigError(f"no checkpoint in {root}; train.py --checkpoint {root} writes one")
    try:
        config = UNetConfig(**json.loads((folders[-1] / ABOUT).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{folders[-1]} was not written by examples/unet/train.py") from None
    model = UNetStage(config, 0, 1, seed=0)
    state = {"model": {name: parameter.data for name, parameter in model.named_parameters()}}
    dcp.load(state, checkpoint_id=folders[-1], no_dist=True)
    return model


@torch.no_grad()
def denoise(model: nn.Module, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Images of -1..1 from noise, both (n, channels, size, size), labels (n,): DDIM without noise of its own
    (Song et al. 2021, section 4.1).

    At moment t an image is cos(t pi/2) image + sin(t pi/2) noise. The model says what the noise is, hence
    what the image; both are put together again for the moment before, till nothing of the noise is left.
    """
    angles = torch.linspace(FIRST_MOMENT, 0.0, steps + 1, dtype=torch.float64) * (math.pi / 2)
    hidden = noise
    for angle, earlier in zip(angles[:-1].tolist(), angles[1:].tolist(), strict=True):
        moment = torch.full((len(noise),), angle / (math.pi / 2))
        found = model(hidden, moment, labels)
        image = ((hidden - math.sin(angle) * found) / math.cos(angle)).clamp(-1.0, 1.0)
        found = (hidden - math.cos(angle) * image) / math.sin(angle)  # of the image that was clamped
        hidden = math.cos(earlier) * image + math.sin(earlier) * found
    return hidden


def sheet(rows: list[Tensor], scale: int) -> Tensor:
    """One picture, (height, width, channels) in 0..1, of rows of images in -1..1, a pixel as a square of
    `scale` and a frame around each."""
    framed = [nn.functional.pad((row.clamp(-1, 1) + 1) / 2, (0, 1, 0, 1), value=1.0) for row in rows]
    whole = torch.cat([torch.cat(list(row), dim=2) for row in framed], dim=1)
    return whole.repeat_interleave(scale, 1).repeat_interleave(scale, 2).permute(1, 2, 0)


def main(argv: list[str]) -> int:
    parser = Parser(description="Images from a checkpoint of examples/unet/train.py.")
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="DIR", help="what train.py --checkpoint was given")
    add("--output", type=Path, default=Path("sample.png"), metavar="PNG", help="(%(default)s)")
    add("--rows", type=int, default=4, metavar="N", help="images of every label (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="of denoising (%(default)s)")
    add("--scale", type=int, default=3, metavar="N", help="a pixel is a square of N (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the noise (%(default)s)")
    with config_errors_exit():
        args = parser.parse_args(argv)
        for name in ("rows", "steps", "scale"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name} {getattr(args, name)}: must be at least 1")
        check_writable("output", args.output, "file")
        model = load(args.checkpoint)
    from matplotlib.image import imsave

    config = model.config
    shape = (args.rows, config.labels, config.image_channels, config.image, config.image)
    noise = torch.randn(shape, generator=generator_for(args.seed, "sample"))
    labels = torch.arange(config.labels).repeat(args.rows)
    images = denoise(model, noise.flatten(0, 1), labels, args.steps).view(shape)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    imsave(args.output, sheet([noise[0], *images], args.scale).numpy())
    print(f"{args.output}: above the noise that the row below came from, then a column for each label")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
