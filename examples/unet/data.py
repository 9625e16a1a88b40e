"""Small images with labels: the handwritten digits that scikit-learn ships, or a folder of yours.

The samples of a step depend on (seed, step) alone: every layout, and a run that resumes, sees the same data.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from training.layout import ConfigError
from training.rng import generator_for

from unet.config import UNetConfig

HELD_OUT = 10  # the last 1/10 of the images is for evaluation
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})


def read_images(path: str | None, config: UNetConfig) -> tuple[Tensor, Tensor]:
    """Images in -1..1, float32 (n, channels, size, size), and labels, int64 (n,). Raises ConfigError."""
    images, labels = _digits() if path is None else _folder(Path(path), config)
    images = F.interpolate(images, size=(config.image, config.image), mode="nearest")
    if images.shape[1] == 1:
        images = images.expand(-1, config.image_channels, -1, -1)
    shuffled = torch.randperm(len(images), generator=generator_for("order of images"))
    return images[shuffled].contiguous(), labels[shuffled]


def _digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the digits come with scikit-learn: pip install scikit-learn, or give --data"
        ) from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8.0 - 1.0
    return images, torch.from_numpy(digits.target).long()


def _folder(root: Path, config: UNetConfig) -> tuple[Tensor, Tensor]:
    """Images below `root`; each folder in it is a label."""
    try:
        from matplotlib.image import imread
    except ImportError:
        raise ConfigError("--data: images are read by matplotlib: pip install matplotlib") from None
    if not root.is_dir():
        raise ConfigError(f"--data {root}: no such folder")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    kinds = sorted({path.parent for path in files})
    if not files:
        raise ConfigError(f"--data {root}: no image in it (looked for {', '.join(sorted(SUFFIXES))})")
    if len(kinds) > config.labels:
        raise ConfigError(
            f"--data {root}: {len(kinds)} folders of images; the model knows {config.labels} labels"
        )
    images = []
    for path in files:
        try:
            pixels = torch.from_numpy(imread(path).copy()).float()
        except (OSError, ValueError, SyntaxError) as error:  # all three are what readers of images raise
            raise ConfigError(f"--data {path}: cannot be read as an image ({error}); remove it") from None
        pixels = pixels / (255.0 if pixels.max() > 1 else 1.0)
        pixels = pixels[..., None].expand(-1, -1, 3) if pixels.ndim == 2 else pixels[..., :3]
        side = min(pixels.shape[:2])
        square = pixels[:side, :side].permute(2, 0, 1)[None]
        images.append(F.interpolate(square, size=(config.image, config.image), mode="area") * 2.0 - 1.0)
    return torch.cat(images), torch.tensor([kinds.index(path.parent) for path in files])


class NoisySamples:
    """Images with noise as ((noisy, moment, label), noise): the model is to say what the noise was.

    At moment t in 0..1 an image x has become cos(t pi/2) x + sin(t pi/2) noise.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        cut = len(images) - len(images) // HELD_OUT
        self.parts = {"train": (images[:cut], labels[:cut]), "held out": (images[cut:], labels[cut:])}
        self.seed = seed
        if len(images) < HELD_OUT:
            raise ConfigError(f"--data: {len(images)} images are too few; give at least {HELD_OUT}")

    def train(self, step: int, batch: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        return self._draw("train", step, batch)

    def held_out(self, index: int, batch: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        return self._draw("held out", index, batch)

    def _draw(self, part: str, index: int, batch: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        generator = generator_for(self.seed, part, index)
        images, labels = self.parts[part]
        chosen = torch.randint(0, len(images), (batch,), generator=generator)
        moment = torch.rand((batch,), generator=generator)
        noise = torch.randn(images[chosen].shape, generator=generator)
        angle = (moment * (math.pi / 2))[:, None, None, None]
        return (angle.cos() * images[chosen] + angle.sin() * noise, moment, labels[chosen]), noise
