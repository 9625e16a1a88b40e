"""The same training in one process, to compare with."""

import torch
from gpt.model import build_stage, loss_fn

from elastic.state import CLIP, Task, Trained


class LoneTraining(Trained):
    """The whole model and all samples of a step here."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, build_stage(task.config, 0, 1, seed=0).to(task.dtype))

    def forward_and_backward(self, step: int) -> float:
        """Loss of the whole batch."""
        inputs, targets = self.batch(step)
        loss = loss_fn(self.module(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        return float(loss.detach())


def losses(task: Task, steps: int) -> list[float]:
    """Of the first steps of a job that nothing happens to."""
    training, found = LoneTraining(task), []
    for step in range(steps):
        found.append(training.forward_and_backward(step))
        training.update()
    return found
