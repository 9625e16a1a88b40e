"""What a stage and a schedule promise without a second process: signatures, layouts, shapes, batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from meshcast import Layout
from meshcast import pipelining as ours
from meshcast.base.checks import Reader
from meshcast.base.wire import pack, unpack
from meshcast.errors import AbortedError, LayoutError, MeshcastError
from meshcast.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBV,
    get_schedule_class,
)
from meshcast.pipelining.action import ScheduleError
from meshcast.pipelining.data_parallel import shared_parameters_of
from meshcast.pipelining.inference import Probe
from meshcast.pipelining.microbatch import divided, local_shard
from meshcast.pipelining.parallel import (
    Inferred,
    LocalValue,
    SentDTensor,
    StageMesh,
    ValuePlacements,
    global_shape,
    gradient_placements,
    split_dims,
)
from meshcast.pipelining.schedule import ScheduleOptions
from meshcast.pipelining.wiring import ShapesReport, report_outputs
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.nn.attention.flex_attention import create_block_mask

CPU = torch.device("cpu")
# Not in every release: since torch 2.12, and the last since 2.13.
LATER = ("output_grads", "input_grads", "get_mesh", "defer_pp_recv")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (PipelineStage.__init__, theirs.PipelineStage.__init__),
        (ScheduleGPipe.__init__, theirs.ScheduleGPipe.__init__),
        (Schedule1F1B.__init__, theirs.Schedule1F1B.__init__),
        (ScheduleEager1F1B.__init__, theirs.Schedule1F1B.__init__),
        (ScheduleInterleaved1F1B.__init__, theirs.ScheduleInterleaved1F1B.__init__),
        (ScheduleZBV.__init__, theirs.ScheduleZBVZeroBubble.__init__),
        (ScheduleZBV.step, theirs.ScheduleZBVZeroBubble.step),
        (Schedule1F1B.step, theirs.Schedule1F1B.step),
        (Schedule1F1B.eval, theirs.Schedule1F1B.eval),
    ],
)
def test_parameters_of_torch_come_first(ours: object, torchs: object) -> None:
    """Names, order, kinds and defaults of the installed release; what is added is keyword-only."""
    known = inspect.signature(torchs).parameters
    mine = {
        name: parameter
        for name, parameter in inspect.signature(ours).parameters.items()
        if name in known or name not in LATER
    }
    for position, (name, parameter) in enumerate(known.items()):
        if name in ScheduleOptions.__annotations__ and "options" in mine:
            continue  # **options
        assert name in mine, f"torch has {name}"
        assert mine[name].default == parameter.default
        if name in (
            "max_active_stages",
            "unshard_lookahead",
            "defer_reduce_grad_wait",
            "max_outstanding_sends",
        ):
            continue  # of torch 2.15: here by name alone, under every release
        assert mine[name].kind == parameter.kind
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert list(mine)[position] == name
    added = set(mine) - set(known)
    apart = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(mine[name].kind in apart for name in added)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("1F1B", Schedule1F1B),
        ("schedulegpipe", ScheduleGPipe),
        ("EAGER1F1B", ScheduleEager1F1B),
        ("ScheduleZBVZeroBubble", ScheduleZBV),
        ("Interleaved1F1B", ScheduleInterleaved1F1B),
    ],
)
def test_classes_by_name(name: str, cls: type) -> None:
    assert get_schedule_class(name) is cls


@pytest.mark.parametrize("name", ["weight", "_orig_mod.weight"])
def test_a_shared_parameter_of_a_compiled_module_has_its_own_name(name: str) -> None:
    module = nn.Linear(2, 2)
    compiled = torch.compile(module, backend="eager")
    assert shared_parameters_of(0, {"tied": name}, compiled)["tied"] is module.weight
    with pytest.raises(
        LayoutError, match="stage 0, shared parameter 'tied': the module has no parameter 'wait'"
    ):
        shared_parameters_of(0, {"tied": "wait"}, compiled)


def test_an_unknown_class_lists_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="1F1B, Interleaved1F1B, GPipe, LoopedBFS"):
        get_schedule_class("ZigZag")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["PipelineStage", "traced"])
def test_stages_of_torch_are_refused_with_where_to_get_ours(kind: str) -> None:
    if kind == "traced":
        pipe = theirs.pipeline(Traced(), mb_args=(torch.ones(2, 4),))
        stage = pipe.build_stage(0, CPU)
    else:
        stage = theirs.PipelineStage(nn.Linear(2, 2), 0, 1, CPU)
    with pytest.raises(LayoutError, match=r"import it, pipeline and build_stage from meshcast"):
        Schedule1F1B(stage, 2)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_waits_in_a_file_of_a_later_torch(tmp_path: Path, form: str) -> None:
    """Older releases read 1WAIT_B0 as a weight gradient of stage 1."""
    path = tmp_path / "schedule.csv"
    reductions = "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    more = {"compute_only": "", "compute_comms": reductions}[form]
    path.write_text(f"0F0,1WAIT_F0,1F0,,1B0,0WAIT_B0,0B0,{more}\n".replace(",,", "," if more else ",,"))
    module = nn.Linear(3, 3)
    stages = [PipelineStage(module, index, 2, CPU) for index in range(2)]
    schedule = ours.schedules._PipelineScheduleRuntime(stages, 1, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(path), format=form)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    output = schedule.step(x, target=y)
    assert torch.equal(output, module(module(x)))
    expected = torch.autograd.grad(nn.functional.mse_loss(module(module(x)), y), module.weight)[0]
    torch.testing.assert_close(module.weight.grad, expected)


@pytest.mark.usefixtures("alone")
def test_positional_arguments_of_torch_2_11() -> None:
    """(submodule, stage_index, num_stages, device, input_args, output_args, group, dw_builder)"""
    example = torch.ones(2, 4)
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, CPU, example, example, dist.group.WORLD)
    assert stage.group is dist.group.WORLD
    build = nn.Identity
    assert PipelineStage(nn.Linear(4, 4), 0, 1, CPU, None, None, dist.group.WORLD, build).dw_builder is build
    # Those of 2.13: output_grads, input_grads, group, dw_builder, get_mesh.
    stage = PipelineStage(nn.Linear(4, 4), 0, 1, CPU, example, example, None, None, dist.group.WORLD)
    assert stage.group is dist.group.WORLD


@pytest.mark.usefixtures("alone")
def test_one_stage_alone() -> None:
    torch.manual_seed(0)
    module, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.randn(6, 2)
    expected = nn.functional.mse_loss(module(x), y)
    gradients = torch.autograd.grad(expected, list(module.parameters()))
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, CPU), 3, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    torch.testing.assert_close(output, module(x))
    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
    torch.testing.assert_close([p.grad for p in module.parameters()], list(gradients))
    assert schedule.bytes_sent == 0
    assert [str(action) for action in schedule.actions[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


@pytest.mark.usefixtures("alone")
def test_training_without_gradients_is_refused() -> None:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(3, 2), 0, 1, CPU), 2, loss_fn=nn.functional.mse_loss)
    with torch.no_grad(), pytest.raises(MeshcastError, match="use eval"):
        schedule.step(torch.ones(4, 3), target=torch.ones(4, 2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rows", [7, 4, 2, 1])
def test_a_batch_is_cut_as_tensor_split_does(rows: int) -> None:
    module, x, y = nn.Linear(3, 2), torch.randn(rows, 3), torch.randn(rows, 2)
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, CPU), 3, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    assert torch.equal(output, torch.cat([module(part) for part in x.tensor_split(3)]))
    parts = list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
    expected = [nn.functional.mse_loss(module(a), b) if len(a) else torch.zeros(()) for a, b in parts]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    # One rank without mesh=: micro-batches count alike, as in torch, but for those without samples.
    gradient = torch.autograd.grad(sum(expected) / min(rows, 3), module.weight)[0]
    assert torch.allclose(module.weight.grad, gradient, rtol=0, atol=1e-7)


@pytest.mark.usefixtures("alone")
def test_a_batch_without_samples_is_refused_and_the_next_runs() -> None:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(3, 2), 0, 1, CPU), 2)
    with pytest.raises(LayoutError, match="has no samples in dimension 0"):
        schedule.step(torch.ones(0, 3))
    assert schedule.step(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.usefixtures("alone")
def test_a_closed_schedule_says_so() -> None:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(3, 2), 0, 1, CPU), 2)
    schedule.step(torch.ones(4, 3))
    schedule.close()
    with pytest.raises(AbortedError, match="closed"):
        schedule.step(torch.ones(4, 3))


@pytest.mark.parametrize("size", range(9))
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_local_shards_follow_torch_chunk(size: int, parts: int) -> None:
    whole = torch.arange(2 * size).reshape(2, size)
    chunks = [*whole.chunk(parts, dim=1), *[whole[:, :0]] * parts][:parts] if size else [whole] * parts
    for rank in range(parts):
        mesh = StageMesh(torch.arange(parts), rank)
        assert torch.equal(local_shard(whole, mesh, (Shard(1),)), chunks[rank])
        assert torch.equal(local_shard(whole, mesh, (Replicate(),)), whole)


def test_a_part_of_a_mask_without_samples_is_asked_about_none() -> None:
    seen = torch.tensor([3, 5, 1])
    mask = create_block_mask(lambda b, _, __, k: k < seen[b], 3, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    for part in divided(mask, 0, [2, 1, 0]):  # as micro-batches
        *_, none = divided(part, 0, [part.kv_num_blocks.shape[0], 0])  # as ranks
        asked = torch.vmap(none.mask_mod, (0, None, None, None))
        assert asked(torch.arange(0), *torch.arange(3)).shape == (0,)
        assert none.kv_num_blocks.shape[0] == 1


def test_local_shards_on_two_dimensions() -> None:
    whole = torch.arange(24).reshape(6, 4)
    mesh = StageMesh(torch.arange(6).reshape(3, 2), 5)
    assert torch.equal(local_shard(whole, mesh, (Shard(0), Shard(1))), whole[4:, 2:])
    assert torch.equal(local_shard(whole, mesh, (Shard(0), Shard(0))), whole[5:])
    with pytest.raises(LayoutError, match="Shard and Replicate"):
        local_shard(whole, mesh, (Partial(), Replicate()))


def test_batch_dimensions_are_those_that_split_samples() -> None:
    mesh = StageMesh(torch.arange(4).reshape(2, 2), 0)
    assert split_dims(ValuePlacements("in", None, mesh)) == [0]
    assert split_dims(ValuePlacements("in", [Replicate(), Shard(1)], mesh)) == []
    assert split_dims(ValuePlacements("in", [[Replicate(), Shard(0)], [Shard(0), Replicate()]], mesh)) == [
        0,
        1,
    ]


def test_gradients_of_pending_sums_are_whole() -> None:
    assert gradient_placements((Partial("sum"), Shard(1))) == (Replicate(), Shard(1))
    with pytest.raises(LayoutError, match="Partial"):
        gradient_placements((Partial("max"),))


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        ([0, 1, 2], [Shard(0)], (4, 5)),
        ([0, 1, 2], [Shard(1)], (4, 2)),
        ([[0, 1], [2, 3]], [Shard(0), Shard(0)], (7, 3)),
        ([[0, 1], [2, 3]], [Shard(1), Replicate()], (2, 3)),
        ([[0, 1, 2], [3, 4, 5]], [Shard(-1), Shard(0)], (5, 3)),
        ([3, 1], [Partial("sum")], (2, 2)),
        ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)], (8, 2)),
    ],
)
def test_the_global_shape_from_local_ones(mesh: list, placements: list, shape: tuple[int, ...]) -> None:
    layout = Layout(mesh, placements)
    assert global_shape(layout, layout.local_shapes(shape), "value") == shape
    assert Layout.from_wire(Reader(layout.to_wire(), "layout")) == layout


def test_shards_that_no_layout_has_are_refused() -> None:
    layout = Layout([0, 1, 2], [Shard(0)])
    with pytest.raises(
        LayoutError, match=r"value: .* rank 1 has a local shape of \(1,\).* \(2,\) there"
    ) as caught:
        global_shape(layout, {0: (2,), 1: (1,), 2: (1,)}, "value")
    assert caught.value.rank == 1


def test_outputs_survive_the_wire() -> None:
    layout = Layout([[0, 1], [2, 3]], [Shard(1), Partial("sum")])
    stage = mock.Mock(is_last=False)
    stage.mesh.layout.return_value = layout
    sent = SentDTensor((Shard(0), Replicate()), (4, 0, 5), ("dp", "tp"), (((2,), (1,)),))
    for each in (None, sent):
        value = LocalValue((2, 0, 5), torch.bfloat16, True, None, each)
        report = report_outputs(stage, Inferred([value], needs_data=True))
        (found,), needs_data = unpack(ShapesReport, pack(report))
        assert needs_data
        assert found[:4] == (value.shape, value.dtype, value.requires_grad, layout)
        assert (found.sent_dtensor() is None) == (each is None)
        if found.sent_dtensor() is not None:
            assert found.sent_dtensor().placements == sent.placements
            assert found.sent_dtensor().shape == sent.shape
            assert found.sent_dtensor().names == sent.names
    assert unpack(ShapesReport, pack(report_outputs(stage, Inferred(None)))).outputs is None


class Counting(nn.Module):
    """Would show if shape inference ran for real: it has a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.drop(self.norm(x))
        return y, (y > 0).sum(1)


def test_inference_of_shapes_changes_nothing() -> None:
    module = Counting()
    mean, random_state = module.norm.running_mean.clone(), torch.get_rng_state()
    outputs = Probe(module, "stage 0", True).outputs(([torch.ones(3, 4)], {}))
    assert outputs.outputs == [LocalValue((3, 4), torch.float32, True), LocalValue((3,), torch.int64, False)]
    assert torch.equal(module.norm.running_mean, mean)
    assert int(module.norm.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_module_that_needs_data_says_what_to_do() -> None:
    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.sum().item())]

    with pytest.raises(LayoutError, match="give output_args"):
        Probe(Greedy(), "stage 0", False).outputs(([torch.ones(3)], {}))
    with pytest.raises(LayoutError, match=r"must be tensors, found \['int'\]"):
        Probe(_Returns([3]), "stage 0", False).outputs(([torch.ones(3)], {}))


class _Returns(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: torch.Tensor) -> object:
        return self.value


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBV", "1F1B", "ZBH2"])
@pytest.mark.parametrize("delayed", [False, True])
def test_one_rank_runs_every_schedule(name: str, delayed: bool) -> None:
    """Two stages on the only rank where the schedule has several on each: values are handed over."""
    torch.manual_seed(0)
    several = name in ("Interleaved1F1B", "ZBV")
    parts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)] if several else [nn.Linear(3, 2)]
    whole = nn.Sequential(*parts)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
        nn.functional.mse_loss(whole(part), target).backward()
    expected = [parameter.grad / 3 for parameter in whole.parameters()]
    whole.zero_grad()
    stages = [PipelineStage(part, index, len(parts), CPU) for index, part in enumerate(parts)]
    schedule = get_schedule_class(name)(
        stages if several else stages[0], 3, loss_fn=nn.functional.mse_loss, delay_weight_grad=delayed
    )
    output = schedule.step(x, target=y)
    assert torch.equal(output, torch.cat([whole(part) for part in x.chunk(3)]))
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, whole.parameters(), strict=True))
    assert torch.equal(schedule.eval(x), output)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": "auto", "memory_budget": 0}, "memory_budget must be"),
        ({"warmup": "lazy"}, "warm-up must be"),
        ({"warmup": 0}, "too short"),
    ],
)
def test_bad_options_of_a_schedule(options: dict, message: str) -> None:
    stage = PipelineStage(nn.Linear(3, 2), 0, 1, CPU)
    with pytest.raises(ScheduleError, match=message):
        ScheduleEager1F1B(stage, 4, **options)


@pytest.mark.usefixtures("alone")
def test_stages_that_cannot_be_on_one_rank() -> None:
    first, second = (PipelineStage(nn.Linear(3, 3), index, 2, CPU) for index in range(2))
    other = PipelineStage(nn.Linear(3, 3), 1, 3, CPU)
    with pytest.raises(LayoutError, match="different num_stages: 2 and 3"):
        ScheduleZBV([first, other], 2)
    with pytest.raises(LayoutError, match="makes a stage twice"):
        ScheduleZBV([second, second], 2)
    with pytest.raises(LayoutError, match="at least one stage"):
        ScheduleZBV([], 2)
    with pytest.raises(LayoutError, match="found list"):
        Schedule1F1B([first, second], 2)
