"""A pipeline whose layers move, and its state by the whole model's names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from meshcast import elastic
from meshcast.pipelining import PipelineSchedule, simulate
from multiproc.pipeline_models import Place, batch, schedule_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MICROBATCHES, ROWS, WIDTH = 4, 24, 6
Cut = tuple[int, ...]


class Layer(nn.Module):
    """It counts its forwards in a buffer; its parameters follow from its number and the seed."""

    def __init__(self, index: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(1000 * seed + index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=chance).div(2).to(dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=chance).to(dtype))
        self.register_buffer("scale", torch.tensor([1.0 + (index + seed) / 16], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)) * self.scale


class Mover:
    """Trains and moves. What it builds after the first time begins with other values and another rate."""

    def __init__(
        self,
        here: Place,
        cut: Cut,
        *,
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        sharded: bool = False,
        **more: Any,
    ) -> None:
        self.here, self.cut, self.kind, self.dtype, self.sharded = here, cut, kind, dtype, sharded
        self.more = more
        self.built = 0
        self.schedule, self.optimizer = self.build(cut)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02

    def build(self, cut: Cut) -> tuple[PipelineSchedule, torch.optim.Optimizer]:
        stage = self.here.stage
        first = sum(cut[:stage])
        layers = {f"layer{i}": Layer(i, self.built, self.dtype) for i in range(first, first + cut[stage])}
        self.built += 1
        module = nn.Sequential(OrderedDict(layers))
        if self.sharded:
            fully_shard(module, mesh=self.here.mesh)
        schedule = schedule_of("1F1B", self.here, module, len(cut), MICROBATCHES)
        decayed = [p for n, p in module.named_parameters() if n.endswith("weight")]
        other = [p for n, p in module.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.125}, {"params": other, "weight_decay": 0.0}]
        return schedule, self.kind(groups, lr=0.5, foreach=False, **self.more)

    @property
    def module(self) -> nn.Module:
        return self.schedule._mine[self.here.stage].submod

    def step(self, step: int) -> list[float]:
        """Losses of the micro-batches, on the last stage."""
        x, y = batch(ROWS, dtype=self.dtype, seed=100 + step)
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        self.schedule.step(x, target=y, losses=losses)
        self.optimizer.step()
        return [loss.item() for loss in losses]

    def rebalance(self, **arguments: Any) -> elastic.Rebalanced | None:
        given = {"build": self.build, "cut": self.cut, "overhead": 0.0} | arguments
        moved = elastic.rebalance(
            self.schedule, self.optimizer, given.pop("build"), given.pop("cut"), **given
        )
        if moved is not None:
            self.schedule, self.optimizer, self.cut = moved.schedule, moved.optimizer, moved.cut
        return moved

    def own_state(self) -> dict[str, Any]:
        """Whole tensors of this rank's layers, read from module and optimizer as torch has them."""
        found: dict[str, Any] = {}
        for name, value in [*self.module.named_parameters(), *self.module.named_buffers()]:
            found[name] = _full(value)
            for key, entry in self.optimizer.state.get(value, {}).items():
                found[f"{name}:{key}"] = _full(entry)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = next(n for n, p in self.module.named_parameters() if p is parameter)
                found[f"{name}:group"] = {k: v for k, v in group.items() if k != "params"}
        return found

    def state(self) -> dict[str, Any]:
        """Of the whole model. Ranks that have the same entry have it alike."""
        told: list[Any] = [None] * dist.get_world_size(self.here.group)
        dist.all_gather_object(told, self.own_state(), group=self.here.group)
        whole: dict[str, Any] = {}
        for theirs in told:
            for name, value in theirs.items():
                same(whole.setdefault(name, value), value, name)
        return whole

    def adopt(self, whole: dict[str, Any]) -> None:
        """Makes this job's state that one, by plain torch."""
        for name, value in [*self.module.named_parameters(), *self.module.named_buffers()]:
            with torch.no_grad():
                _fill(value, whole[name])
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = next(n for n, p in self.module.named_parameters() if p is parameter)
                group.update(whole[f"{name}:group"])
                entries = {}
                for key, value in whole.items():
                    owner, _, last = key.partition(":")
                    if owner == name and last not in ("", "group"):
                        entries[last] = value
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                            entries[last] = _fill(torch.empty_like(parameter), value)
                self.optimizer.state[parameter] = entries


def same(one: Any, other: Any, name: str) -> None:
    """To the bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), f"{name}: {one} and {other}"
    else:
        assert one == other, f"{name}: {one} and {other}"


def same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        same(value, other[name], name)


def times_of(seconds: Sequence[float]) -> dict[str, list[float]]:
    """Of stages whose forwards take so long."""
    return {"forward": list(seconds), "backward": [2 * each for each in seconds], "transfer": 0.0}


def fastest(cut: Cut, times: dict[str, Any], costs: Sequence[float] = ()) -> Cut:
    """Of all cuts, by simulation. costs: of the layers; else all have the same."""
    costs = list(costs) or [1.0] * sum(cut)

    def of(one: Cut, stage: int) -> float:
        first = sum(one[:stage])
        return sum(costs[first : first + one[stage]])

    def seconds(one: Cut) -> float:
        forward, backward = (
            [own * of(one, stage) / of(cut, stage) for stage, own in enumerate(times[name])]
            for name in ("forward", "backward")
        )
        return simulate("1F1B", len(cut), MICROBATCHES, forward, backward, None, 0.0).makespan

    cuts = [one for one in product(range(1, sum(cut)), repeat=len(cut)) if sum(one) == sum(cut)]
    return min(cuts, key=seconds)


def _full(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone() if isinstance(whole, torch.Tensor) else whole


def _fill(target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            shards = whole.chunk(mesh.size())
            rank = mesh.get_local_rank()
            if rank < len(shards):
                target.to_local().copy_(shards[rank])
        else:
            target.copy_(whole)
    return target
