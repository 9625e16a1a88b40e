"""What an undone step leaves behind on a rank: nothing."""

from __future__ import annotations

import torch
from meshcast.elastic.job import Before
from torch import nn


class Trained:
    def __init__(self) -> None:
        self.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=torch.tensor(0.1), betas=(0.9, 0.99))
        self.position = 4


def step(trained: Trained) -> torch.Tensor:
    output = trained.module(torch.arange(12.0).reshape(4, 3))
    output.sum().backward()
    trained.optimizer.param_groups[0]["lr"].fill_(0.5)
    trained.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    return output.detach()


def test_a_step_that_is_undone_can_be_done_again() -> None:
    trained = Trained()
    before = Before(trained)
    weights = [parameter.detach().clone() for parameter in trained.module.parameters()]
    first = step(trained)
    assert trained.module[0].num_batches_tracked == 1
    before.restore()
    assert trained.module[0].num_batches_tracked == 0
    assert torch.equal(trained.module[0].running_mean, torch.zeros(3))
    assert all(parameter.grad is None for parameter in trained.module.parameters())
    group = trained.optimizer.param_groups[0]
    assert group["lr"].item() == torch.tensor(0.1).item()
    assert group["betas"] == (0.9, 0.99)
    assert len(group["params"]) == 4
    assert torch.equal(step(trained), first), "dropout and batch norm draw the same again"
    assert all(map(torch.equal, trained.module.parameters(), weights))


def test_a_module_is_a_training_too() -> None:
    module = nn.BatchNorm1d(3)
    before = Before(module)
    module(torch.ones(2, 3))
    before.restore()
    assert module.num_batches_tracked == 0
