"""Checkpoints of a run: those of its pipeline, in a folder for each step, and what run it was."""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from meshcast import pipelining

from training.layout import ConfigError
from training.options import Options
from training.trainer import Trainer

ABOUT = "run.json"


def save(options: Options, trainer: Trainer, done: int) -> Path:
    """Write the state after `done` steps to DIR/step-N; collective. The folder is complete once it says what
    run it is of."""
    assert options.checkpoint is not None
    folder = options.checkpoint / f"step-{done:06d}"
    if dist.get_rank() == 0:  # an earlier one of that step is not complete any more
        (folder / ABOUT).unlink(missing_ok=True)
    dist.barrier()
    pipelining.save(trainer.schedule, folder, trainer.optimizer, position=done)
    if dist.get_rank() == 0:
        partial = folder / f"{ABOUT}.partial"
        partial.write_text(json.dumps(_about(options), indent=2))
        partial.rename(folder / ABOUT)
    dist.barrier()
    return folder


def to_resume(options: Options) -> tuple[Path | None, int]:
    """(folder, steps done) to go on from: the newest checkpoint with --resume, and where torchrun has started
    the ranks again after one of them failed."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and not options.resume and (options.checkpoint is None or not complete(options.checkpoint)):
        return None, 0
    return newest(options) if options.resume or restarted else (None, 0)


def newest(options: Options) -> tuple[Path, int]:
    """(folder, steps done) of the newest complete checkpoint. Raises ConfigError if none fits this run."""
    assert options.checkpoint is not None
    folders = complete(options.checkpoint)
    if not folders:
        raise ConfigError(
            f"--resume: no checkpoint in {options.checkpoint}; leave it out to start from step 0"
        )
    _check_same(folders[-1], _about(options))
    return folders[-1], int(folders[-1].name.removeprefix("step-"))


def _check_same(folder: Path, own: dict[str, Any]) -> None:
    """Raise ConfigError where the run that wrote the checkpoint was another one than this."""
    try:
        saved = json.loads((folder / ABOUT).read_text())
        model = saved["model"]
        unlike = [name for name in ("batch", "seed") if saved[name] != own[name]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--resume: {folder} was not written by this program ({ABOUT} cannot be read); "
            "use another --checkpoint folder"
        ) from None
    if model.keys() != own["model"].keys():
        raise ConfigError(
            f"--resume: {folder} is of another kind of model ({', '.join(model)}); "
            "use the program that wrote it, or another --checkpoint folder"
        )
    changed = [name for name in model if model[name] != own["model"][name]]
    if changed:
        then, now = (", ".join(f"{name} {of[name]}" for name in changed) for of in (model, own["model"]))
        raise ConfigError(
            f"--resume: {folder} is of a model with {then}, this one has {now}; "
            "use the previous model, or another --checkpoint folder"
        )
    for name in unlike:
        raise ConfigError(
            f"--resume: {folder} was written with {name} {saved[name]}, this run has {own[name]}; "
            f"use --{name} {saved[name]}, or another --checkpoint folder"
        )


def complete(root: Path) -> list[Path]:
    """The checkpoints in DIR that were written to the end, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{ABOUT}"))


def load(folder: Path, trainer: Trainer) -> None:
    """Read this rank's share in place, whatever layout wrote it; collective."""
    pipelining.load(trainer.schedule, folder, trainer.optimizer)


def _about(options: Options) -> dict[str, Any]:
    """What must not change between runs, or the continued curve would be another one."""
    return {"model": options.job.about(), "batch": options.run.batch, "seed": options.seed}
