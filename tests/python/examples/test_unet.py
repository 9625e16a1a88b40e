"""The U-Transformer example without process groups: cuts into stages, data, refused options."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from training import options
from training.layout import ConfigError
from unet import data, model
from unet.config import LAYERS, MODELS
from unet.job import UNetJobType

pytestmark = pytest.mark.timeout(120)
NANO = MODELS["nano"]
SIZES = {"470M": 0.47, "1B": 1.0, "1.2B": 1.2, "1.8B": 1.8, "2B": 2.0}  # what the paper calls them


def sample(batch: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    images, labels = data.read_images(None, NANO)
    return data.NoisySamples(images, labels, seed=0).train(0, batch)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("470M", 0.39898), ("1B", 0.89753), ("1.2B", 1.02116), ("1.8B", 1.59545), ("2B", 1.75896)],
)
def test_sizes_with_the_widths_of_the_paper_have_their_parameters(name: str, billions: float) -> None:
    job = UNetJobType().from_arguments(argparse.Namespace(model=name))
    assert job.parameters() / 1e9 == pytest.approx(billions, abs=1e-5)
    assert 0.84 < job.parameters() / 1e9 / SIZES[name] < 0.9


@pytest.mark.parametrize("n_stages", [2, 3, 5, LAYERS])
def test_stages_wired_by_their_edges_equal_the_whole_model(n_stages: int) -> None:
    inputs, noise = sample(3)
    whole = model.UNetStage(NANO, 0, 1, seed=3)
    stages = [model.UNetStage(NANO, i, n_stages, seed=3) for i in range(n_stages)]
    edges = model.crossing(n_stages).edges()
    made: list[tuple[torch.Tensor, ...]] = []
    for index, stage in enumerate(stages):
        own = sorted((edge for edge in edges if edge.to_stage == index), key=lambda edge: edge.input)
        assert [edge.input for edge in own] == list(range(len(own)))
        values = [made[edge.from_stage][edge.output] for edge in own] if index else list(inputs)
        outputs = stage(*values)
        made.append(outputs if isinstance(outputs, tuple) else (outputs,))
    expected = whole(*inputs)
    torch.testing.assert_close(made[-1][0], expected, rtol=0, atol=0)
    model.loss_fn(made[-1][0], noise).backward()
    model.loss_fn(expected, noise).backward()
    parts = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    whole_grads = {name: p.grad for name, p in whole.named_parameters()}
    assert parts.keys() == whole_grads.keys()
    for name, grad in whole_grads.items():
        torch.testing.assert_close(parts[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_skip_connections_cross_the_cut_as_tensors_of_their_own() -> None:
    found = model.crossing(2)
    assert {"hidden", "skip1", "skip2", "skip3", "skip4"} <= set(found.outputs[0])
    inputs, _ = sample(2)
    outputs = model.UNetStage(NANO, 0, 2, seed=0)(*inputs)
    shapes = dict(zip(found.outputs[0], (tuple(o.shape) for o in outputs), strict=True))
    assert shapes["skip1"] == (2, 8, 16, 16)
    assert shapes["skip2"] == (2, 16, 8, 8)
    assert shapes["skip4"] == (2, 32, 2, 2)


def test_a_rank_without_samples_takes_part() -> None:
    inputs, _ = sample(2)
    whole = model.UNetStage(NANO, 0, 1, seed=0)
    outputs = whole(*(x[:0] for x in inputs))
    assert outputs.shape == (0, 3, 16, 16)
    outputs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in whole.parameters())


def test_samples_depend_on_seed_and_step_alone() -> None:
    images, labels = data.read_images(None, NANO)
    assert images.shape == (1797, 3, 16, 16)
    assert images.min() == -1
    assert images.max() == 1
    (noisy, moment, label), noise = data.NoisySamples(images, labels, 5).train(7, 4)
    (again, _, _), _ = data.NoisySamples(images, labels, 5).train(7, 4)
    assert torch.equal(noisy, again)
    assert noisy.shape == noise.shape == (4, 3, 16, 16)
    assert moment.min() >= 0
    assert moment.max() < 1
    for other in (
        data.NoisySamples(images, labels, 6).train(7, 4),
        data.NoisySamples(images, labels, 5).held_out(7, 4),
    ):
        assert not torch.equal(noisy, other[0][0])
    # At moment 0 nothing is noise, at moment 1 everything.
    angle = moment[0] * torch.pi / 2
    clean = (noisy[0] - angle.sin() * noise[0]) / angle.cos()
    assert (images[labels == label[0]] - clean).abs().amax(dim=(1, 2, 3)).min() < 1e-3


def test_a_folder_of_images_is_read_by_label(tmp_path: Path) -> None:
    from matplotlib.image import imsave

    for kind, shade in (("a", 0.0), ("b", 1.0)):
        (tmp_path / kind).mkdir()
        for number in range(6):
            imsave(
                tmp_path / kind / f"{number}.png",
                torch.full((20, 30), shade).numpy(),
                cmap="gray",
                vmin=0,
                vmax=1,
            )
    images, labels = data.read_images(str(tmp_path), NANO)
    assert images.shape == (12, 3, 16, 16)
    for image, label in zip(images, labels, strict=True):
        assert torch.allclose(image, torch.full_like(image, -1.0 if label == 0 else 1.0), atol=1e-5)
    with pytest.raises(ConfigError, match="no such folder"):
        data.read_images(str(tmp_path / "nowhere"), NANO)


@pytest.mark.parametrize(
    ("command", "ranks", "said"),
    [
        ("--model huge", 5, "unknown; choose one of nano, tiny"),
        ("--stages 2,2", 5, "use torchrun --nproc-per-node 4"),
        ("--stages 2,3 --batch 25", 5, "--batch 24"),
        ("--stages 1,1,1,1,1,1,1,1,1,1,1,1,1,1", 14, "14 stages for 13 layers"),
        ("--model 470m", 5, "--model 470m: unknown; .*; nearest: 470M"),
        ("--schedule ZB", 5, "--schedule ZB: unknown; use ZBH"),
        ("--microbatches 0", 5, "--microbatches 0: both must be at least 1"),
        ("--stages 1x4,1", 5, "2 heads cannot be shared evenly by 4 tensor-parallel ranks; use 1x2"),
        ("--heads 4", 5, "--heads: no such option"),
        ("--stages 1x3,2", 5, "2 heads cannot be shared evenly by 3 tensor-parallel ranks; use 1x2"),
    ],
)
def test_a_wrong_combination_is_refused_with_the_nearest_choice(command: str, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        options.parse(UNetJobType(), command.split(), ranks)
