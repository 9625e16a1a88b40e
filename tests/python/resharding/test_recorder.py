"""The recording tensors of record_destinations: what they record, moved by hand, is what the loader does."""

from __future__ import annotations

from collections.abc import Mapping

import meshcast
import pytest
import torch
from meshcast.base.boxes import extents
from meshcast.resharding.recorded import RecordedDestinations
from python.resharding.drawn_loaders import DrawnLoader, loaded

SEEDS = 400


def moved(recorded: RecordedDestinations, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Does on one rank what a transfer does."""
    memory = recorded._memory()
    for name, landing in recorded._landings.items():
        for source in landing.sources:
            for box, (place,), _, steps in source.placed():
                part = checkpoint[source.entry][tuple(slice(*side) for side in box)]
                memory[name].as_strided(extents(box), steps, place).copy_(part)
    whole = {name: checkpoint[name] for name in recorded._whole()}
    # A drawn loader draws other steps where it gets a part of the checkpoint.
    recorded._finish(memory, whole if len(whole) == len(checkpoint) else {})


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_loaders(dtype: torch.dtype) -> None:
    left = recorded_count = 0
    for seed in range(SEEDS):
        loader = DrawnLoader(seed, dtype)
        model = dict(loader.parameters)
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in loader.checkpoint.items()}
        try:
            recorded = meshcast.record_destinations(
                model, loader.load_weights, names_and_shapes=shapes, strict=False
            )
            left += len(recorded.left)
            recorded_count += len(recorded._landings)
            moved(recorded, loader.checkpoint)
        except Exception as error:
            raise AssertionError(f"DrawnLoader({seed}, {dtype})") from error
        expected = loaded(seed, dtype, loader.checkpoint)
        whole = len(recorded._whole()) == len(loader.checkpoint)
        for name, x in loader.parameters.items():
            if name in recorded.left and not whole:
                continue
            assert torch.equal(raw(x), raw(expected[name])), f"DrawnLoader({seed}, {dtype}): {name}"
    print(f"{recorded_count} recorded, {left} left to the loader")
    assert left < recorded_count / 4  # most is recorded
