"""Sizes of the model and the run, and the checks that refuse a wrong combination before anything starts.

Imports no torch: a wrong command line is answered in well under a second.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise


class ConfigError(ValueError):
    """A combination of options that cannot run; the message names the nearest valid choice."""


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


@dataclass(frozen=True)
class RunLayout:
    """Which ranks form which stage, and how one batch is cut.

    stages: data-parallel degree of every stage; stage i owns the next stages[i] ranks. batch: samples per
    optimiser step; microbatches: pieces of it that flow through the pipeline one after the other.
    """

    stages: tuple[int, ...]
    batch: int
    microbatches: int

    @property
    def world_size(self) -> int:
        return sum(self.stages)

    @property
    def microbatch(self) -> int:
        """Samples per micro-batch over all ranks of a stage."""
        return self.batch // self.microbatches

    def stage_ranks(self, stage: int) -> list[int]:
        first = sum(self.stages[:stage])
        return list(range(first, first + self.stages[stage]))

    def stage_of(self, rank: int) -> int:
        return next(i for i in range(len(self.stages)) if rank in self.stage_ranks(i))


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
        raise ConfigError(f"--model {name}: unknown; choose one of {', '.join(MODELS)}")
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


def parse_stages(text: str) -> tuple[int, ...]:
    """'2,3' -> (2, 3). Raises ConfigError unless it is a list of positive numbers."""
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError:
        stages = ()
    if not stages or min(stages) < 1:
        raise ConfigError(
            f"--stages {text}: expected ranks per stage with commas between, as in --stages 2,3"
        )
    return stages


def check_run(config: ModelConfig, run: RunLayout, world_size: int) -> None:
    """Raise ConfigError unless model, stages, batch and the ranks that torchrun started fit together."""
    listed = ",".join(map(str, run.stages))
    n_stages = len(run.stages)
    if run.world_size != world_size:
        even = ",".join(str(n) for n in even_stages(n_stages, world_size))
        raise ConfigError(
            f"--stages {listed} needs {run.world_size} ranks, but {world_size} started; "
            f"use torchrun --nproc-per-node {run.world_size}, or --stages {even}"
        )
    if n_stages > config.layers:
        raise ConfigError(
            f"--stages {listed} has {n_stages} stages for {config.layers} layers; every stage needs a layer: "
            f"use at most {config.layers} stages, or --layers {n_stages}"
        )
    if config.tied and n_stages > 1:
        raise ConfigError(
            "--tied needs embedding and head in one stage: one parameter cannot live on two meshes yet; "
            f"use --stages {world_size}, or leave --tied out"
        )
    if run.microbatches < 1 or run.batch < 1:
        raise ConfigError(f"--batch {run.batch} --microbatches {run.microbatches}: both must be at least 1")
    grain = math.lcm(*run.stages) * run.microbatches
    if run.batch % grain:
        degrees = " and ".join(str(s) for s in sorted(set(run.stages)))
        raise ConfigError(
            f"--batch {run.batch} cannot be cut into {run.microbatches} micro-batches that divide by "
            f"{degrees} ranks; use a multiple of {grain}: --batch {nearest_multiple(run.batch, grain)}"
        )


def split_layers(layers: int, n_stages: int) -> list[range]:
    """Consecutive layers for every stage, as even as possible; earlier stages get the odd ones."""
    size, odd = divmod(layers, n_stages)
    bounds = [i * size + min(i, odd) for i in range(n_stages + 1)]
    return [range(lo, hi) for lo, hi in pairwise(bounds)]


def nearest_multiple(value: int, grain: int) -> int:
    return max(grain, round(value / grain) * grain)


def even_stages(n_stages: int, world_size: int) -> tuple[int, ...]:
    """The ranks shared out evenly over so many stages, or over as many as there are ranks."""
    return tuple(len(part) for part in split_layers(world_size, min(n_stages, world_size)))
