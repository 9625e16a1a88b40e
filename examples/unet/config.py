"""Sizes of the model. Imports no torch: a wrong command line is answered in well under a second."""

from dataclasses import dataclass

from training.layout import ConfigError, nearest_name

LAYERS = 13
"""As the cross-mesh resharding paper counts them (Zhuang et al., MLSys 2023): 0 first convolution, 1 to 4
down, 5 and 6 middle, 7 and 8 first up block, 9 to 11 up, 12 last convolution."""


@dataclass(frozen=True)
class UNetConfig:
    """One U-Transformer: four levels of width C, 2C, 4C, 4C; attention on all but the last one."""

    channels: int  # C
    image: int = 32  # height and width; divisible by 8
    head_width: int = 8
    labels: int = 10  # kinds of image, which cross-attention looks at
    label_tokens: int = 4  # vectors that describe a kind
    image_channels: int = 3

    @property
    def widths(self) -> tuple[int, int, int, int]:
        return (self.channels, 2 * self.channels, 4 * self.channels, 4 * self.channels)

    @property
    def heads(self) -> int:
        """Of the narrowest attention; the others have a multiple of it."""
        return self.channels // self.head_width

    @property
    def embedding(self) -> int:
        """Width of what describes time and label."""
        return 4 * self.channels


# The large ones have the widths of the U-Transformer jobs of the paper and go by the names they have there.
MODELS: dict[str, UNetConfig] = {
    "nano": UNetConfig(channels=8, image=16, head_width=4),
    "tiny": UNetConfig(channels=16, image=16),
    "small": UNetConfig(channels=64),
    "470M": UNetConfig(channels=320),
    "1B": UNetConfig(channels=480),
    "1.2B": UNetConfig(channels=512),
    "1.8B": UNetConfig(channels=640),
    "2B": UNetConfig(channels=672),
}


def model_config(name: str) -> UNetConfig:
    """The model of that name. Raises ConfigError on unknown names."""
    if name not in MODELS:
        nearest = nearest_name(name, MODELS)
        raise ConfigError(f"--model {name}: unknown; choose one of {', '.join(MODELS)}; nearest: {nearest}")
    return MODELS[name]
