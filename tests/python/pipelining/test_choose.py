"""Choosing a schedule: the arithmetic on measured times, and one rank's stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining import (
    PipelineStage,
    ScheduleAuto,
    ScheduleGPipe,
    choose,
    get_schedule_class,
    simulate,
)
from meshcast.pipelining.action import ScheduleError
from meshcast.pipelining.compat import order_of_torch
from meshcast.tuning.candidates import (
    Candidate,
    Measured,
    Placed,
    Times,
    best_of,
    counts_to_try,
    times_at,
)
from meshcast.tuning.choose import _together
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

CPU = torch.device("cpu")
mse = nn.functional.mse_loss


def times(
    stages: int, transfer: float = 0.0, *, samples: float = 1.0, held: float = 1e6, **more: Any
) -> Times:
    of_all = {"forward": 1.0, "backward": 2.0, "inputs": 1.0, "weights": 1.0, "between": 0.0} | more
    listed = {name: [value] * stages for name, value in of_all.items()}
    links = {(stage, stage + 1): transfer for stage in range(stages - 1)}
    return Times(samples=samples, transfer=links, held=[held] * stages, **listed)


def found(
    rows: list[list[int]], counts: list[int], known: Times, budget: float | None = None
) -> list[Candidate]:
    return Placed(rows, [budget] * len(rows)).candidates(counts, max(counts), [known])


SINGLE = [[0], [1], [2], [3]]
LOOPED = [[0, 4], [1, 5], [2, 6], [3, 7]]
FOLDED = [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_each_candidate_takes_what_simulate_says(transfer: float) -> None:
    for each in found(SINGLE, [8], times(4, transfer)):
        report = simulate(each.schedule, 4, 8, weight=1.0, transfer=transfer, **each.options)
        assert each.seconds == report.makespan
        assert each.bubble == report.bubble_fraction
        most = [0.0] * 4
        for span in report.timeline:
            most[span.rank] = max(most[span.rank], report.peak_of_ranks[span.rank] * 1e6)
        assert list(each.held) == most


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (SINGLE, {"GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2"}),
        (LOOPED, {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}),
        (FOLDED, {"ZBV", "DualPipeV"}),
        ([[0]], {"GPipe", "1F1B", "ZBH1", "ZBH2"}),
        ([[0, 1]], {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV"}),
        ([[0, 3, 6], [1, 4, 7], [2, 5, 8]], {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}),
    ],
)
def test_what_fits_a_placement(rows: list[list[int]], names: set[str]) -> None:
    known = times(sum(map(len, rows)))
    listed = found(rows, [12], known)
    assert {each.schedule for each in listed} == names
    assert not [each for each in listed if each.why_not], "all of them run 12 micro-batches"
    for each in listed:
        assert issubclass(get_schedule_class(each.schedule), torch_schedules._PipelineSchedule)


def test_no_schedule_fits() -> None:
    with pytest.raises(
        ScheduleError, match=r"no schedule known here runs stages \[\[0, 1\], \[2, 3\]\] together"
    ):
        found([[0, 1], [2, 3]], [4], times(4))


def test_what_is_fastest_wins() -> None:
    slow = best_of(found(SINGLE, [16], times(4, 0.75)))
    assert slow.schedule == "ZBH2"
    # Where the backward cannot be split, W takes no time and hides nothing.
    whole = best_of(found(SINGLE, [16], times(4, 0.75, inputs=2.0, weights=0.0)))
    assert whole.name in ("Eager1F1B", "GPipe")
    assert whole.seconds == simulate("Eager1F1B", 4, 16, transfer=0.75).makespan


def test_of_what_is_as_fast_that_which_holds_least_wins() -> None:
    best = best_of(found(SINGLE, [16], times(4, inputs=2.0, weights=0.0)))  # 1F1B and GPipe are as fast
    assert (best.schedule, max(best.held)) == ("1F1B", 4e6)
    almost = [Candidate("a", 1, seconds=1.0, held=[5.0]), Candidate("b", 1, seconds=1.009, held=[4.0])]
    assert best_of(almost).schedule == "b"
    assert best_of([almost[0], Candidate("b", 1, seconds=1.02, held=[4.0])]).schedule == "a"


def test_a_budget_leaves_out_what_holds_more() -> None:
    listed = found(SINGLE, [16], times(4, 0.75), budget=5e6)
    best = best_of(listed)
    assert max(best.held) <= 5e6
    over = {each.name for each in listed if each.why_not}
    assert {"GPipe", "Eager1F1B", "ZBH2"} <= over
    assert "rank 0 holds 16 MB, budget 5 MB" in [each.why_not for each in listed]
    # A warm-up in between: one stage more than 1F1B has.
    assert any(each.options.get("warmup") for each in listed if not each.why_not)
    assert best.seconds <= 1.01 * min(each.seconds for each in listed if not each.why_not)
    with pytest.raises(ScheduleError, match="no schedule fits: GPipe with 16: rank 0 holds 16 MB"):
        best_of(found(SINGLE, [16], times(4), budget=0.5e6))


def test_gradients_between_i_and_w_count() -> None:
    known = times(4, between=0.5e6)
    listed = {each.name: max(each.held) for each in found(SINGLE, [8], known)}
    assert listed["1F1B"] == 4e6
    assert listed["1F1B, delayed"] == 4.5e6
    assert listed["ZBH1"] > listed["1F1B, delayed"]


def test_what_is_let_go_of_between_i_and_w_counts() -> None:
    listed = {each.name: each.held for each in found(SINGLE, [8], times(4, between=-0.5e6))}
    assert listed["1F1B"] == [4e6, 3e6, 2e6, 1e6]
    assert listed["ZBH1"] == [4e6, 3.5e6, 3e6, 2.5e6], "with all held until W it is 4e6 everywhere"
    # Of other sizes than those measured too, where all that is held may be let go of, and no more.
    small = times(2, samples=2.0, held=10.0, between=-6.0)
    large = times(2, samples=8.0, held=40.0, between=-24.0)
    assert times_at(4.0, [small, large]).between == [-12.0, -12.0]
    assert times_at(8.0, [small, times(2, samples=4.0, held=12.0, between=-12.0)]).between == [-16.0, -16.0]


def test_smaller_microbatches_are_on_the_line_through_two_sizes() -> None:
    small = times(2, 0.1, samples=2.0, held=10.0, forward=1.0, backward=3.0)
    large = times(2, 0.3, samples=8.0, held=40.0, forward=2.5, backward=6.0)
    middle = times_at(4.0, [small, large])
    assert (middle.samples, middle.forward, middle.backward) == (4.0, [1.5, 1.5], [4.0, 4.0])
    assert middle.held == [20.0, 20.0]
    assert middle.transfer[0, 1] == pytest.approx(0.1 + 0.2 / 3)
    assert times_at(8.0, [small, large]) == large
    assert times_at(3.0, [small]) == small
    falling = times_at(32.0, [times(1, samples=2.0, forward=2.0), times(1, samples=8.0, forward=1.0)])
    assert falling.forward == [0.0]  # no time is negative


def test_of_the_ranks_of_a_stage_the_slowest_counts_and_the_fullest() -> None:
    def said(stage: int, forward: float, held: int, links: dict[tuple[int, int], float]) -> Measured:
        numbers = {"F": forward, "B": 2 * forward, "I": forward, "W": forward, "held": held, "between": 1}
        return Measured({stage: numbers}, links)

    ranks = [
        said(0, 1.0, 10, {(0, 1): 0.1}),
        said(1, 3.0, 20, {(0, 1): 0.3}),
        said(1, 2.0, 40, {(0, 1): 0.2}),
        said(2, 1.0, 30, {}),
    ]
    for order in (ranks, ranks[::-1]):
        together = _together(order, 4.0, None)
        assert together.forward == [1.0, 3.0, 1.0]
        assert together.backward == [2.0, 6.0, 2.0]
        assert together.held == [10, 40, 30]
        assert together.transfer == {(0, 1): 0.3, (1, 2): 0.0}
        assert together.samples == 4.0


def test_the_number_of_microbatches_is_chosen_too() -> None:
    assert counts_to_try(64, 4) == [4, 8, 16, 32, 64]
    assert counts_to_try(1000, 4) == [4, 8, 16, 32, 64]
    assert counts_to_try(10, 4) == [4, 8]
    assert counts_to_try(2, 4) == [2]
    # Costs in proportion to the samples: the more, the smaller the bubble. With a part of its own: not.
    proportional = [
        times(4, samples=1.0),
        times(4, samples=16.0, forward=16, backward=32, inputs=16, weights=16),
    ]
    counts = [4, 16, 64]
    free = Placed(SINGLE, [None] * 4)
    best = best_of(free.candidates(counts, 64, proportional))
    assert best.microbatches == 64
    constant = [times(4, samples=1.0), times(4, samples=16.0)]
    assert best_of(free.candidates(counts, 64, constant)).microbatches == 4


@pytest.mark.parametrize("name", ["LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
def test_orders_of_torch_are_those_that_run(name: str) -> None:
    order = order_of_torch(name, 8, 4, 8)
    assert sorted(order) == [0, 1, 2, 3]
    placed = FOLDED if name == "DualPipeV" else LOOPED
    assert [sorted({action.stage for action in order[rank]}) for rank in range(4)] == placed
    assert len({action for row in order.values() for action in row}) == sum(map(len, order.values()))


def test_what_torch_cannot_order_says_so() -> None:
    listed = {each.schedule: each for each in found(FOLDED, [4], times(8))}
    assert "DualPipeV requires at least as many microbatches" in listed["DualPipeV"].why_not
    assert listed["ZBV"].why_not == ""


# ---- stages of one rank --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def stages_of(count: int) -> tuple[list[PipelineStage], list[Block]]:
    modules = [Block(number) for number in range(count)]
    return [PipelineStage(module, number, count, CPU) for number, module in enumerate(modules)], modules


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_is_left_of_the_measurement(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    stages, modules = stages_of(count)
    modules[0].body[0].weight.grad = torch.full((9, 6), 3.0)
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    choice = choose(stages if count > 1 else stages[0], mse, x, target=y, microbatches=[2, 4])
    assert torch.equal(torch.get_rng_state(), state)
    after = [value for module in modules for value in module.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    assert torch.equal(gradients[0], torch.full((9, 6), 3.0))
    assert gradients[1:] == [None] * (len(gradients) - 1)
    assert choice.microbatches in (2, 4)
    assert choice.explain() == str(choice)
    assert capsys.readouterr().out == f"{choice}\n"
    assert [each.samples for each in choice.times] == [4.0, 8.0]
    for each in choice.times:
        numbers = [*each.forward, *each.backward, *each.inputs, *each.weights]
        assert min(numbers) >= 0.0
        assert min(each.forward) > 0.0
        assert max(numbers) < 10.0
        assert set(each.transfer.values()) <= {0.0}  # one rank
    small, large = choice.times
    assert all(0 < a < b for a, b in zip(small.held, large.held, strict=True))
    if count > 1:
        # Twice the samples hold twice the activations, but for what the module keeps of no samples.
        assert 1.5 < large.held[1] / small.held[1] <= 2.0
    schedule = choice.make(stages, mse)
    schedule.step(x, target=y)
    assert schedule._n_microbatches == choice.microbatches


@pytest.mark.usefixtures("alone")
def test_bytes_that_a_microbatch_holds() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100, 100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x @ self.weight)

    modules = [Two(), Two()]
    stages = [PipelineStage(module, number, 2, CPU) for number, module in enumerate(modules)]
    x = torch.zeros(8, 100)
    choice = choose(stages, mse, x, 2, target=x, show=False)
    # Of 4 samples: the result of exp (1600 bytes), which is the output, and of the first stage counts as that
    # too; of the last stage its input (1600). Neither the weight (40000) nor the batch.
    assert choice.times[0].held == [2 * 1600.0, 2 * 1600.0]
    # The first stage has no inputs to wait for. The last one keeps a gradient (1600) and drops the result.
    assert choice.times[0].between == [0.0, 0.0]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        assert saved.shape == gradient.shape
        return 2 * gradient


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
def test_bytes_between_both_parts_of_a_backward(again: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(50, 50, bias=False)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _Doubled.apply(torch.tanh(torch.exp(self.linear(x))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if again:
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    stages = [PipelineStage(Block(), number, 2, CPU) for number in range(2)]
    x = torch.ones(12, 50)
    choice = choose(stages, mse, x, 2, target=x, show=False)
    one = 6 * 50 * 4.0
    # Kept: the input, both results, and what the custom function has saved. After the first part: the input,
    # and the gradient that the second starts from. Made again: only the input is kept, and still is behind
    # the only part, by the stage whose output it is.
    assert choice.times[0].held[1] == (1 if again else 4) * one
    assert choice.times[0].between[1] == (0 if again else 1 - 3) * one


@pytest.mark.usefixtures("alone")
def test_a_context_of_the_user_is_entered_too() -> None:
    stages, _ = stages_of(1)
    seen: list[Any] = []

    class Context:
        def __init__(self, info: Any) -> None:
            seen.append(info.is_metadata_inference)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

    handle = stages[0].register_forward_context(Context)  # type: ignore[arg-type]
    choose(stages, mse, torch.randn(4, 6), 2, target=torch.randn(4, 6), show=False)
    assert seen.count(False) == 2 * (1 + 2 + 1) * 2
    handle.remove()
    assert not stages[0]._forward_contexts


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"microbatches": 0}, "microbatches must be a number of at least 1, or several, found 0"),
        ({"microbatches": []}, "microbatches must be a number"),
        ({"microbatches": 9}, "the example has 8 samples, too few for 9 micro-batches"),
        ({"memory_budget": 0}, "memory_budget must be a number of bytes above 0, found 0"),
        ({"memory_budget": 1.0}, "no schedule fits: GPipe with 1: rank 0 holds .* budget 1e-06 MB"),
        ({"target": None}, "the last stage measures the backward: it needs loss_fn and target="),
        ({"loss_fn": None}, "it needs loss_fn and target="),
        ({"example": None}, "the first stage needs a batch"),
        ({"stages": []}, "a schedule needs at least one stage"),
        ({"stages": [3]}, "stage must be a meshcast.pipelining.PipelineStage, found int"),
    ],
)
def test_wrong_arguments(more: dict[str, Any], text: str) -> None:
    stages, modules = stages_of(1)
    given: dict[str, Any] = {"stages": stages, "loss_fn": mse, "example": torch.randn(8, 6)}
    given |= {"target": torch.randn(8, 6), "microbatches": 1, "show": False} | more
    with pytest.raises(LayoutError, match=text):
        choose(**given)
    assert modules[0].body[0].weight.grad is None


@pytest.mark.usefixtures("alone")
def test_a_module_that_fails_is_named() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and x.sum() == 0:
                raise ValueError("all zeros")
            return super().forward(x)

    stage = PipelineStage(Fails(6, 6), 0, 1, CPU)
    with pytest.raises(MeshcastError, match="all zeros"):
        choose(stage, mse, torch.zeros(4, 6), 2, target=torch.zeros(4, 6), show=False)


# ---- get_schedule_class("auto") ------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_schedule_that_is_chosen_at_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    made = get_schedule_class("auto")
    assert made is get_schedule_class("ScheduleAuto") is ScheduleAuto
    torch.manual_seed(0)
    module, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.load_state_dict(module.state_dict())
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    schedule = made(PipelineStage(module, 0, 1, CPU), 4, loss_fn=mse)
    assert schedule.choice is None
    with pytest.raises(AttributeError, match="has no 'bytes_sent' before its first step"):
        _ = schedule.bytes_sent
    # Part by part: processors differ in whether a product of two rows has the bits of the same rows of eight.
    assert torch.equal(schedule.eval(x), torch.cat([module(part) for part in x.chunk(4)]))
    losses: list[torch.Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    assert "4 micro-batches" in capsys.readouterr().out
    theirs = ScheduleGPipe(PipelineStage(other, 0, 1, CPU), 4, loss_fn=mse)
    expected: list[torch.Tensor] = []
    assert torch.equal(output, theirs.step(x, target=y, losses=expected))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert torch.equal(module.weight.grad, other.weight.grad)
    assert len(losses) == schedule._n_microbatches == schedule.choice.microbatches == 4
    assert schedule.bytes_sent == 0
    assert torch.equal(schedule.eval(x), torch.cat([module(part) for part in x.chunk(4)]))
    schedule.step(x, target=y)
    assert capsys.readouterr().out == ""
    schedule.close()


@pytest.mark.usefixtures("alone")
def test_a_chosen_schedule_takes_microbatches_and_specs() -> None:
    module = nn.Linear(6, 6)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    schedule = ScheduleAuto(PipelineStage(module, 0, 1, CPU), 2, mse, show=False)
    schedule.step(arg_mbs=[(part,) for part in x.chunk(2)], target_mbs=list(y.chunk(2)))
    expected = torch.autograd.grad(mse(module(x), y), module.weight)[0]
    torch.testing.assert_close(module.weight.grad, expected)
    module.zero_grad()
    schedule = ScheduleAuto(PipelineStage(module, 0, 1, CPU), None, mse, show=False, seed=3)
    schedule.step(x, target=y)
    torch.testing.assert_close(module.weight.grad, expected)
    assert schedule.choice.microbatches in (1, 2, 4, 8)


@pytest.mark.usefixtures("alone")
def test_what_a_chosen_schedule_refuses() -> None:
    stage = PipelineStage(nn.Linear(6, 6), 0, 1, CPU)
    with pytest.raises(LayoutError, match="ScheduleAuto chooses delay_weight_grad, warmup: leave it out"):
        ScheduleAuto(stage, 2, mse, warmup="eager", delay_weight_grad=True)
    schedule = ScheduleAuto(stage, 2, mse, show=False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs gradients enabled"):
        schedule.step(torch.randn(4, 6), target=torch.randn(4, 6))
