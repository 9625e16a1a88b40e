"""What torch.distributed.pipelining has since 2.14 and 2.15, under every release, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    analyze_pipeline_activation_liveness,
    load_csv,
    schedules,
)
from meshcast.pipelining.action import ScheduleError
from meshcast.pipelining.compat import Gathering, windows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import schedules as torch_schedules

CPU = torch.device("cpu")
mse = nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stages_of(count: int, *, sharded: bool = False) -> tuple[list[PipelineStage], list[nn.Module]]:
    torch.manual_seed(3)
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for module in modules:
            fully_shard(module, mesh=mesh)
    return [PipelineStage(module, number, count, CPU) for number, module in enumerate(modules)], modules


def texts(row: list[Any]) -> list[str]:
    return [str(each) for each in row]


# ---- FSDP2's window ------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [1, 2, 3, 5])
def test_the_window_is_that_of_torch(active: int) -> None:
    drawn = random.Random(active)
    for _ in range(40):
        stages = [drawn.randrange(5) for _ in range(30)]
        row = [torch_schedules._Action(stage, torch_schedules.F, place) for place, stage in enumerate(stages)]
        expected = texts(torch_schedules._add_unshard_reshard(row, active))
        found, held = [], set()
        for action, (freed, fetched) in zip(row, windows([[s] for s in stages], active, active), strict=True):
            found += [f"{stage}RESHARD" for stage in freed] + [f"{stage}UNSHARD" for stage in fetched]
            found.append(str(action))
            held = held.difference(freed).union(fetched)
        assert found + [f"{stage}RESHARD" for stage in sorted(held)] == expected


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_gathering_less_ahead_moves_no_reshard(ahead: int) -> None:
    stages = [[stage] for stage in (0, 2, 4, 6, 0, 2, 4, 6, 6, 4, 2, 0)]
    full, fewer = windows(stages, 4, 4), windows(stages, 4, ahead)
    assert [freed for freed, _ in full] == [freed for freed, _ in fewer]
    gathered = [stage for _, fetched in fewer for stage in fetched]
    assert sorted(gathered) == sorted(stage for _, fetched in full for stage in fetched)
    assert max(len(fetched) for _, fetched in fewer) == ahead
    known: set[int] = set()
    for (stage,), (freed, fetched) in zip(stages, fewer, strict=True):  # there before it computes
        known = known.difference(freed).union(fetched)
        assert stage in known


def test_how_far_ahead_auto_gathers() -> None:
    assert [Gathering(4, "auto").ahead(rank, 4) for rank in range(4)] == [2, 3, 4, 4]
    assert [Gathering(4, "full").ahead(rank, 4) for rank in range(4)] == [4, 4, 4, 4]
    assert [Gathering(2, (1, 7)).ahead(rank, 2) for rank in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("max_active_stages", 0, "max_active_stages must be an integer of at least 1"),
        ("max_active_stages", True, "max_active_stages must be an integer"),
        ("max_active_stages", "3", "max_active_stages must be an integer"),
        ("unshard_lookahead", "most", "'most'"),
        ("unshard_lookahead", 2, "a tuple of integers"),
        ("unshard_lookahead", (0,), "a tuple of integers"),
        ("unshard_lookahead", [1], "a tuple of integers"),
        ("unshard_lookahead", (1, 1), "2 entries, the schedule has 1 ranks"),
        ("defer_reduce_grad_wait", 1, "defer_reduce_grad_wait must be True or False"),
        ("max_outstanding_sends", 0, "max_outstanding_sends must be None or an integer of at least 1"),
        ("max_outstanding_sends", 1.5, "max_outstanding_sends must be None or an integer"),
    ],
)
def test_wrong_arguments(argument: str, value: Any, text: str) -> None:
    stages, _ = stages_of(2)
    with pytest.raises(LayoutError, match=text) as raised:
        _ = ScheduleInterleaved1F1B(stages, 2, loss_fn=mse, **{argument: value}).pipeline_order_with_comms
    assert isinstance(raised.value, ValueError)  # as torch's


@pytest.mark.parametrize("made", [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("active", [1, 4])
def test_the_order_with_transfers_shows_the_window(made: Any, active: int) -> None:
    stages, _ = stages_of(4)
    schedule = made(stages, 4, loss_fn=mse, max_active_stages=active)
    row = [action for action in schedule.pipeline_order[0] if action is not None]
    expected = torch_schedules._add_unshard_reshard(list(row), active)
    shown = [text for text in texts(schedule.pipeline_order_with_comms[0]) if "REDUCE" not in text]
    assert shown == texts(expected)
    gathered = sum("UNSHARD" in text for text in shown)
    assert gathered == 4 if active == 4 else gathered > 4


def test_waits_for_reductions_are_written_and_read(tmp_path: Path) -> None:
    stages, modules = stages_of(3)
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=mse, defer_reduce_grad_wait=True)
    row = texts(schedule.pipeline_order_with_comms[0])
    reductions = [text for text in row if "REDUCE" in text]
    assert reductions == [
        "2REDUCE_GRAD",
        "2WAIT_REDUCE_GRAD",
        "1REDUCE_GRAD",
        "1WAIT_REDUCE_GRAD",
        "0REDUCE_GRAD",
        "0WAIT_REDUCE_GRAD",
    ]
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    schedule._dump_csv(str(first))
    stages, modules = stages_of(3)
    loaded = schedules._PipelineScheduleRuntime(stages, 2, loss_fn=mse)
    loaded._load_csv(str(first), format="compute_comms")
    loaded._dump_csv(str(second))
    assert second.read_text() == first.read_text()
    kinds = {type(each.computation_type.value) for each in loaded.pipeline_order_with_comms[0]}
    assert kinds == {str}
    assert schedules.WAIT_REDUCE_GRAD in [
        each.computation_type for each in loaded.pipeline_order_with_comms[0]
    ]
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    loaded.step(x, target=y)
    whole = nn.Sequential(*modules)
    parts = zip(x.chunk(2), y.chunk(2), strict=True)
    expected = torch.autograd.grad(sum(mse(whole(a), b) for a, b in parts) / 2, modules[0][0].weight)
    torch.testing.assert_close(modules[0][0].weight.grad, expected[0])


@pytest.mark.parametrize("cell", ["0WAIT_SEND_F1", "12WAIT_RECV_B", "3WAIT_REDUCE_GRAD", "1WAIT7"])
def test_any_wait_is_kept_as_it_is_written(tmp_path: Path, cell: str) -> None:
    from meshcast.pipelining.compat import load_order

    (tmp_path / "a.csv").write_text(f"0F0,{cell},,0B0\n")
    assert texts(load_order(str(tmp_path / "a.csv"), waits=True)[0]) == ["0F0", cell, "0B0"]
    assert texts(load_order(str(tmp_path / "a.csv"), waits=False)[0]) == ["0F0", "0B0"]
    with pytest.raises(ScheduleError, match=f"{cell}.*WAIT is refused"):
        load_csv(tmp_path / "a.csv")


def test_an_order_with_transfers_is_not_gathered_anew() -> None:
    stages, _ = stages_of(1)
    schedule = schedules._PipelineScheduleRuntime(stages, 1, loss_fn=mse, unshard_lookahead="auto")
    order = {0: [torch_schedules._Action.from_str(text) for text in ("0UNSHARD", "0F0", "0B0")]}
    with pytest.raises(ValueError, match="holds its transfers already"):
        schedule._prepare_schedule_with_comms(order, format="compute_comms")


class Counting:
    """How many stages FSDP2 holds gathered at once, each time that one of them runs."""

    def __init__(self, stages: list[PipelineStage]) -> None:
        self.stages, self.most, self.runs = stages, 0, 0
        for stage in stages:
            stage.register_forward_context(self.look)

    @contextmanager
    def look(self, info: Any) -> Iterator[None]:
        yield
        if not info.is_metadata_inference:
            self.runs += 1
            self.most = max(self.most, sum(map(self.is_gathered, self.stages)))

    def is_gathered(self, stage: PipelineStage) -> bool:
        return not isinstance(next(stage.submod.parameters()), torch.distributed.tensor.DTensor)


@pytest.mark.parametrize("made", [ScheduleInterleaved1F1B, ScheduleLoopedBFS])
@pytest.mark.parametrize(("active", "most"), [(1, 1), (2, 2), (4, 4)])
def test_no_more_stages_are_gathered_than_may_be(made: Any, active: int, most: int) -> None:
    plain_stages, plain = stages_of(4)
    stages, modules = stages_of(4, sharded=True)
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_forward(False)
    counting = Counting(stages)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    schedule = made(stages, 3, loss_fn=mse, max_active_stages=active)
    for _ in range(2):
        for module in (*modules, *plain):
            module.zero_grad()
        schedule.step(x, target=y)
        made(plain_stages, 3, loss_fn=mse).step(x, target=y)
        for mine, other in zip(modules, plain, strict=True):
            for found, expected in zip(mine.parameters(), other.parameters(), strict=True):
                assert torch.equal(found.grad.full_tensor(), expected.grad)
    assert counting.runs == 2 * 4 * 3
    assert counting.most == most


# ---- gradients of several steps ------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [True, False])
def test_gradients_that_wait_for_a_later_step(scale: bool) -> None:
    stages, modules = stages_of(2, sharded=True)
    _, plain = stages_of(2)
    schedule = ScheduleLoopedBFS(stages, 2, loss_fn=mse, scale_grads=scale)
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]
    whole = nn.Sequential(*plain)
    for number, (x, y) in enumerate(batches):
        schedule.step(x, target=y, finalize_gradients=number == 2)
        assert (modules[0][0].weight.grad is None) == (number < 2)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            mse(whole(a), b).backward()
    for mine, other in zip(modules, plain, strict=True):
        for found, expected in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad / (2 if scale else 1))


def test_what_an_earlier_step_left_is_divided_when_gradients_are_reduced() -> None:
    """As torch does: by every step that reduces, and by no other."""
    stages, modules = stages_of(1, sharded=True)
    _, plain = stages_of(1)
    schedule = ScheduleGPipe(stages[0], 2, loss_fn=mse)
    expected = torch.zeros(4, 4)
    for final in (True, False, False, True):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        schedule.step(x, target=y, finalize_gradients=final)
        losses = [mse(plain[0](a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        expected += torch.autograd.grad(sum(losses), plain[0][0].weight)[0]
        if final:
            expected /= 2
            torch.testing.assert_close(modules[0][0].weight.grad.full_tensor(), expected)


def test_stages_without_fsdp_finalize_every_step() -> None:
    found = []
    for finalize in (True, False):
        stages, modules = stages_of(2)
        schedule = ScheduleLoopedBFS(stages, 2, loss_fn=mse)
        for seed in range(2):
            torch.manual_seed(seed)
            schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), finalize_gradients=finalize)
        found.append(modules[0][0].weight.grad)
    assert torch.equal(*found)


def test_wrong_ways_to_let_gradients_wait() -> None:
    def pair(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (output - target).square().sum(), output.shape[0]

    stages, _ = stages_of(1)
    schedule = ScheduleGPipe(stages[0], 2, loss_fn=pair)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(TypeError, match="finalize_gradients must be a bool, found int"):
        schedule.step(x, target=y, finalize_gradients=0)
    schedule.step(x, target=y)
    with pytest.raises(LayoutError, match="needs a loss_fn that returns means"):
        schedule.step(x, target=y, finalize_gradients=False)
    schedule.step(x, target=y)  # nothing was sent
    stages, _ = stages_of(1)
    with pytest.raises(LayoutError, match="needs a loss_fn that returns means"):
        ScheduleGPipe(stages[0], 2, loss_fn=pair).step(x, target=y, finalize_gradients=False)


# ---- contexts of forwards ------------------------------------------------------------------------------


def test_a_context_around_every_forward() -> None:
    stages, modules = stages_of(2)
    seen: list[Any] = []

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        seen.append((info.stage_index, info.microbatch_index, info.is_metadata_inference, "in"))
        yield
        seen.append((info.stage_index, info.microbatch_index, info.is_metadata_inference, "out"))

    handle = stages[0].register_forward_context(context)
    schedule = ScheduleLoopedBFS(stages, 2, loss_fn=mse)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    output = schedule.step(x, target=y)
    # Part by part: processors differ in whether a product of two rows has the bits of the same rows of four.
    assert torch.equal(output, torch.cat([nn.Sequential(*modules)(part) for part in x.chunk(2)]))
    inferred = [each for each in seen if each[2]]
    assert inferred[:2] == [(0, 0, True, "in"), (0, 0, True, "out")]
    assert seen[len(inferred) :] == [(0, n, False, way) for n in range(2) for way in ("in", "out")]
    with pytest.raises(RuntimeError, match=r"stage 0 has a forward context already: remove\(\)"):
        stages[0].register_forward_context(context)
    handle.remove()
    seen.clear()
    schedule.step(x, target=y)
    assert seen == []
    stages[0].register_forward_context(context)
    schedule.eval(x)
    assert [each[:2] for each in seen] == [(0, 0), (0, 0), (0, 1), (0, 1)]


def test_contexts_that_are_refused() -> None:
    stages, _ = stages_of(1)
    with pytest.raises(LayoutError, match="stage 0: context_factory must be a function"):
        stages[0].register_forward_context("no function")  # type: ignore[arg-type]

    @contextmanager
    def swallowing(info: Any) -> Iterator[None]:
        try:
            yield
            if not info.is_metadata_inference:
                raise KeyError("of the user")
        except KeyError:
            pass

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and type(x) is torch.Tensor and x.sum() > 1e6:
                raise KeyError("too large")
            return super().forward(x)

    stage = PipelineStage(Fails(4, 4), 0, 1, CPU)
    stage.register_forward_context(swallowing)
    schedule = Schedule1F1B(stage, 1, loss_fn=mse)
    with pytest.raises(MeshcastError, match="the forward context of stage 0 swallowed an error"):
        schedule.step(torch.full((2, 4), 1e6), target=torch.ones(2, 4))


# ---- places of activations -----------------------------------------------------------------------------


class Order:
    def __init__(self, *rows: str) -> None:
        self.pipeline_order = {
            rank: [torch_schedules._Action.from_str(text) for text in row.split()]
            for rank, row in enumerate(rows)
        }


def test_an_activation_is_held_until_its_weights() -> None:
    order = Order("0F0 0F1 0I0 0F2 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3")
    plan = analyze_pipeline_activation_liveness(order, pp_rank=0)
    assert plan.num_slots == 3
    assert plan.slot_by_stage_and_microbatch == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 0}
    assert plan.get_activation_lifetime(0, 2) == (3, 9)
    assert (plan.pp_rank, plan.stage_indices, plan.num_microbatches) == (0, (0,), 4)
    for look, text in (
        (plan.slot_for, "No activation slot"),
        (plan.get_activation_lifetime, "lifetime exists"),
    ):
        with pytest.raises(ValueError, match=text):
            look(1, 0)


def test_stages_of_a_rank_may_share_a_place() -> None:
    order = Order("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1")
    plan = analyze_pipeline_activation_liveness(order, pp_rank=0)
    assert dict(plan.lifetimes) == {(0, 0): (0, 4), (1, 0): (1, 3), (0, 1): (2, 7), (1, 1): (5, 6)}
    assert plan.slot_for(1, 1) == plan.slot_for(0, 0) == 0
    whole = analyze_pipeline_activation_liveness(order, pp_rank=0, granularity="microbatch")
    assert {whole.get_activation_lifetime(stage, 0) for stage in (0, 1)} == {(0, 4)}
    assert {whole.get_activation_lifetime(stage, 1) for stage in (0, 1)} == {(2, 7)}
    assert (plan.num_slots, whole.num_slots) == (3, 2)
    part = analyze_pipeline_activation_liveness(order, pp_rank=0, stage_indices=[1])
    assert (part.num_slots, set(part.lifetimes)) == (1, {(1, 0), (1, 1)})


def test_actions_that_run_as_one_hold_both() -> None:
    order = Order("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert analyze_pipeline_activation_liveness(order, pp_rank=0).num_slots == 2


def test_as_many_places_as_the_simulation_holds() -> None:
    stages, _ = stages_of(4)
    schedule = ScheduleInterleavedZeroBubble(stages, 6, loss_fn=mse)
    plan = analyze_pipeline_activation_liveness(schedule, pp_rank=0)
    for first, last in plan.lifetimes.values():
        held = [key for key, (begin, end) in plan.lifetimes.items() if begin <= first <= end]
        assert len({plan.slot_for(*key) for key in held}) == len(held)
        assert first < last
    most = max(
        sum(begin <= place <= end for begin, end in plan.lifetimes.values())
        for place in range(len(schedule.pipeline_order[0]))
    )
    assert plan.num_slots == most


@pytest.mark.parametrize(
    ("order", "more", "text"),
    [
        ("0F0 0B0", {"pp_rank": 1}, r"ranks \[0\], not for pp_rank=1"),
        ("0F0 0B0", {"pp_rank": 0, "stage_indices": [3]}, r"runs stages \[0\], stage_indices are \[3\]"),
        ("0F0 0B0", {"pp_rank": 0, "granularity": "stage"}, "found 'stage'"),
        ("0F0 0I0", {"pp_rank": 0}, r"\[\(0, 0\)\] are never released"),
        ("0B0", {"pp_rank": 0}, "position 0: 0B0 without its forward"),
    ],
)
def test_what_cannot_be_analyzed(order: str, more: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        analyze_pipeline_activation_liveness(Order(order), **more)
