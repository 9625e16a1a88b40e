"""Batches of any size, modules that fake tensors cannot run, and refusals that end nothing. Six ranks; run by
pipeline_gradient_cases.py."""

from __future__ import annotations

from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import Edge, PipelineStage
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    batch,
    check_gradients,
    in_a_row,
    mlp,
    place,
    schedule_for,
    train_alone,
)
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mse = nn.functional.mse_loss
SHARD, WHOLE = [Shard(0)], [Replicate()]


class Heads(nn.Module):
    """Cannot run on an empty batch."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)  # a fake row does not count
        heads = x.view(x.shape[0], -1, 2, 3).softmax(dim=2)
        return self.body(x) + heads.reshape(x.shape)


class InPlace(nn.Module):
    """Writes on its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.tanh_())


class Experts(nn.Module):
    """Which rows go where depends on the data."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([body, mlp(1, seed=5)[0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(-1) > 0).long()
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]))
        return result


class Mixed(Heads):
    """Which rows go where depends on the data, and it cannot run on an empty batch either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(-1) > 0).nonzero()[:, 0]
        return super().forward(x.index_add(0, rows, x[rows]))


def sizes_case(name: str, kind: type[nn.Module], **options: Any):
    """Batches of 12, 7, 2 and 1 samples in 4 micro-batches on ranks that often have none; evaluation of 5."""

    def case(_) -> None:
        here = place(in_a_row([2, 3, 1]))
        reference, mine = ([kind(body) for body in mlp(3)] for _ in range(2))
        module = mine[here.stage]
        stage = PipelineStage(module, here.stage, 3, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for(name, stage, 4, **options)
        for step, rows in enumerate((12, 7, 12, 2, 1)):
            x, y = batch(rows, seed=step)
            for each in (*reference, module):
                each.zero_grad()
            # A micro-batch counts by its samples: the loss is that of the whole batch.
            mse(nn.Sequential(*reference)(x.clone()), y).backward()
            output = schedule.step(x, target=y)
            for (label, mine_), theirs in zip(
                module.named_parameters(), reference[here.stage].parameters(), strict=True
            ):
                expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                found = torch.zeros_like(theirs) if mine_.grad is None else mine_.grad
                assert (found - expected).abs().max() <= 1e-12, f"{rows} rows: {label}"
            if here.stage == 2:
                assert output.shape == (rows, 6)
            if isinstance(module, Heads):
                seen = module.rows.clone()
                if here.mesh.size() > 1:
                    dist.all_reduce(seen, group=here.mesh.get_group())
                assert seen == sum((12, 7, 12, 2, 1)[: step + 1])
        result = schedule.eval(batch(5)[0])
        if here.stage == 2:
            assert (result - nn.Sequential(*reference)(batch(5)[0])).abs().max() <= 1e-12

    case.__name__ = f"sizes_{name}_{kind.__name__}{'_'.join(['', *options])}"
    return case


class Averaged(Heads):
    """Also takes part in a mean over the rows of all ranks, in which no fake sample may count."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            total = functional.all_reduce(x.detach().sum(0), "sum", self.group)
            x = x + functional.wait_tensor(total)
        return super().forward(x)


def a_module_that_would_take_a_made_up_sample_for_one_of_the_batch(_) -> None:
    here = place(in_a_row([1, 3]))
    if here is None:
        return
    module = Averaged(mlp(2)[here.stage])
    if here.stage:
        module.group = here.mesh.get_group()
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 2)
    x, y = batch(4)
    raises(
        (LayoutError, AbortedError),
        "this rank has no samples of a micro-batch",
        "communicates with ranks that have some",
        call=lambda: schedule.step(x, target=y),
    )
    schedule.step(*batch(6)[:1], target=batch(6)[1])


class OneLooks(nn.Module):
    """Communicates, and fake tensors tell its shapes on all ranks but the second."""

    def __init__(self, body: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.body, self.group = body, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.rank() == 1 and float(x.detach().sum()) == 1e9:
            return x
        total = functional.all_reduce(x.detach().sum(0), "sum", self.group)
        return self.body(x) + 0 * functional.wait_tensor(total)


def a_module_that_one_rank_alone_cannot_fake(_) -> None:
    """All ranks of the stage run it on data then: what one of them waits for the others bring."""
    here = place(in_a_row([3, 1]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    body = module if here.stage else OneLooks(module, here.mesh.get_group())
    stage = PipelineStage(body, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 2)
    for rows in (12, 4):  # the second time one rank has no samples of a micro-batch
        x, y = batch(rows)
        for each in (*reference, module):
            each.zero_grad()
        train_alone(nn.Sequential(*reference), x, y, 2)
        schedule.step(x, target=y)
        check_gradients(module, reference[here.stage])
    if here.stage == 0:
        one = torch.ones(1)
        dist.all_reduce(one, group=here.mesh.get_group())
        assert one == 3


def evaluation_in_inference_mode(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 2)
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 2)
    for _ in range(2):
        module.zero_grad()
        losses: list[torch.Tensor] = []
        with torch.inference_mode():
            output = schedule.eval(x, target=y, losses=losses)
        if here.stage:
            assert len(losses) == 2
            index, whole = here.mesh.get_local_rank(), nn.Sequential(*reference)(x).detach()
            expected = torch.cat([[*each.chunk(3), each[:0]][index] for each in whole.chunk(2)])
            assert output.shape == expected.shape
            assert torch.allclose(output, expected, rtol=0, atol=1e-12)
        schedule.step(x, target=y)
        check_gradients(module, reference[here.stage])


# ---- refusals --------------------------------------------------------------------------------------------


def what_a_constructor_refuses_on_one_rank(context) -> None:
    """The others hear of it at once; then all can go on."""
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    x, y = batch(8)

    def step(**options: Any) -> None:
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **options)
        schedule_for("1F1B", stage, 2).step(x, target=y)

    wrong = {"data_dims": [3]} if context.rank == 3 else {}
    raises(
        LayoutError if wrong else AbortedError, "data_dims: expected mesh dimensions 0..0", "found 3",
        call=lambda: step(**wrong),
    )  # fmt: skip
    wrong = {"shared_parameters": {"tied": "0.nothing"}} if context.rank == 0 else {}
    raises(LayoutError if wrong else AbortedError, "no parameter '0.nothing'", call=lambda: step(**wrong))
    train_alone(nn.Sequential(*reference), x, y, 2)
    step()
    check_gradients(module, reference[here.stage])


def a_plain_reshard_after_a_refusal(context) -> None:
    """Between the same meshes, on the private group that the pipeline uses."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])]
    group = dist.new_group(list(range(5)))
    if context.rank == 5:
        return
    index = int(context.rank > 1)
    schedule = schedule_for(
        "1F1B", PipelineStage(mlp(2)[index], index, 2, CPU, group=group, mesh=meshes[index]), 2
    )
    x, y = batch(8)
    schedule.step(x, target=y)
    raises((LayoutError, AbortedError), "no samples", call=lambda: schedule.step(x[:0], target=y))
    value = distribute_tensor(x, meshes[0], [Shard(0)], src_data_rank=None) if index == 0 else None
    given = value if value is not None else meshcast.TensorSpec(x.shape, x.dtype, meshes[0], [Shard(0)])
    moved = meshcast.reshard(given, meshes[1], [Replicate()], group=group)
    if index:
        assert torch.equal(moved.to_local(), x)
    schedule.step(x, target=y)


def an_ambiguous_stage_is_refused(_) -> None:
    """An input that is whole beside one that is cut by features or tokens, and plain parameters."""
    here = place([[0], [1, 2]])
    if here is None:
        return
    options: dict[str, Any] = {}
    if here.stage:
        options = {"input_placements": [[Shard(1)], [Replicate()]]}

    class Two(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.body(x), self.body(x).mean(0)

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return (x.sum() + m.sum()) * self.scale

    def step(**more: Any) -> None:
        module = Join() if here.stage else Two(mlp(1)[0])
        stage = PipelineStage(
            module, here.stage, 2, CPU, group=here.group, mesh=here.mesh,
            edges=[Edge(0, 0, 1, 0), Edge(0, 1, 1, 1)],
            **({"output_placements": WHOLE} if here.stage == 0 else {}), **options, **more,
        )  # fmt: skip
        schedule_for("1F1B", stage, 2, lambda out, _: out).step(*batch(4)[:1], target=batch(4)[1])

    raises(LayoutError if here.stage else AbortedError, "data_dims=[0]", "data_dims=[]", call=step)
    step(**({"data_dims": []} if here.stage else {}))


CASES = [
    sizes_case("1F1B", Heads),
    sizes_case("1F1B", InPlace),
    sizes_case("1F1B", Experts),
    sizes_case("1F1B", Mixed),
    sizes_case("ZBH1", Heads),
    a_module_that_would_take_a_made_up_sample_for_one_of_the_batch,
    a_module_that_one_rank_alone_cannot_fake,
    evaluation_in_inference_mode,
    what_a_constructor_refuses_on_one_rank,
    a_plain_reshard_after_a_refusal,
    an_ambiguous_stage_is_refused,
]
