"""Model and optimizer as a state that goes on with other ranks, and what both kinds of training share."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from gpt.config import ModelConfig
from gpt.data import TextSamples
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from training.optimizer import learning_rate, make_optimizer, set_learning_rate

# Names that say nothing of parameter groups.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OF_OPTIMIZER = ("state.", "param_groups.")
LR, WARMUP, CLIP, WEIGHT_DECAY = 3e-3, 5, 1.0, 0.1


@dataclass(frozen=True)
class Task:
    """What is trained, on whatever ranks. batch: samples of a step, of all ranks."""

    config: ModelConfig
    samples: TextSamples
    batch: int
    steps: int
    dtype: torch.dtype = torch.float32


class Trained:
    """A module, which may be a part of the model, and its optimizer."""

    part = 0  # of the state, that this rank holds: it is gone where no other rank has the same

    def __init__(self, task: Task, module: nn.Module) -> None:
        self.task = task
        self.module = module
        self.optimizer = make_optimizer(module, LR, WEIGHT_DECAY)
        # Torch makes its state in the first step. Here a rank may die before that, and others take it along:
        # get_state_dict makes it by a step that changes nothing, which must not count.
        get_state_dict(module, self.optimizer, options=FLAT)
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all ranks, which follows from the step alone. Sets the learning rate."""
        rate = learning_rate(step, peak=LR, warmup=WARMUP, steps=self.task.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad()
        (inputs,), targets = self.task.samples.train(step, self.task.batch)
        return inputs, targets

    def update(self) -> float:
        """On this rank alone. Returns its seconds."""
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.module, self.optimizer, options=FLAT)
        return {**weights, **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """state: has what this rank needs, and may have more."""
        weights = {name: state[name] for name in self.module.state_dict()}
        moments = {name: x for name, x in state.items() if name.startswith(OF_OPTIMIZER)}
        set_state_dict(
            self.module, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT
        )
