"""Gradients that are final on all ranks at once: pipelines side by side with different numbers of samples,
hooks that step. Four ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class
from multiproc.pipeline_models import CPU, TIMEOUT, in_a_row, mlp, place, schedule_for
from multiproc.pipeline_scale_cases import (
    BF16,
    F32,
    RANKS,
    WIDTH,
    Loss,
    alone,
    check,
    cut,
    mean_loss,
    pair_loss,
    pair_weight,
    routed,
    same_bits,
    samples,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# ---- columns ---------------------------------------------------------------------------------------------


def columns_case(
    wrapper: str,
    dtype: torch.dtype,
    loss_fn: Loss = mean_loss,
    stages: int = 1,
    name: str = "1F1B",
    routes: bool = False,
    **options: Any,
):
    """A pipeline in each column, with other numbers of samples than the others. After a step of SGD all
    copies have the same bits."""

    def case(context) -> None:
        columns = RANKS // stages
        column, index = context.rank % columns, context.rank // columns
        groups = [dist.new_group([each + columns * i for i in range(stages)]) for each in range(columns)]
        meshes = [DeviceMesh("cpu", list(range(i * columns, (i + 1) * columns))) for i in range(stages)]
        mesh = meshes[index]
        if wrapper == "hybrid":
            mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("a", "b"))

        def build(kind: torch.dtype, told: bool) -> list[nn.Module]:
            return routed(stages, kind, told=told) if routes else mlp(stages, WIDTH, kind)

        module = build(dtype, False)[index]
        inner = module
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=mesh.get_group())
        elif wrapper == "ddp_inside":
            module = nn.Sequential(DistributedDataParallel(module, process_group=mesh.get_group()))
        elif wrapper in ("fsdp", "hybrid"):
            module = fully_shard(module, mesh=mesh)
        elif wrapper == "nested":
            fully_shard(module[0], mesh=mesh)
            module = fully_shard(module, mesh=mesh)
        stage = PipelineStage(module, index, stages, CPU, group=groups[column])
        schedule = get_schedule_class(name)(stage, 3, loss_fn=loss_fn, timeout=TIMEOUT, **options)
        given = [[4, 3, 1, 2], [3, 3, 3, 3], [1, 5, 2, 2]]
        for step, rows in enumerate(given):
            data = [samples(rows[each], dtype, seed=10 * step + each) for each in range(columns)]
            pieces = [piece for x, y in data for piece in cut(x, y, 3)]
            exact, rough = build(torch.float64, True), build(dtype, True)
            for each, source in zip(exact, rough, strict=True):
                each.load_state_dict(source.state_dict())
            shares = [1 / len(pieces)] * len(pieces)
            alone(exact, [(a.double(), b.double()) for a, b in pieces], shares, loss_fn)
            alone(rough, pieces, shares, loss_fn)
            module.zero_grad()
            schedule.step(data[column][0], target=data[column][1])
            check(inner, exact[index], rough[index])
            if step == 0 and wrapper in ("ddp", "ddp_inside", "hybrid"):
                before = {name: each.detach().clone() for name, each in inner.named_parameters()}
                torch.optim.SGD(module.parameters(), lr=0.1).step()
                same_bits(inner, mesh.get_group("a") if wrapper == "hybrid" else mesh.get_group())
                with torch.no_grad():
                    for label, each in inner.named_parameters():
                        each.copy_(before[label])

    kind = str(dtype).removeprefix("torch.")
    more = "" if loss_fn is mean_loss else "_pairs"
    case.__name__ = f"columns_{wrapper}_{stages}_{name}_{kind}{more}{'_routed' if routes else ''}"
    return case


COLUMNS = [
    *[columns_case(wrapper, F32) for wrapper in ("ddp", "fsdp", "nested", "hybrid", "ddp_inside")],
    columns_case("ddp", BF16),
    columns_case("fsdp", BF16),
    *[columns_case(wrapper, F32, pair_loss) for wrapper in ("ddp", "fsdp", "hybrid")],
    *[columns_case(wrapper, F32, stages=2) for wrapper in ("ddp", "fsdp")],
    columns_case("ddp", F32, stages=2, name="ZBH1"),
    columns_case("fsdp", F32, pair_loss, stages=2),
    *[columns_case(wrapper, F32, routes=True) for wrapper in ("ddp", "fsdp")],
    *[
        columns_case(wrapper, F32, pair_loss, routes=True, weight_fn=pair_weight)
        for wrapper in ("ddp", "fsdp")
    ],
]


def meshes_in_columns_case(wrapper: str, loss_fn: Loss):
    """Two columns of one stage on two ranks each, of which samples are split: a column counts by them."""

    def case(context) -> None:
        column, rank = divmod(context.rank, 2)
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        across = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])][rank]
        reference, module = mlp(1)[0], mlp(1)[0]
        wrapped: nn.Module = module
        if wrapper == "ddp":
            wrapped = DistributedDataParallel(module, process_group=across.get_group())
        else:
            wrapped = fully_shard(module, mesh=across)
        stage = PipelineStage(wrapped, 0, 1, CPU, group=groups[column], mesh=meshes[column])
        schedule = schedule_for("GPipe", stage, 3, loss_fn)
        for step, rows in enumerate(([7, 5], [6, 6], [12, 3])):
            data = [samples(rows[each], torch.float64, seed=10 * step + each) for each in range(2)]
            x, y = (torch.cat(each) for each in zip(*data, strict=True))
            reference.zero_grad()
            wrapped.zero_grad()
            alone([reference], [(x, y)], [1.0], loss_fn)
            schedule.step(data[column][0], target=data[column][1])
            check(module, reference, reference)

    case.__name__ = f"meshes_in_columns_{wrapper}_{loss_fn.__name__}"
    return case


# ---- hooks that step -------------------------------------------------------------------------------------


def hooks_case(name: str, sizes: Sequence[int], wrapper: str = "", **options: Any):
    """The optimizer in post-accumulate-grad hooks: parameters as by one optimizer behind each step, and the
    same bits on all ranks of a stage."""

    def case(_) -> None:
        here = place(in_a_row(sizes or [1, 1]))
        if here is None:
            return
        count = 4 if name == "ZBV" else len(sizes or [1, 1])
        numbers = [here.stage, 3 - here.stage] if name == "ZBV" else [here.stage]
        reference, inner = mlp(count), [mlp(count)[number] for number in numbers]
        modules: list[nn.Module] = inner
        if wrapper == "fsdp":
            modules = [fully_shard(each, mesh=here.mesh) for each in inner]
        elif wrapper == "ddp":
            modules = [DistributedDataParallel(each, process_group=here.mesh.get_group()) for each in inner]
        mesh = {"mesh": here.mesh} if sizes else {}
        stages = [
            PipelineStage(module, number, count, CPU, group=here.group, **mesh)
            for module, number in zip(modules, numbers, strict=True)
        ]
        schedule = schedule_for(name, stages if len(stages) > 1 else stages[0], 3, **options)
        calls: list[str] = []
        handles = []

        def register(label: str, parameter: nn.Parameter) -> None:
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def hook(given: torch.Tensor) -> None:
                assert given is parameter
                calls.append(label)
                optimizer.step()
                optimizer.zero_grad()

            handles.append(parameter.register_post_accumulate_grad_hook(hook))

        if name == "GPipe":
            schedule.step(*samples(9, torch.float64)[:1], target=samples(9, torch.float64)[1])
            for module in modules:
                module.zero_grad()
        for number, module in zip(numbers, inner, strict=True):
            for label, parameter in module.named_parameters():
                register(f"{number}.{label}", parameter)
        every = torch.optim.SGD(nn.ModuleList(reference).parameters(), lr=0.1)
        for step in range(2):
            x, y = samples(9, torch.float64, seed=step)
            every.zero_grad()
            for a, b in cut(x, y, 3):
                (mean_loss(nn.Sequential(*reference)(a), b) / 3).backward()
            every.step()
            calls.clear()
            schedule.step(x, target=y)
            if options.get("sync_gradients") is False:
                for stage in stages:
                    assert not stage.reduces or not calls
                    stage.sync_gradients()
            assert len(calls) == len(set(calls)) == len(handles), calls
            for number, module in zip(numbers, inner, strict=True):
                for mine, theirs in zip(module.parameters(), reference[number].parameters(), strict=True):
                    assert mine.grad is None
                    assert (whole(mine.detach()) - theirs).abs().max() <= 1e-12
                if sizes and wrapper != "fsdp":
                    same_bits(module, here.mesh.get_group())
        for handle in handles:
            handle.remove()
        calls.clear()
        schedule.step(x, target=y)
        assert not calls, "hooks that were removed"
        for module in inner:
            assert all(parameter.grad is not None for parameter in module.parameters())

    label = "_".join(map(str, sizes)) or "torch"
    case.__name__ = f"hooks_{name}_{label}{'_' + wrapper if wrapper else ''}{'_'.join(['', *options])}"
    return case


def hooks_of_a_failed_step_stay(_) -> None:
    """A module raises: nobody steps, and the hooks are there afterwards."""
    here = place(in_a_row([2, 2]))
    module = mlp(2)[here.stage]
    calls: list[Any] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)

    def loss_fn(*_: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 2, loss_fn)
    x, y = samples(8, torch.float64)
    try:
        schedule.step(x, target=y)
    except Exception:
        pass
    else:
        raise AssertionError("the step did not fail")
    assert not calls
    module(x[:1]).sum().backward()
    assert len(calls) == len(list(module.parameters()))


HOOKS = [
    *[hooks_case(name, (2, 2)) for name in ("1F1B", "GPipe", "ZBH1", "ZBV")],
    hooks_case("1F1B", ()),
    hooks_case("Eager1F1B", (1, 3), delay_weight_grad=True),
    hooks_case("1F1B", (2, 2), sync_gradients=False),
    *[hooks_case("1F1B", (2, 2), wrapper) for wrapper in ("fsdp", "ddp")],
    hooks_of_a_failed_step_stay,
]


CASES = [
    *COLUMNS,
    *[
        meshes_in_columns_case(wrapper, loss_fn)
        for wrapper in ("ddp", "fsdp")
        for loss_fn in (mean_loss, pair_loss)
    ],
    *HOOKS,
]
