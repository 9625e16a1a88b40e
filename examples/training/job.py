"""What a training program has to say about its model and data; everything else is the same for all of them.

Imports no torch: a wrong command line is answered in well under a second.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from training.layout import RunLayout

if TYPE_CHECKING:
    from meshcast.pipelining import Edge
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


class Samples(Protocol):
    """Batches that depend on (seed, step) alone: every layout, and a run that resumes, sees the same data."""

    def train(self, step: int, batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """(inputs of the model, targets) of a step; dimension 0 of each is the batch."""
        ...

    def held_out(self, index: int, batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The same from data that is never trained on."""
        ...


class Job(Protocol):
    """A model of a size, cut into stages by consecutive layers, and its data."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What throughput counts: "tokens"."""
        ...

    @property
    def loss_unit(self) -> str: ...

    @property
    def layers(self) -> int:
        """Layers that stages are cut between."""
        ...

    @property
    def units_per_sample(self) -> int: ...

    def parameters(self) -> int: ...

    def check(self, run: RunLayout) -> None:
        """Raises ConfigError where this model cannot run in that layout."""
        ...

    def about(self) -> dict[str, Any]:
        """Everything that makes another model of it: a checkpoint of one cannot be read into another."""
        ...

    def build_stage(self, stage: int, n_stages: int, seed: int) -> nn.Module:
        """Stage `stage` of `n_stages`; of one, the whole model. Equal weights for every cut and rank."""
        ...

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shares the layers of a stage over its ranks: dimension "data" of the mesh has those with samples of
        their own, "tensor" those that share every layer. check() has allowed it."""
        ...

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The parts of a stage whose activations may be computed again instead of kept."""
        ...

    def edges(self, n_stages: int) -> list[Edge] | None:
        """How values travel between stages; None: from each stage to the next, in order."""
        ...

    def shared_parameters(self, stage: int, n_stages: int) -> dict[str, str]:
        """Of parameters that several stages hold: {name in the first of them: name in this one}."""
        ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Mean over the samples, of what the last stage returns."""
        ...

    def samples(self, seed: int, data: str | None) -> Samples:
        """Raises ConfigError where `data` holds none."""
        ...


class JobType(Protocol):
    """Makes a Job from the command line."""

    title: str
    example: str  # a command line that works

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def from_arguments(self, args: argparse.Namespace) -> Job:
        """Raises ConfigError."""
        ...
