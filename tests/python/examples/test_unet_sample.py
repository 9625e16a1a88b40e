"""Images drawn from a checkpoint of the U-Transformer: the way from noise to them, and the picture."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from training import checkpoint
from training.layout import ConfigError
from unet import sample
from unet.config import MODELS
from unet.model import UNetStage

pytestmark = pytest.mark.timeout(120)
NANO = MODELS["nano"]


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_with_a_model_that_knows_the_noise_the_image_comes_out(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    images = torch.rand((3, 3, 16, 16), generator=generator) * 2 - 1
    noise = torch.randn(images.shape, generator=generator)
    labels = torch.tensor([4, 0, 9])
    moments = []

    def model(hidden: torch.Tensor, moment: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        assert torch.equal(asked, labels)
        assert moment.shape == (3,)
        moments.append(float(moment[0]))
        angle = moment[:, None, None, None] * torch.pi / 2
        return (hidden - angle.cos() * images) / angle.sin()

    found = sample.denoise(model, noise, labels, steps)
    torch.testing.assert_close(found, images, rtol=0, atol=1e-4)
    expected = [sample.FIRST_MOMENT * (1 - step / steps) for step in range(steps)]
    assert moments == pytest.approx(expected, rel=1e-6)


def test_what_a_model_says_beyond_black_and_white_is_clamped() -> None:
    noise = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    found = sample.denoise(lambda hidden, *_: hidden - 100.0, noise, torch.tensor([0]), 10)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-5)


def test_a_sheet_has_every_image_at_its_place_in_a_frame() -> None:
    rows = [torch.full((3, 3, 2, 2), -1.0), torch.zeros(3, 3, 2, 2)]
    rows[0][1] = 1.0
    picture = sample.sheet(rows, 2)
    assert picture.shape == (2 * 3 * 2, 3 * 3 * 2, 3)
    assert picture[:4, :4].eq(0).all()
    assert picture[:4, 6:10].eq(1).all()
    assert picture[6:10, 6:10].eq(0.5).all()
    assert picture[4:6].eq(1).all()
    assert picture[:, 4:6].eq(1).all()


def test_a_checkpoint_becomes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread

    model = UNetStage(NANO, 0, 1, seed=5)
    folder = tmp_path / "step-000003"
    state = {"model": {name: parameter.data for name, parameter in model.named_parameters()}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / checkpoint.ABOUT).write_text(json.dumps({"model": dataclasses.asdict(NANO)}))
    loaded = sample.load(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter), name
    png = tmp_path / "new" / "images.png"
    assert (
        sample.main([str(tmp_path), "--output", str(png), "--rows", "2", "--steps", "3", "--scale", "1"]) == 0
    )
    assert str(png) in capsys.readouterr().out
    picture = torch.from_numpy(imread(png).copy())[..., :3]
    assert picture.shape == (3 * 17, 10 * 17, 3)
    noise = torch.randn((2, 10, 3, 16, 16), generator=sample.generator_for(0, "sample"))
    images = sample.denoise(model, noise.flatten(0, 1), torch.arange(10).repeat(2), 3)
    expected = sample.sheet([noise[0], *images.view(noise.shape)], 1)
    torch.testing.assert_close(picture, expected, rtol=0, atol=1.01 / 255)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no checkpoint in"),
        (("--rows", "0"), "--rows 0: must be at least 1"),
        (("--output", "/dev/null/x.png"), "cannot be written below /dev/null"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.main([str(tmp_path / "none"), *arguments])
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    for about in ("{}", '{"model": {"layers": 2}}', "no JSON"):
        (folder / checkpoint.ABOUT).write_text(about)
        with pytest.raises(ConfigError, match=r"step-000001 was not written by examples/unet/train.py"):
            sample.load(tmp_path)
