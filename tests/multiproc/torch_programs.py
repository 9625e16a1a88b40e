"""What the programs of torch_cases*.py share. A program runs unchanged under torch.distributed.pipelining and
under meshcast.pipelining: one parameter, the name of the package, chooses the imports."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")
TORCH = "torch.distributed.pipelining"
OURS = os.environ.get("PIPELINING", "meshcast.pipelining")


class Library:
    """The package under one of its two names: ``lib.schedules._Action``, ``lib.PipelineStage``."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __getattr__(self, name: str) -> Any:
        if name in ("schedules", "stage", "microbatch", "_utils", "_backward"):
            return importlib.import_module(f"{self.root}.{name}")
        return getattr(importlib.import_module(self.root), name)


class World:
    """Groups and meshes of one program under one package: what is left of one that failed meets no other.
    Made by all ranks in the same order."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.group = dist.new_group(list(range(ranks)))  # of the ranks that the program is for

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


Program = Callable[[Library, World], Any]
PROGRAMS: list[Callable[[Any], None]] = []


def program(ranks: int = 4, *, exact: bool = True, name: str | None = None) -> Callable[[Program], Program]:
    """Makes a case of a function (library, world): it runs on the first `ranks` ranks under both packages,
    which must return, or raise, the same.

    exact: with the same bits; else sums may be added up in another order.
    """

    def made(run: Program) -> Program:
        def case(context: Any) -> None:
            worlds = [World(context.rank, ranks) for _ in (TORCH, OURS)]
            try:
                if context.rank < ranks:
                    expected = outcome(run, Library(TORCH), worlds[0])
                    found = outcome(run, Library(OURS), worlds[1])
                    check_equal(found, expected, exact, "result")
            finally:
                context.wait_for_all("end", limit=60.0)

        case.__name__ = name or run.__name__
        PROGRAMS.append(case)
        return run

    return made


def outcome(run: Program, lib: Library, world: World) -> Any:
    torch.manual_seed(77)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tree_map(plain, run(lib, world))


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def check_equal(found: Any, expected: Any, exact: bool, where: str) -> None:
    assert type(found) is type(expected), f"{where}: {found!r}, expected {expected!r}"
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            check_equal(found[key], expected[key], exact, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: {len(found)} entries, expected {len(expected)}"
        for index, (mine, other) in enumerate(zip(found, expected, strict=True)):
            check_equal(mine, other, exact, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
        if exact:
            assert torch.equal(found, expected), f"{where}: {found} is not {expected}"
        else:
            torch.testing.assert_close(found, expected, msg=lambda text: f"{where}: {text}")
    else:
        assert found == expected, f"{where}: {found!r}, expected {expected!r}"


def raised(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The name of the class of the error, of those given, that the call raises."""
    try:
        call()
    except kinds as error:
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return "nothing was raised"


class Layer(nn.Module):
    """A stage of its own number, so that every rank can build any stage."""

    def __init__(self, number: int, hidden: int = 9, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(6, hidden, dtype=dtype)
        self.second = nn.Linear(hidden, 6, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def layers(numbers: list[int], make: Callable[[int], nn.Module] = Layer) -> list[nn.Module]:
    return [make(number) for number in numbers]


def looped(rank: int, ranks: int, each: int) -> list[int]:
    return [rank + ranks * number for number in range(each)]


def folded(rank: int, ranks: int) -> list[int]:
    return [rank, 2 * ranks - 1 - rank]


def batch(rows: int = 12, width: int = 6, seed: int = 5, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))


def stages_of(
    lib: Library, modules: list[nn.Module], numbers: list[int], count: int, group: Any, **more: Any
):
    return [
        lib.PipelineStage(module, number, count, CPU, group=group, **more)
        for module, number in zip(modules, numbers, strict=True)
    ]


def forwards(stage: Any) -> Any:
    """What a stage keeps of its forwards, by micro-batch. torch 2.15 gave it another name."""
    return stage._forward_chunk_states if hasattr(stage, "_forward_chunk_states") else stage.fwd_cache


def step(schedule: Any, stages: list[Any], x: Any, y: Any, call: str = "step", **more: Any) -> Any:
    """One call with what the stages of this rank need. Returns output and losses."""
    losses: list[torch.Tensor] = []
    given = (x,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        more |= {"target": y, "losses": losses}
    output = getattr(schedule, call)(*given, **more)
    return output, [loss.detach().clone() for loss in losses]


def stepped(schedule: Any, stages: list[Any], x: Any, call: str = "step") -> Any:
    """One call of a pipeline without targets. Returns the output as it is, and no losses."""
    return getattr(schedule, call)(*((x,) if any(stage.is_first for stage in stages) else ())), []


def gradients(modules: list[nn.Module]) -> list[Any]:
    return [
        None if parameter.grad is None else plain(parameter.grad)
        for module in modules
        for parameter in module.parameters()
    ]
