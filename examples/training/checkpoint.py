"""Checkpoints by torch.distributed.checkpoint: ranks write their share, names are global."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from training.layout import ConfigError
from training.options import Options
from training.trainer import Trainer

State = dict[str, dict[str, Any]]

# Flat names ("state.layers.3.up.weight.exp_avg"): parameter groups by number would clash between stages.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ABOUT = "run.json"


def save(options: Options, trainer: Trainer, done: int) -> Path:
    """Write the state after `done` steps to DIR/step-N; collective. A folder of that name is complete."""
    assert options.checkpoint is not None
    final = options.checkpoint / f"step-{done:06d}"
    partial = final.with_suffix(".partial")
    dcp.save(_global_names(_state(trainer), trainer.shared_names), checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / ABOUT).write_text(json.dumps(_about(options), indent=2))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    dist.barrier()
    return final


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
            "use the model of then, or another --checkpoint folder"
        )
    for name in unlike:
        raise ConfigError(
            f"--resume: {folder} was written with {name} {saved[name]}, this run has {own[name]}; "
            f"use --{name} {saved[name]}, or another --checkpoint folder"
        )


def complete(root: Path) -> list[Path]:
    """The checkpoints in DIR that were written to the end, oldest first."""
    return sorted(path for path in root.glob("step-*") if not path.suffix)


def load(folder: Path, trainer: Trainer) -> None:
    """Read this rank's share in place, whatever layout wrote it; collective."""
    state = _global_names(_state(trainer), trainer.shared_names)
    dcp.load(state, checkpoint_id=folder)
    state = _global_names(state, {local: name for name, local in trainer.shared_names.items()})
    for name, first in _second_names(trainer.module).items():
        state["model"][name] = state["model"][first]
    set_state_dict(
        trainer.module,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=FLAT,
    )


def _state(trainer: Trainer) -> State:
    model, optimizer = get_state_dict(trainer.module, trainer.optimizer, options=FLAT)
    for name in _second_names(trainer.module):
        del model[name]  # the optimizer knows the first
    return {"model": model, "optimizer": optimizer}


def _second_names(module: nn.Module) -> dict[str, str]:
    """{other name: first name} of parameters that the module holds under several."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in named if first[parameter] != name}


def _global_names(state: State, names: dict[str, str]) -> State:
    """The state with {new: old} names of parameters: one that several stages hold is saved once, under the
    name that it has where it comes first."""
    old_to_new = {old: new for new, old in names.items()}

    def renamed(key: str) -> str:
        for old, new in old_to_new.items():
            if key == old:
                return new
            if key.startswith(("state.", "param_groups.")) and f".{old}." in key:
                return key.replace(f".{old}.", f".{new}.", 1)
        return key

    return {part: {renamed(key): value for key, value in values.items()} for part, values in state.items()}


def _about(options: Options) -> dict[str, Any]:
    """What must not change between runs, or the continued curve would be another one."""
    return {"model": options.job.about(), "batch": options.run.batch, "seed": options.seed}
