"""A random state for each micro-batch: what a stage draws for it does not depend on the schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshcast.base.checks import typed_arguments
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = ["microbatch_seed", "random_state"]


@typed_arguments()
def microbatch_seed(seed: int, step: int, stage: int, microbatch: int, part: int = 0) -> int:
    """The seed that `torch.manual_seed` gets before the forward of a micro-batch, to draw the same elsewhere.

    Args:
        seed: of the schedule.
        step: how many calls of ``step`` and ``eval`` the schedule has completed.
        part: which part of the samples the rank has, 0 where they are not split: ranks with other samples
            draw other numbers, those that share samples (tensor parallelism) the same.
        stage, microbatch: of the forward.

    Example::

        from meshcast.pipelining import microbatch_seed

        torch.manual_seed(microbatch_seed(7, step=0, stage=1, microbatch=3))  # of a schedule with seed=7
    """
    text = f"{seed} {step} {stage} {microbatch} {part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def random_state(seed: tuple[int, int], stage: PipelineStage, microbatch: int) -> Iterator[None]:
    """Sets the random state of one forward; afterwards the process has its previous one again. For a stage
    on a GPU, this includes the random state of the GPU.

    seed: of the schedule, and the step.
    """
    generators = [torch.default_generator]
    if stage.device.type == "cuda":
        generators.append(torch.cuda.default_generators[stage.device.index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(microbatch_seed(*seed, stage.stage_index, microbatch, stage.batch_part))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
