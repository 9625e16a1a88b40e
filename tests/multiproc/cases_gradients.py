"""What a rank does with drawn pipelines: one case, which takes draws from gradient_world.py until there are
no more. Meshes and groups are kept from draw to draw; every rank makes all of them, in one order."""

from __future__ import annotations

import faulthandler
import pickle
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import MeshcastError
from meshcast.pipelining import Edge, PipelineStage, get_schedule_class
from meshcast.pipelining.microbatch import TensorChunkSpec, _Replicate
from multiproc.gradient_draws import TOKENS, WIDTH, Draw
from multiproc.gradient_layouts import Place
from multiproc.gradient_modules import (
    EPSILON,
    RATE,
    Loss,
    Part,
    build,
    data,
    extras_of,
    joined_extras,
    nested_extras,
    weight_of,
)
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

GROUP_TIMEOUT = 20.0
CASE_LIMIT = 7200.0
DRAW_LIMIT = 60.0  # seconds; then the rank prints its stacks and ends
COMPILED_LIMIT = 240.0
LEAVE_UP = True
CPU = torch.device("cpu")


class StoppedError(Exception):
    """Another rank has failed or was refused."""


class Meshes:
    """Of all draws so far."""

    def __init__(self) -> None:
        self._meshes: dict[Any, DeviceMesh] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def mesh(self, ranks: list[int], shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        key = (tuple(ranks), shape, names)
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)
        return self._meshes[key]

    def group(self, ranks: list[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(ranks)
        return self._groups[key]

    def forget(self, ranks: list[int]) -> None:
        """A pipeline that failed may have left something in its group."""
        group = self._groups.pop(tuple(ranks), None)
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


@dataclass
class Here:
    """What a rank knows of its place in a draw. meshes, wide (over all ranks of a stage, in one dimension)
    and places are by stage."""

    row: int
    column: int
    group: dist.ProcessGroup
    meshes: dict[int, DeviceMesh]
    wide: dict[int, DeviceMesh]
    places: dict[int, Place]


def pipelines(draw: Draw) -> list[list[int]]:
    """Ranks of each."""
    rows = len(draw.meshes)
    if not draw.columns:
        return [list(range(draw.ranks))]
    return [list(range(column * rows, (column + 1) * rows)) for column in range(draw.columns)]


def find(draw: Draw, meshes: Meshes) -> Here | None:
    """Called by all ranks; None on one that the draw does not need."""
    rank = dist.get_rank()
    groups = [meshes.group(ranks) for ranks in pipelines(draw)]
    found = None
    for row, stages in enumerate(draw.rows):
        ranks = draw.ranks_of(row)
        wide, own, places = {}, {}, {}
        for number in stages:
            stage = draw.stages[number]
            roles = stage.roles
            if draw.columns:
                wide[number] = meshes.mesh(ranks, (len(ranks),), ("columns",))
                places[number] = Place(("data",), (1,), (0,), (None,))
                continue
            made = own[number] = meshes.mesh(ranks, draw.shape(number), draw.names(number))
            if stage.wrapper in ("ddp", "fsdp", "nested") and len(roles) == 2 and "tensor" not in roles:
                wide[number] = meshes.mesh(ranks, (len(ranks),), ("wide",))
            if rank in ranks:
                at = tuple((made.mesh == rank).nonzero()[0].tolist())
                places[number] = Place(
                    roles, draw.shape(number), at, tuple(made.get_group(dim) for dim in range(len(roles)))
                )
        if rank in ranks:
            column = rank // len(draw.meshes) if draw.columns else 0
            found = Here(row, column, groups[column], own, wide, places)
    return found


# ---- stages ----------------------------------------------------------------------------------------------


def wrapped(draw: Draw, number: int, part: Part, here: Here) -> nn.Module:
    stage = draw.stages[number]
    mesh = here.meshes.get(number)
    if stage.tp and mesh is not None:
        plan: dict[str, Any] = {}
        for index, block in enumerate(stage.blocks):
            at = f"blocks.{index}"
            if block == "mlp":
                plan |= {f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}
            if block == "sequence":
                plan |= {
                    f"{at}.norm": SequenceParallel(),
                    f"{at}.up": ColwiseParallel(input_layouts=Shard(1)),
                    f"{at}.down": RowwiseParallel(output_layouts=Shard(1)),
                }
        if plan:
            parallelize_module(part, mesh if mesh.ndim == 1 else mesh["tensor"], plan)
    if stage.compiled:
        return torch.compile(part, backend="aot_eager", dynamic=False)
    if stage.wrapper == "none":
        return part
    over = here.wide.get(number, mesh)
    assert over is not None
    if over.ndim == 2 and stage.wrapper != "hsdp":
        over = over[draw.names(number)[stage.roles.index("data")]]
    if stage.wrapper == "ddp":
        return DistributedDataParallel(part, process_group=over.get_group())
    if stage.wrapper != "fsdp":
        for block in part.blocks:
            fully_shard(block, mesh=over)
    return fully_shard(part, mesh=over)


def placements(placed: tuple[str, ...]) -> tuple[Placement, ...]:
    kinds: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
    return tuple(kinds[each] if each in kinds else Shard(int(each[1])) for each in placed)


def example(draw: Draw, number: int, output: int, place: Place) -> torch.Tensor:
    """This rank's part of an output of the first micro-batch."""
    samples = draw.sizes[0][0]
    kind = draw.kind(number, output)
    size = {
        "act": [samples, TOKENS, WIDTH],
        "bias": [1, TOKENS, WIDTH],
        "stat": [1, 1, WIDTH],
    }.get(kind, [samples, TOKENS])
    for dim, placed in enumerate(draw.stages[number].outputs[output].placed):
        if placed[0] == "S":
            size[int(placed[1])] = place.part(size[int(placed[1])], dim)[1]
    dtypes = {"ids": torch.int64, "mask": torch.bool}
    return torch.empty(size, dtype=dtypes.get(kind, getattr(torch, draw.dtype)), device="meta")


def options_of(draw: Draw, number: int, here: Here) -> dict[str, Any]:
    """Keyword arguments of PipelineStage."""
    stage, place = draw.stages[number], here.places[number]
    edges = draw.edges()
    options: dict[str, Any] = {"group": here.group}
    if edges is not None:
        options["edges"] = [Edge(*edge) for edge in edges]
    if draw.tied is not None and draw.tied[2] == "key" and number in draw.tied[:2]:
        options["shared_parameters"] = {"tied": "tied"}
    if stage.examples and stage.outputs:
        options["output_args"] = tuple(
            example(draw, number, output, place) for output in range(len(stage.outputs))
        )
    if draw.columns:
        return options
    options["mesh"] = here.meshes[number]
    default = tuple("R" if dim else "S0" for dim in range(len(stage.roles)))
    for name, values in (("input_placements", stage.inputs), ("output_placements", stage.outputs)):
        if values and (stage.explicit or any(each.placed != default for each in values)):
            options[name] = [placements(each.placed) for each in values]
    dims, names = draw.data_dims(number), draw.names(number)
    sharded = [
        dim for dim in range(len(stage.roles)) if any(each.placed[dim] == "S0" for each in stage.inputs)
    ]
    if stage.explicit or dims != sharded:
        options["data_dims"] = [names[dim] for dim in dims] if stage.explicit else dims
    if number == len(draw.stages) - 1 and (stage.explicit or draw.loss_dims() != dims):
        options["loss_dims"] = draw.loss_dims()
    return options


def full(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


class Rank:
    """A rank in one draw."""

    def __init__(self, draw: Draw, here: Here) -> None:
        self.draw, self.here = draw, here
        self.numbers = draw.rows[here.row]
        self.parts = {number: build(draw, number, here.places[number]) for number in self.numbers}
        if draw.tied is not None and draw.tied[2] == "object" and draw.tied[0] in self.parts:
            self.parts[draw.tied[1]].tied = self.parts[draw.tied[0]].tied
        modules = {number: wrapped(draw, number, part, here) for number, part in self.parts.items()}
        count = len(draw.stages)
        self.stages = [
            PipelineStage(modules[number], number, count, CPU, **options_of(draw, number, here))
            for number in self.numbers
        ]
        self.named = {
            (number, name): parameter
            for number, part in self.parts.items()
            for name, parameter in part.named_parameters()
        }
        distinct = list({id(each): each for each in self.named.values()}.values())
        self.optimizer = torch.optim.AdamW(distinct, lr=RATE, eps=EPSILON, foreach=False)
        self.hooked: dict[int, torch.Tensor] = {}  # gradients that the hooks were called with
        for each in distinct if draw.hooks else ():
            each.register_post_accumulate_grad_hook(self._hook(each))

    def _hook(self, parameter: nn.Parameter) -> Any:
        own = torch.optim.AdamW([parameter], lr=RATE, eps=EPSILON, foreach=False)

        def hook(given: torch.Tensor) -> None:
            assert given is parameter and id(parameter) not in self.hooked, "called twice"
            self.hooked[id(parameter)] = given.grad.detach().clone()
            own.step()
            own.zero_grad()

        return hook

    def connect(self) -> None:
        draw, last = self.draw, len(self.draw.stages) - 1
        self.schedule = get_schedule_class(draw.schedule)(
            self.stages if len(self.stages) > 1 else self.stages[0],
            draw.microbatches,
            loss_fn=Loss(draw, self.here.places[last]) if last in self.numbers else None,
            scale_grads=draw.loss != "sum",
            delay_weight_grad=draw.delayed,
            varying_shapes=draw.varying and draw.pieces,
            weight_fn=weight_of
            if draw.loss == "tokens" and any(stage.adds for stage in draw.stages)
            else None,
            timeout=90.0 if any(stage.compiled for stage in draw.stages) else GROUP_TIMEOUT,
            **self._specs(),
        )

    def _specs(self) -> dict[str, Any]:
        if not self.draw.extras:
            return {}
        specs = nested_extras(self.draw, TensorChunkSpec(0), _Replicate())
        return {"kwargs_chunk_spec": {"extras": specs}}

    def _extras(self, step: int) -> dict[str, Any]:
        """Keyword arguments of every stage of this rank."""
        if not self.draw.extras:
            return {}
        pieces = extras_of(self.draw, step, self.here.column)
        if self.draw.pieces:
            return {"kwarg_mbs": [{"extras": each} for each in pieces]}
        return {"extras": joined_extras(self.draw, pieces)}

    def given(self, step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        arguments, targets = data(self.draw, step, self.here.column)
        first, last = 0 in self.numbers, len(self.draw.stages) - 1 in self.numbers
        if self.draw.pieces:
            pieces: dict[str, Any] = {"arg_mbs": arguments} if first else {}
            return (), pieces | ({"target_mbs": targets} if last else {}) | self._extras(step)
        whole = tuple(torch.cat(each) for each in zip(*arguments, strict=True)) if first else ()
        return whole, ({"target": torch.cat(targets)} if last else {}) | self._extras(step)

    def step(self, step: int) -> list[float]:
        self.optimizer.zero_grad()
        self.hooked.clear()
        losses: list[torch.Tensor] = []
        arguments, keywords = self.given(step)
        self.schedule.step(*arguments, **keywords, losses=losses)
        return [loss.item() for loss in losses]

    def gradients(self) -> dict[tuple[int, str], torch.Tensor]:
        made = {key: self.hooked.get(id(each), each.grad) for key, each in self.named.items()}
        return {
            key: full(torch.zeros_like(each) if made[key] is None else made[key])
            for key, each in self.named.items()
        }

    def evaluate(self, step: int) -> list[float]:
        losses: list[torch.Tensor] = []
        arguments, keywords = self.given(step)
        self.schedule.eval(*arguments, **keywords, losses=losses)
        return [loss.item() for loss in losses]


# ---- draws -----------------------------------------------------------------------------------------------


def run(draw: Draw, here: Here, agree: Any, outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """What the rank found in each step. agree(name): a block that all ranks of the draw come through."""
    with agree("made"):
        rank = Rank(draw, here)
    found = []
    outcome["connected"] = True
    try:
        with agree("connected"):
            rank.connect()
        for step in range(len(draw.sizes)):
            with agree(f"step {step}"):
                result: dict[str, Any] = {"column": here.column, "losses": rank.step(step)}
            result["gradients"] = rank.gradients()
            if not draw.hooks:
                rank.optimizer.step()
            result["parameters"] = {key: full(each) for key, each in rank.named.items()}
            if draw.evaluates:
                with agree(f"evaluated {step}"):
                    result["evaluated"] = rank.evaluate(step)
            found.append(result)
    finally:
        if hasattr(rank, "schedule"):
            rank.schedule.close()
    return found


class Agreement:
    """A block that all ranks of a draw leave together: by an error on each if there is one on any, so that
    nobody waits for ranks that were refused."""

    def __init__(self, store: dist.Store, topic: str, rank: int, ranks: int, limit: float) -> None:
        self._store, self._rank, self._ranks, self._limit = store, rank, ranks, limit
        self._topic = topic

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._store.set(f"{self._topic}/{self._rank}", "failed" if error else "passed")
        if error:
            return
        keys = [f"{self._topic}/{rank}" for rank in range(self._ranks)]
        self._store.wait(keys, timedelta(seconds=self._limit))
        if any(self._store.get(key) != b"passed" for key in keys):
            raise StoppedError


def outcome_of(draw: Draw, number: int, meshes: Meshes, context: Any, limit: float) -> dict[str, Any]:
    outcome: dict[str, Any] = {"state": "passed", "error": "", "trace": "", "connected": False}
    try:
        here = find(draw, meshes)
        if here is None:
            return outcome

        def agree(name: str) -> Agreement:
            return Agreement(context.store, f"{number}/{name}", context.rank, draw.ranks, limit)

        outcome["steps"] = run(draw, here, agree, outcome)
    except StoppedError:
        outcome["state"] = "stopped"
    except Exception as error:
        outcome["state"] = "refused" if isinstance(error, MeshcastError) else "failed"
        outcome |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return outcome


def serve(context: Any) -> None:
    """Takes draws until there are no more."""
    import sys

    folder = Path(sys.argv[-1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    distributed_c10d.default_pg_timeout = timedelta(seconds=GROUP_TIMEOUT)  # of the groups of meshes
    meshes = Meshes()
    number = 0
    while True:
        context.store.wait([f"draw {number}"], timedelta(seconds=CASE_LIMIT))
        draw: Draw | None = pickle.loads(context.store.get(f"draw {number}"))
        if draw is None:
            return
        limit = COMPILED_LIMIT if any(stage.compiled for stage in draw.stages) else DRAW_LIMIT
        faulthandler.dump_traceback_later(limit, exit=True)
        begin = time.monotonic()
        outcome = outcome_of(draw, number, meshes, context, limit)
        outcome["seconds"] = time.monotonic() - begin
        path = folder / f"{number}-{context.rank}.pt"
        torch.save(outcome, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        context.store.set(f"done {number}/{context.rank}", outcome["state"])
        keys = [f"done {number}/{rank}" for rank in range(context.world)]
        context.store.wait(keys, timedelta(seconds=limit))
        if any(context.store.get(key) != b"passed" for key in keys):
            for ranks in pipelines(draw):
                meshes.forget(ranks)
        faulthandler.cancel_dump_traceback_later()
        number += 1


CASES = [serve]
