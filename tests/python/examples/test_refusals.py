"""What training programs refuse once their command line was read, and how: before any process group."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from multiproc.fork_server import Forked, environment, run

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from gpt.job import GptJobType
from training import checkpoint, command_line, layout, options
from training.layout import ConfigError
from unet.config import MODELS
from unet.data import read_images
from unet.job import UNetJobType

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
REFUSING = """
import sys
from training import command_line
command_line.RANK_0_SPEAKS = float(sys.argv[1])
with command_line.config_errors_exit():
    raise command_line.ConfigError("that is wrong")
"""

pytestmark = pytest.mark.timeout(120)


def resuming(root: Path, *more: str) -> options.Options:
    return options.parse(GptJobType(), ["--checkpoint", str(root), "--resume", *more], 5)


def written_by(chosen: options.Options, root: Path, step: int = 7) -> None:
    """What checkpoint.save leaves besides the tensors."""
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    about = {"model": chosen.job.about(), "batch": chosen.run.batch, "seed": chosen.seed}
    (folder / checkpoint.ABOUT).write_text(json.dumps(about))


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    chosen = resuming(tmp_path)
    for step in (7, 30, 9):
        written_by(chosen, tmp_path, step)
    (tmp_path / "step-000031.partial").mkdir()
    (tmp_path / "step-000032").mkdir()  # a rank was killed before it said what run this is of
    assert checkpoint.to_resume(chosen) == (tmp_path / "step-000030", 30)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ((), ("--layers", "2"), "of a model with layers 4, this one has layers 2; use the previous model"),
        (("--tied",), (), "of a model with tied True, this one has tied False"),
        (("--batch", "48"), (), "written with batch 48, this run has 24; use --batch 48, or another"),
        (("--seed", "3"), (), "written with seed 3, this run has 0; use --seed 3, or another"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...], message: str
) -> None:
    written_by(resuming(tmp_path, *then), tmp_path)
    with pytest.raises(ConfigError, match=message):
        checkpoint.to_resume(resuming(tmp_path, *now))


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    written_by(options.parse(UNetJobType(), [], 5), tmp_path)
    with pytest.raises(ConfigError, match=r"another kind of model \(channels, .*use the program"):
        checkpoint.to_resume(resuming(tmp_path))
    (tmp_path / "step-000007" / checkpoint.ABOUT).write_text("{}")
    with pytest.raises(ConfigError, match=r"was not written by this program \(run.json cannot be read\)"):
        checkpoint.to_resume(resuming(tmp_path))
    (tmp_path / "step-000007" / checkpoint.ABOUT).unlink()
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path}"):
        checkpoint.to_resume(resuming(tmp_path))


def test_a_folder_without_a_checkpoint_is_refused_unless_torchrun_started_the_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path}; leave it out to start from step 0"):
        checkpoint.to_resume(resuming(tmp_path))
    again = options.parse(GptJobType(), ["--checkpoint", str(tmp_path)], 5)
    written_by(again, tmp_path / "other")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checkpoint.to_resume(again) == (None, 0)
    written_by(again, tmp_path)
    assert checkpoint.to_resume(again) == (tmp_path / "step-000007", 7)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert checkpoint.to_resume(again) == (None, 0)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "broken.png").write_text("no image")
    with pytest.raises(ConfigError, match=r"broken.png: cannot be read as an image"):
        read_images(str(tmp_path), MODELS["nano"])


@pytest.mark.parametrize(("text", "nearest"), [("zb", "ZBH1"), ("EAGER", "Eager1F1B"), ("gpipe", "GPipe")])
def test_the_nearest_name_disregards_case(text: str, nearest: str) -> None:
    assert layout.nearest_name(text, ("GPipe", "Eager1F1B", "ZBH1")) == nearest


def test_rank_0_speaks_alone_and_torchrun_hears_why(tmp_path: Path) -> None:
    """The other ranks wait to be ended."""
    cause = tmp_path / "cause.json"
    env = environment({"PYTHONPATH": str(EXAMPLES), "TORCHELASTIC_ERROR_FILE": str(cause)})
    waiting = [sys.executable, "-c", REFUSING, "600"]
    silent = Forked(waiting, env=env | {"RANK": "1"}, stderr=subprocess.PIPE)
    alone = [sys.executable, "-c", REFUSING, "0"]
    for rank in ("0", "1"):
        done = run(alone, env=env | {"RANK": rank})
        assert (done.returncode, done.stderr) == (2, "-c: error: that is wrong\n")
        assert json.loads(cause.read_text())["message"]["message"] == "that is wrong"
    with silent:
        assert silent.poll() is None
        silent.terminate()
        assert silent.communicate()[1] == b""
    assert command_line.RANK_0_SPEAKS >= 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt3", "gpt3: no such model; use gpt2 or unet"),
        ("gpt2 --stages 1,1", "--stages 1,1 needs 2 ranks, but 3 started; use torchrun --nproc-per-node 2"),
        ("gpt2 --stages 1x2,1", "no tensor parallelism here; use --stages 2,1"),
        ("gpt2 --stages two", "--stages two: expected ranks per stage"),
        ("gpt2 --batch 7", "--batch 7 cannot be cut into 4 micro-batches .* --batch 8"),
        ("gpt2 --steps 0", "--steps 0: must be at least 1"),
        ("unet --stages 1,1,1", "the U-Net is cut into two stages here; use --stages N,N"),
    ],
)
def test_the_hugging_face_example_refuses_what_cannot_run(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface import train

    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=message):
        train.parse(arguments.split())


def test_a_run_that_is_at_its_end_ends_without_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from training import loop

    chosen = resuming(tmp_path, "--model", "nano", "--steps", "7")
    written_by(chosen, tmp_path)
    monkeypatch.setenv("RANK", "0")
    assert loop.run(chosen) == 0
    assert f"Nothing to do: {tmp_path}/step-000007 is after step 7" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert loop.run(chosen) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device tpu: unknown; use cpu .of cpu, cuda."):
        options.parse(GptJobType(), ["--device", "tpu"], 5)
    assert options.parse(GptJobType(), [], 5).device == "cpu"
    assert options.parse(UNetJobType(), ["--device", "cuda"], 5).device == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda trains on it")
@pytest.mark.parametrize("program", ["gpt", "unet"])
def test_a_gpu_that_is_not_there_is_one_line(program: str) -> None:
    command = [sys.executable, str(EXAMPLES / program / "train.py"), "--stages", "1", "--device", "cuda"]
    done = run(command, env=environment({"RANK": "0", "WORLD_SIZE": "1"}))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.py: error: --device cuda: torch ") and line.endswith("; use --device cpu")
