"""Which ranks form which stage, and the checks that refuse a wrong combination before anything starts.

Imports no torch: a wrong command line is answered in well under a second.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise


class ConfigError(ValueError):
    """A combination of options that cannot run; the message names the nearest valid choice."""


@dataclass(frozen=True)
class StageShape:
    """The mesh of one stage: `data` groups of ranks with samples of their own, `tensor` ranks in each that
    share every layer."""

    data: int
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return str(self.data) if self.tensor == 1 else f"{self.data}x{self.tensor}"


@dataclass(frozen=True)
class RunLayout:
    """Which ranks form which stage, and how one batch is cut.

    stages: stage i owns the next stages[i].ranks ranks. batch: samples per optimiser step; passes: equal
    parts of it that run through the pipeline before the step; microbatches: pieces of a pass that flow
    through it one after the other.
    """

    stages: tuple[StageShape, ...]
    batch: int
    microbatches: int
    passes: int = 1

    def __str__(self) -> str:
        return ",".join(map(str, self.stages))

    @property
    def world_size(self) -> int:
        return sum(stage.ranks for stage in self.stages)

    @property
    def microbatch(self) -> int:
        """Samples per micro-batch over all ranks of a stage."""
        return self.batch // (self.microbatches * self.passes)

    def stage_ranks(self, stage: int) -> list[int]:
        first = sum(shape.ranks for shape in self.stages[:stage])
        return list(range(first, first + self.stages[stage].ranks))

    def stage_of(self, rank: int) -> int:
        return next(i for i in range(len(self.stages)) if rank in self.stage_ranks(i))


def parse_stages(text: str) -> tuple[StageShape, ...]:
    """'2,3' or '2x2,3': ranks of every stage, or its data-parallel times its tensor-parallel degree. Raises
    ConfigError on anything else."""
    matches = [re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", part) for part in text.split(",")]
    stages = tuple(StageShape(int(m[1]), int(m[2] or 1)) for m in matches if m is not None)
    if len(stages) != len(matches):
        raise ConfigError(
            f"--stages {text}: expected ranks per stage with commas between, as in --stages 2,3, "
            "or data-parallel x tensor-parallel degrees, as in --stages 2x2,3"
        )
    return stages


def check_run(layers: int, run: RunLayout, world_size: int) -> None:
    """Raise ConfigError unless layers, stages, batch and the ranks that torchrun started fit together."""
    listed = str(run)
    n_stages = len(run.stages)
    if run.world_size != world_size:
        even = ",".join(map(str, even_stages(n_stages, world_size)))
        raise ConfigError(
            f"--stages {listed} needs {run.world_size} ranks, but {world_size} started; "
            f"use torchrun --nproc-per-node {run.world_size}, or --stages {even}"
        )
    if n_stages > layers:
        raise ConfigError(
            f"--stages {listed} has {n_stages} stages for {layers} layers; every stage needs a layer: "
            f"use at most {layers} stages"
        )
    if run.microbatches < 1:
        raise ConfigError(f"--batch {run.batch} --microbatches {run.microbatches}: both must be at least 1")
    if run.passes < 1:
        raise ConfigError(f"--accumulate {run.passes}: must be at least 1")
    degrees = sorted({stage.data for stage in run.stages})
    grain = math.lcm(*degrees) * run.microbatches * run.passes
    if run.batch < 1:
        raise ConfigError(f"--batch {run.batch}: must be a multiple of {grain}: --batch {grain}")
    if run.batch % grain:
        named = " and ".join(map(str, degrees))
        pieces = f"{run.microbatches} micro-batches"
        pieces = pieces if run.passes == 1 else f"{run.passes} passes of {pieces}"
        raise ConfigError(
            f"--batch {run.batch} cannot be cut into {pieces} that divide by "
            f"{named} ranks; use a multiple of {grain}: --batch {nearest_multiple(run.batch, grain)}"
        )


def check_heads(run: RunLayout, heads: int, remedy: Callable[[int], str]) -> None:
    """Raise ConfigError where heads cannot be shared evenly by the tensor-parallel ranks of a stage.

    remedy: what else would help, given their number.
    """
    for stage in run.stages:
        if heads % stage.tensor:
            fit = max(n for n in range(1, stage.tensor) if heads % n == 0)
            raise ConfigError(
                f"--stages {run}: {heads} heads cannot be shared evenly by {stage.tensor} tensor-parallel"
                f" ranks; use {stage.data}x{fit}, or {remedy(stage.tensor)}"
            )


def split_layers(layers: int, n_stages: int) -> list[range]:
    """Consecutive layers for every stage, as even as possible; earlier stages get the odd ones."""
    size, odd = divmod(layers, n_stages)
    bounds = [i * size + min(i, odd) for i in range(n_stages + 1)]
    return [range(lo, hi) for lo, hi in pairwise(bounds)]


def nearest_name(text: str, names: Iterable[str]) -> str:
    """The name that looks most like the text, whatever its case."""
    by_lower = {name.lower(): name for name in names}
    return by_lower[difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=0.0)[0]]


def nearest_multiple(value: int, grain: int) -> int:
    return max(grain, round(value / grain) * grain)


def even_stages(n_stages: int, world_size: int) -> tuple[StageShape, ...]:
    """The ranks shared out evenly over so many stages, or over as many as there are ranks; no tensor
    parallelism."""
    return tuple(StageShape(len(part)) for part in split_layers(world_size, min(n_stages, world_size)))
