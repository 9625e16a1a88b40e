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


def same_as_loaded(make, load, checkpoint: Mapping[str, torch.Tensor], **options) -> RecordedDestinations:
    """Records the loader on what make() gives, moves the checkpoint, and compares with the loader's own
    result."""
    model, expected = make(), make()
    recorded = meshcast.record_destinations(model, lambda w: load(model, w), checkpoint, **options)
    moved(recorded, checkpoint)
    load(expected, checkpoint.items())
    for name, x in expected.items():
        assert torch.equal(raw(model[name]), raw(x)), name
    return recorded


def test_the_loader_gets_what_shares_a_tensor_with_what_it_calculates() -> None:
    def load(model, weights) -> None:
        for name, x in weights:
            if name == "a":
                model["doubled"].copy_(x * 2)
                model["covered"].copy_(x)
            else:
                model["covered"][:2].copy_(x[:2])  # over what "a" has left there

    checkpoint = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10}
    recorded = same_as_loaded(
        lambda: {"doubled": torch.zeros(4), "covered": torch.zeros(4)}, load, checkpoint
    )
    assert "aten.mul" in recorded.left["doubled"]
    assert "test_recorder.py:" in recorded.left["doubled"]
    assert "'a' goes into it" in recorded.left["covered"]


def test_constants_of_a_loader() -> None:
    """Uniform ones, others, negative zeros, and a table that the loader looks up; saved and loaded again."""

    def load(model, weights) -> None:
        model["table"].copy_(torch.arange(6.0).view(2, 3).t())
        model["zeros"].copy_(torch.tensor([0.0, -0.0, 0.0]))
        model["padded"].fill_(0.25)
        for _, x in weights:
            model["padded"][1:3].copy_(x)

    def make() -> dict[str, torch.Tensor]:
        return {"table": torch.ones(3, 2), "zeros": torch.ones(3), "padded": torch.ones(5)}

    checkpoint = {"x": torch.tensor([3.0, 4.0])}
    recorded = same_as_loaded(make, load, checkpoint)
    assert not recorded.left


def test_a_file_of_another_format_is_refused(tmp_path) -> None:
    model = torch.nn.Linear(2, 3)
    path = tmp_path / "recorded.json"
    meshcast.record_destinations(model, names_and_shapes=dict(model.state_dict())).save(path)
    assert "recorded/1" in path.read_text()
    with pytest.raises(meshcast.LayoutError, match="record again"):
        meshcast.RecordedDestinations.load(path, torch.nn.Linear(2, 4))._memory()
    path.write_text(path.read_text().replace("recorded/1", "recorded/0"))
    with pytest.raises(meshcast.LayoutError, match="format"):
        meshcast.RecordedDestinations.load(path, model)
    path.write_text('{"format": "meshcast.recorded/1", "recording": [3]}')
    with pytest.raises(meshcast.LayoutError, match="cannot be read"):
        meshcast.RecordedDestinations.load(path, model)


def test_nothing_is_written_by_a_recording() -> None:
    """Also where the loader clears its memory first, or fails in the middle."""
    model = {"w": torch.arange(4.0)}

    def load(weights) -> None:
        model["w"].zero_()
        model["w"].copy_(dict(weights)["w"])

    meshcast.record_destinations(model, load, {"w": (4,)})
    assert model["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(meshcast.LayoutError, match=r"the loader failed.*test_recorder.py:\d+: KeyError: 'w'"):
        meshcast.record_destinations(model, load, {"v": (4,)})
    assert model["w"].tolist() == [0, 1, 2, 3]


def test_parameters_that_no_tensor_reaches_are_refused() -> None:
    model = torch.nn.Linear(2, 3)

    def load(weights) -> None:
        model.weight.data.copy_(dict(weights)["weight"])

    names = {"weight": ((3, 2), torch.float32)}
    with pytest.raises(meshcast.LayoutError, match="leaves 'bias' as they are"):
        meshcast.record_destinations(model, load, names)
    assert not meshcast.record_destinations(model, load, names, strict=False).left
