"""Checkpoints by torch.distributed.checkpoint: ranks write their share, names are global."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from training.layout import ConfigError
from training.options import Options

# Flat names ("state.layers.3.up.weight.exp_avg"): parameter groups by number would clash between stages.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ABOUT = "run.json"


def save(options: Options, module: torch.nn.Module, optimizer: torch.optim.Optimizer, done: int) -> Path:
    """Write the state after `done` steps to DIR/step-N; collective. A folder of that name is complete."""
    assert options.checkpoint is not None
    final = options.checkpoint / f"step-{done:06d}"
    partial = final.with_suffix(".partial")
    dcp.save(_state(module, optimizer), checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / ABOUT).write_text(json.dumps(_about(options), indent=2))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    dist.barrier()
    return final


def newest(options: Options) -> tuple[Path, int]:
    """(folder, steps done) of the newest complete checkpoint. Raises ConfigError if none fits this run."""
    assert options.checkpoint is not None
    folders = sorted(path for path in options.checkpoint.glob("step-*") if not path.suffix)
    if not folders:
        raise ConfigError(
            f"--resume: no checkpoint in {options.checkpoint}; leave it out to start from step 0"
        )
    saved = json.loads((folders[-1] / ABOUT).read_text())
    for name, value in _about(options).items():
        if saved[name] != value:
            raise ConfigError(
                f"--resume: {folders[-1]} was written with {name} {saved[name]}, this run has {value}; "
                f"use the same {name}, or another --checkpoint folder"
            )
    return folders[-1], int(folders[-1].name.removeprefix("step-"))


def load(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's share in place; collective."""
    state = _state(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model, optim = state["model"], state["optimizer"]
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optim, options=FLAT)


def _state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(module, optimizer, options=FLAT)
    return {"model": model, "optimizer": optim}


def _about(options: Options) -> dict[str, object]:
    """What must not change between runs, or the continued curve would be another one."""
    return {"model": options.job.about(), "batch": options.run.batch, "seed": options.seed}
