"""Sizes of the model. Imports no torch: a wrong command line is answered in well under a second."""

from dataclasses import dataclass, replace

from training.layout import ConfigError, nearest_multiple, nearest_name


@dataclass(frozen=True)
class ModelConfig:
    """One GPT. As in GPT-3 (Brown et al. 2020, section 2.1) the MLP is four times as wide as the model."""

    layers: int
    heads: int
    width: int
    seq_len: int
    vocab: int = 256
    tied: bool = False

    def parameters(self) -> int:
        """Number of parameters: 12 w^2 + 13 w per layer, embeddings, last norm, untied head."""
        w = self.width
        head = 0 if self.tied else self.vocab * w
        return self.layers * (12 * w * w + 13 * w) + (self.vocab + self.seq_len) * w + 2 * w + head


# The three large ones are the GPT jobs of the cross-mesh resharding paper (Zhuang et al., MLSys 2023),
# sequence length and vocabulary included. The others have one token per byte.
MODELS: dict[str, ModelConfig] = {
    "nano": ModelConfig(layers=2, heads=2, width=32, seq_len=32),
    "tiny": ModelConfig(layers=4, heads=4, width=96, seq_len=64),
    "small": ModelConfig(layers=8, heads=8, width=384, seq_len=256),
    "125M": ModelConfig(layers=12, heads=12, width=768, seq_len=1024),
    "1.3B": ModelConfig(layers=24, heads=32, width=2048, seq_len=1024, vocab=51200),
    "2.6B": ModelConfig(layers=32, heads=32, width=2560, seq_len=1024, vocab=51200),
    "39B": ModelConfig(layers=48, heads=64, width=8192, seq_len=1024, vocab=51200),
}


def model_config(
    name: str,
    *,
    layers: int | None = None,
    heads: int | None = None,
    width: int | None = None,
    seq_len: int | None = None,
    tied: bool = False,
) -> ModelConfig:
    """The model of that name with some sizes replaced. Raises ConfigError on unknown names, unfit sizes."""
    if name not in MODELS:
        nearest = nearest_name(name, MODELS)
        raise ConfigError(f"--model {name}: unknown; choose one of {', '.join(MODELS)}; nearest: {nearest}")
    given = {"layers": layers, "heads": heads, "width": width, "seq_len": seq_len}
    changes = {key: value for key, value in given.items() if value is not None}
    for key, value in changes.items():
        if value < 1:
            raise ConfigError(f"--{key.replace('_', '-')} {value}: must be at least 1")
    config = replace(MODELS[name], tied=tied, **changes)
    if config.width % config.heads:
        divisors = [h for h in range(1, config.width + 1) if config.width % h == 0]
        fit = min(divisors, key=lambda h: abs(h - config.heads))
        raise ConfigError(
            f"--width {config.width} is not divisible by --heads {config.heads}; "
            f"use --heads {fit}, or --width {nearest_multiple(config.width, config.heads)}"
        )
    return config
