"""Which ranks form which stage, and the checks that refuse a wrong combination before anything starts.

Imports no torch: a wrong command line is answered in well under a second.
"""

import math
from dataclasses import dataclass
from itertools import pairwise


class ConfigError(ValueError):
    """A combination of options that cannot run; the message names the nearest valid choice."""


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


def check_run(layers: int, run: RunLayout, world_size: int) -> None:
    """Raise ConfigError unless layers, stages, batch and the ranks that torchrun started fit together."""
    listed = ",".join(map(str, run.stages))
    n_stages = len(run.stages)
    if run.world_size != world_size:
        even = ",".join(str(n) for n in even_stages(n_stages, world_size))
        raise ConfigError(
            f"--stages {listed} needs {run.world_size} ranks, but {world_size} started; "
            f"use torchrun --nproc-per-node {run.world_size}, or --stages {even}"
        )
    if n_stages > layers:
        raise ConfigError(
            f"--stages {listed} has {n_stages} stages for {layers} layers; every stage needs a layer: "
            f"use at most {layers} stages"
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
