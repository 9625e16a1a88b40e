"""pipelining.save and load in four processes: a pipeline goes on under another cut, other meshes and in one
process, as if it had never stopped."""

from __future__ import annotations

import collections
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import load, save
from multiproc.cases_state_entries import equal
from multiproc.pipeline_fault_cases import raises, seen_first
from multiproc.pipeline_models import batch, in_a_row, mlp, place, schedule_of, train_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS, MICROBATCHES, ROWS = 4, 4, 24
POSITION = {  # with the states of a scheduler, a data loader and random generators
    "milestones": collections.Counter([2, 2, 5]),
    "seen": {3, 1},
    0: (1, None, b"\x00"),
    "python": random.Random(1).getstate(),
    "numpy": np.random.RandomState(1).get_state(),
    "epoch": np.int64(4),
}


class Job:
    """Layers cut[i] on stage i, which has sizes[i] ranks. What a job that loads begins with must not matter:
    neither its weights nor its rate."""

    def __init__(self, sizes, cut, *, sharded: bool = False, seed: int = 5, lr: float = 0.5) -> None:
        self.cut = cut
        self.here = place(in_a_row(sizes))
        layers = mlp(LAYERS, seed=seed)
        self.module = nn.Sequential(*[layers[index] for index in cut[self.here.stage]])
        if sharded:
            fully_shard(self.module, mesh=self.here.mesh)
        self.schedule = schedule_of("1F1B", self.here, self.module, len(cut), MICROBATCHES)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr, foreach=False)

    def name(self, stage: int, name: str) -> str:
        layer, _, rest = name.partition(".")
        return f"layers.{self.cut[stage][int(layer)]}.{rest}"

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            x, y = batch(ROWS, seed=100 + step)
            self.optimizer.zero_grad()
            self.schedule.step(x, target=y)
            self.optimizer.step()

    def check(self, reference: nn.Module) -> None:
        whole = dict(reference.named_parameters())
        for name, parameter in self.module.named_parameters():
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            expected = whole[self.name(self.here.stage, name)]
            assert torch.allclose(found, expected, rtol=0, atol=1e-9), name


class Whole(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(LAYERS, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained_alone(steps: int) -> Whole:
    whole = Whole()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        train_alone(whole, *batch(ROWS, seed=100 + step), MICROBATCHES)
        optimizer.step()
    return whole


def folder_of(context) -> Path:
    """One for all ranks of a case."""
    key = f"{context.case}/folder"
    if context.rank == 0:
        context.store.set(key, tempfile.mkdtemp(prefix="meshcast-checkpoint-"))
    return Path(context.store.get(key).decode())


def goes_on_under_another_cut(context) -> None:
    folder = folder_of(context)
    job = Job([1, 3], [[0], [1, 2, 3]], seed=0, lr=0.02)
    job.train(0, 2)
    job.check(trained_alone(2))
    torch.manual_seed(context.rank)
    save(job.schedule, folder / "a", job.optimizer, names=job.name, position=POSITION)
    expected = torch.Generator().manual_seed(0).get_state()
    for sizes, cut, sharded in (
        ([2, 2], [[0, 1], [2, 3]], True),
        ([1, 1, 2], [[0], [1, 2], [3]], False),
        ([4], [[0, 1, 2, 3]], True),
    ):
        other = Job(sizes, cut, sharded=sharded)
        position = load(other.schedule, folder / "a", other.optimizer, names=other.name)
        assert equal(position, POSITION), position
        assert torch.equal(torch.get_rng_state(), expected)
        assert other.schedule._steps == 2
        other.check(trained_alone(2))
        other.train(2, 2)
        other.check(trained_alone(4))
        # And back, over what is there.
        save(other.schedule, folder / "b", other.optimizer, names=other.name, position=4)
        job = Job([1, 3], [[0], [1, 2, 3]])
        assert load(job.schedule, folder / "b", job.optimizer, names=job.name) == 4
        job.train(4, 1)
        job.check(trained_alone(5))
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    alone = Whole(seed=9)
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=folder / "b", no_dist=True)
    for name, parameter in trained_alone(4).named_parameters():
        assert torch.allclose(state["model"][name], parameter, rtol=0, atol=1e-9)
    context.wait_for_all("read")
    if context.rank == 0:
        shutil.rmtree(folder)


def what_cannot_be_read(context) -> None:
    """On all ranks alike."""
    folder = folder_of(context)
    job = Job([2, 2], [[0, 1], [2, 3]])
    raises(LayoutError, "load", call=lambda: load(job.schedule, folder / "none", names=job.name))
    raises(
        LayoutError,
        "whole model's name",
        call=lambda: save(job.schedule, folder / "x", names=lambda *_: "same"),
    )
    raises(LayoutError, "must be a torch.optim.Optimizer", call=lambda: save(job.schedule, folder / "x", 5))
    save(job.schedule, folder / "part", names=job.name)
    raises(
        LayoutError, "load", call=lambda: load(job.schedule, folder / "part", job.optimizer, names=job.name)
    )
    assert load(job.schedule, folder / "part", names=job.name) is None
    wrong = object() if context.rank == 0 else None  # the lowest rank's is written: all raise, and go on
    raises(
        LayoutError if context.rank == 0 else AbortedError,
        "holds a object",
        call=lambda: save(job.schedule, folder / "part", names=job.name, position=wrong),
    )
    save(job.schedule, folder / "part", names=job.name, position=float("nan"))
    assert np.isnan(load(job.schedule, folder / "part", names=job.name))
    context.wait_for_all("read")
    if context.rank == 0:
        shutil.rmtree(folder)


class Part(nn.Module):
    """Layers by names that say nothing of the stage."""

    def __init__(self, names: list[str], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in ("embed", "a", "b"):
            layer = nn.Linear(6, 6, bias=False, dtype=torch.float64)
            if name in names:
                setattr(self, name, layer)
            if name == "embed" and "head" in names:
                self.head = nn.Linear(6, 6, bias=False, dtype=torch.float64)
                self.head.weight = layer.weight if "embed" in names else nn.Parameter(layer.weight.detach())
        self.order = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


def a_parameter_of_several_stages(context) -> None:
    """It has one name, whether stages have copies of it or one module has it twice."""
    folder = folder_of(context)
    tied = {"embed": {"embed.weight": "embed.weight"}, "head": {"embed.weight": "head.weight"}}

    def job(sizes, parts, seed):
        here = place(in_a_row(sizes))
        names = parts[here.stage]
        module = Part(names, seed)
        shared = {} if len(parts) == 1 else {k: v for n in names for k, v in tied.get(n, {}).items()}
        schedule = schedule_of("1F1B", here, module, len(parts), 2, shared_parameters=shared)
        return module, schedule, torch.optim.AdamW(module.parameters(), lr=0.02, foreach=False)

    def step(schedule, optimizer, seed) -> None:
        x, y = batch(12, seed=seed)
        optimizer.zero_grad()
        schedule.step(x, target=y)
        optimizer.step()

    two, one = [["embed", "a"], ["b", "head"]], [["embed", "a", "b", "head"]]
    first = job([1, 3], two, 0)
    step(*first[1:], 1)
    save(first[1], folder / "a", first[2])
    second, third = job([4], one, 7), job([3, 1], two, 8)
    for other in (second, third):
        load(other[1], folder / "a", other[2])
    for each in (first, second, third):
        step(*each[1:], 2)
        step(*each[1:], 3)
    whole = dict(second[0].named_parameters(remove_duplicate=False))
    assert whole["embed.weight"] is whole["head.weight"]
    for module in (first[0], third[0]):
        for name, parameter in module.named_parameters():
            assert torch.allclose(parameter, whole[name], rtol=0, atol=1e-9), name
    saved = dcp.FileSystemReader(folder / "a").read_metadata().state_dict_metadata
    assert sorted(name for name in saved if name.startswith("model.")) == [
        "model.a.weight",
        "model.b.weight",
        "model.embed.weight",
    ]
    context.wait_for_all("read")
    if context.rank == 0:
        shutil.rmtree(folder)


def a_rank_that_refuses(context) -> None:
    """Its error reaches it before the others have called, and them when they call: nobody begins a collective
    that others stay away from."""
    folder = folder_of(context)
    job = Job([2, 2], [[0, 1], [2, 3]], seed=0, lr=0.02)
    job.train(0, 1)
    right = {"optimizer": job.optimizer, "names": job.name}
    wrong: list[tuple[int, dict, str]] = [
        (1, {"names": lambda *_: "same"}, "the whole model's name 'same'"),
        (0, {"optimizer": 7}, "optimizer must be a torch.optim.Optimizer"),
    ]
    for call in (save, load):
        for rank, given, text in wrong:
            seen_first(
                context,
                rank,
                lambda call=call, given=given: call(job.schedule, folder / "a", **{**right, **given}),
                lambda call=call: call(job.schedule, folder / "a", **right),
                LayoutError,
                text,
            )
        call(job.schedule, folder / "a", **right)
    job.train(1, 1)
    job.check(trained_alone(2))
    context.wait_for_all("read")
    if context.rank == 0:
        shutil.rmtree(folder)


CASES = [a_rank_that_refuses, goes_on_under_another_cut, a_parameter_of_several_stages, what_cannot_be_read]
