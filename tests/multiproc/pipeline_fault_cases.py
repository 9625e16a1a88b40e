"""Faults in a pipeline are typed errors on every rank, in bounded time; others still work. Five ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count, product

import pytest
import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError
from meshcast.pipelining import Edge, PipelineStage, Schedule1F1B, ScheduleEager1F1B, ScheduleError
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    in_a_row,
    largest_difference,
    mlp,
    place,
    schedule_of,
    train_alone,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Partial, Shard

BOUND = 12.0  # seconds; less than TIMEOUT, so that no rank came back because its deadline was over


def raises(kind, *words: str, call: Callable[[], object], bound: float = BOUND) -> str:
    """Returns the text of the error. kind: its type, or several."""
    begin = time.monotonic()
    try:
        with pytest.raises(kind) as caught:
            call()
    except pytest.fail.Exception as missing:  # not an Exception: it would end the process
        raise AssertionError(str(missing)) from None
    elapsed = time.monotonic() - begin
    assert elapsed < bound, f"it took {elapsed:.1f} s: {caught.value}"
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


class Fragile(nn.Module):
    """Raises in the chosen forward or backward of the chosen micro-batch, on one rank."""

    def __init__(self, body: nn.Module, armed: bool, microbatch: int, backward: bool) -> None:
        super().__init__()
        self.body, self.armed, self.microbatch, self.backward_too = body, armed, microbatch, backward
        self.forwards = self.backwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.armed and y.requires_grad and not isinstance(y, FakeTensor):
            if self.backward_too:
                y.register_hook(self.in_backward)
            elif self.forwards == self.microbatch:
                raise ValueError("out of luck")
            self.forwards += 1
        return y

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        if self.backwards == self.microbatch + 1:
            raise ValueError("out of luck")
        return gradient


def module_raises_case(stage: int, rank: int, backward: bool):
    def case(context) -> None:
        here = place(in_a_row([2, 2, 1]))
        module = Fragile(mlp(3)[here.stage], context.rank == rank, 2, backward)
        schedule = schedule_of("1F1B", here, module, 3, 4)
        x, y = batch(8)
        words = [
            f"rank {rank}: stage {stage}",
            f"{'backward' if backward else 'forward'} of micro-batch 2",
            "ValueError: out of luck",
        ]
        kind = MeshcastError if context.rank == rank else AbortedError

        def steps() -> None:
            schedule.step(x, target=y)
            # A later stage may have been through with its part; the next step tells it.
            assert backward
            assert here.stage > stage
            schedule.step(x, target=y)

        raises(kind, *words, call=steps)
        # The first cause again, at once, without the other ranks.
        raises(AbortedError, "failed before", *words[:2], call=lambda: schedule.step(x, target=y), bound=0.1)
        # The group can go, and another pipeline over the same ranks works.
        begin = time.monotonic()
        dist.destroy_process_group(here.group)
        elapsed = time.monotonic() - begin
        assert elapsed < BOUND, f"destroying the group took {elapsed:.1f} s"
        again = place(in_a_row([2, 2, 1]))
        schedule_of("1F1B", again, mlp(3)[again.stage], 3, 4).step(x, target=y)

    case.__name__ = f"a_module_raises_in_{'backward' if backward else 'forward'}_of_stage_{stage}"
    return case


def two_stages():
    return place(in_a_row([2, 3]))


def a_refusal_ends_nothing(context) -> None:
    """What a step refuses before data moves is known to all ranks, whichever refuses. The same schedule goes
    on, and so do others and plain reshards between the meshes."""
    here = two_stages()
    reference, module = mlp(2), mlp(2)[here.stage]
    schedule = schedule_of("1F1B", here, module, 2, 2)
    x, y = batch(8)

    def without_gradients() -> None:
        with torch.set_grad_enabled(context.rank != 3):
            schedule.step(x, target=y)

    def refused(*words: str, call: Callable[[], object], ranks: Sequence[int] = range(5)) -> None:
        kind = LayoutError if context.rank in ranks else AbortedError
        raises((kind, MeshcastError) if words == ("needs gradients",) else kind, *words, call=call)

    refused(
        "has no samples", call=lambda: schedule.step(x[: 0 if context.rank == 1 else 8], target=y), ranks=[1]
    )
    refused(
        "compiled for one shape",
        call=lambda: (schedule.step(x, target=y), schedule.step(x[:, :3], target=y)),
        ranks=[0, 1],
    )
    module.zero_grad()
    refused("needs targets", call=lambda: schedule.step(x), ranks=[2, 3, 4])
    refused(
        "needs targets", call=lambda: schedule.step(x, target=None if context.rank == 4 else y), ranks=[4]
    )
    refused("needs gradients", call=without_gradients)
    raises(
        (LayoutError, AbortedError),
        "different calls: rank 0 calls step, rank 2 calls eval",
        call=lambda: (schedule.eval if context.rank == 2 else schedule.step)(x, target=y),
    )
    train_alone(nn.Sequential(*reference), x, y, 2)
    schedule.step(x, target=y)
    assert largest_difference(module, reference[here.stage]) <= 1e-12
    another = schedule_of("GPipe", here, mlp(2)[here.stage], 2, 4)
    another.step(x, target=y)


_numbers = count()


def seen_first(
    context, rank: int, wrong: Callable[[], object], right: Callable[[], object], kind, *words: str
) -> None:
    """Rank `rank` makes a wrong call and sees its error before any other rank calls; these see it then."""
    key = f"{context.case}/seen {next(_numbers)}"  # cases are the same on all ranks
    if context.rank == rank:
        caught: Exception | None = None
        try:
            wrong()
        except Exception as error:
            caught = error
        text = str(caught)
        context.store.set(key, text)
        assert isinstance(caught, kind), repr(caught)
        for word in words:
            assert word in text, f"{word!r} is not in: {text}"
        return
    context.store.wait([key], timedelta(seconds=3 * TIMEOUT))
    raises(AbortedError, context.store.get(key).decode(), call=right)


def mistakes_in_arguments(context) -> None:
    """They reach their caller while nobody else has called, or has made a schedule yet; the next step runs,
    and has the gradients of that batch alone."""
    x, y = batch(8)
    mistakes = [  # rank, what it calls with, words of its error
        (0, (x, x, x), {"target": y}, ("does not take", "positional")),
        (1, (x,), {"target": y, "wrong": 1}, ("does not take", "wrong")),
        (2, (x,), {"target": y, "wrong": 1}, ("does not take", "wrong")),
        (3, (x,), {}, ("needs targets",)),
        (1, (), {"target": y}, ("needs the batch",)),
        (4, (x,), {"target": y, "losses": ()}, ("losses must be a list",)),
        (2, (x,), {"target": y, "finalize_gradients": 1}, ("finalize_gradients must be a bool",)),
        (0, (x[:0],), {"target": y}, ("has no samples",)),
        (4, (), {"target_mbs": [y]}, ("must have one entry for each",)),
    ]
    for rank, args, named, words in mistakes:
        here = two_stages()
        reference, module = mlp(2), mlp(2)[here.stage]
        made: list = []

        def schedule(here=here, module=module, made=made):
            if not made:
                made.append(schedule_of("1F1B", here, module, 2, 2))
            return made[0]

        seen_first(
            context,
            rank,
            lambda args=args, named=named, schedule=schedule: schedule().step(*args, **named),
            lambda schedule=schedule: schedule().step(x, target=y),
            (LayoutError, TypeError),
            *words,
        )
        train_alone(nn.Sequential(*reference), x, y, 2)
        schedule().step(x, target=y)
        assert largest_difference(module, reference[here.stage]) <= 1e-12
        calls = (
            ["step", "eval"] if "finalize_gradients" not in named and named.get("target") is y else ["step"]
        )
        for call in calls:  # once the shapes are known
            seen_first(
                context,
                rank,
                lambda args=args, named=named, made=made, call=call: getattr(made[0], call)(*args, **named),
                lambda made=made, call=call: getattr(made[0], call)(x, target=y),
                (LayoutError, TypeError),
                *words,
            )
            getattr(made[0], call)(x, target=y)
        made[0].close()


class Picky(nn.Module):
    """Takes no batch that is marked."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, marked: bool = False) -> torch.Tensor:
        if marked:
            raise ValueError("a marked batch")
        return self.body(x)


def a_module_that_raises_at_once(context) -> None:
    """On its first shape, before another rank has called; it sends nothing, and the next step runs. Fake
    tensors do not tell: the module runs on the batch."""
    x, y = batch(8)
    for rank in (1, 0):
        here = two_stages()
        reference, module = mlp(2), Picky(mlp(2)[here.stage])
        schedule = schedule_of("1F1B", here, module, 2, 2)
        seen_first(
            context,
            rank,
            lambda schedule=schedule: schedule.step(x, target=y, marked=True),
            lambda schedule=schedule: schedule.step(x, target=y),
            LayoutError,
            f"rank {rank}, stage 0",
            "ValueError: a marked batch",
        )
        train_alone(nn.Sequential(*reference), x, y, 2)
        schedule.step(x, target=y)
        assert largest_difference(module.body, reference[here.stage]) <= 1e-12


def a_closed_schedule_on_one_rank(context) -> None:
    here = two_stages()
    schedule = schedule_of("1F1B", here, mlp(2)[here.stage], 2, 2)
    x, y = batch(8)
    schedule.step(x, target=y)
    if context.rank == 3:
        schedule.close()
    seen_first(
        context,
        3,
        lambda: schedule.step(x, target=y),
        lambda: schedule.step(x, target=y),
        AbortedError,
        "rank 3",
        "the schedule was closed",
    )


def made_anew_case(ranks: int):
    """After constructors were refused, once or twice, stages and schedules that are made anew on all ranks
    join each other, whatever the other ranks did with theirs."""

    def case(context) -> None:
        runs = product(range(ranks), ("stage", "schedule"), (1, 2), (0, 1))
        for number, (who, what, times, shift) in enumerate(runs):
            group = dist.new_group(list(range(ranks)))
            if context.rank >= ranks:
                continue
            for attempt in range(times):
                refuses = (who + attempt * shift) % ranks
                anew_once(context, group, ranks, refuses, what, (context.rank + number) % 3)
                context.wait_for_all(f"{number}/{attempt}", list(range(ranks)))
            reference, module = mlp(ranks), mlp(ranks)[context.rank]
            stage = PipelineStage(module, context.rank, ranks, CPU, group=group)
            schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
            x, y = batch(8)
            schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
            train_alone(nn.Sequential(*reference), x, y, 4, as_torch=reference)
            assert largest_difference(module, reference[context.rank]) == 0

    case.__name__ = f"constructors_refused_on_{ranks}_ranks"
    return case


def anew_once(context, group, ranks: int, refuses: int, what: str, goes: int) -> None:
    """One attempt. goes: how far the ranks go that are not refused: to the stage, the schedule, the step."""
    module = mlp(ranks)[context.rank]
    refused = context.rank == refuses

    def stage() -> PipelineStage:
        edges = [Edge(0, 0, 0, 0)] if refused and what == "stage" else None
        return PipelineStage(module, context.rank, ranks, CPU, group=group, edges=edges)

    if refused and what == "stage":
        raises(LayoutError, "a cycle of stages cannot run", call=stage)
        return
    made = stage()
    count = 0 if refused else 4
    if refused:
        raises(LayoutError, "at least 1", call=lambda: Schedule1F1B(made, count, timeout=TIMEOUT))
    elif goes:
        schedule = Schedule1F1B(made, count, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
        text = "a cycle of stages" if what == "stage" else "at least 1"
        if goes == 2:
            x, y = batch(8)
            raises(AbortedError, text, call=lambda: schedule.step(*([x] * made.is_first), target=y))


def a_schedule_refused_for_its_options(context) -> None:
    """Whatever its constructor raises on one rank, the others hear of it in their step."""
    wrong: list[tuple[dict, str]] = [
        ({"timeout": -1}, "timeout"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_outstanding_sends": 0}, "max_outstanding_sends"),
    ]
    x, y = batch(8)
    for options, text in wrong:
        here = two_stages()
        stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        more = options if context.rank == 3 else {}

        def step(stage=stage, more=more) -> None:
            schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss, **{"timeout": TIMEOUT, **more})
            schedule.step(x, target=y)

        raises((LayoutError, TypeError) if more else AbortedError, text, call=step)


def a_budget_below_the_minimum(_) -> None:
    here = two_stages()
    stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    raises(
        ScheduleError,
        "stage 0: a memory budget of 1 micro-batches is below the minimum of 2",
        call=lambda: ScheduleEager1F1B(stage, 4, warmup="auto", memory_budget=1, timeout=TIMEOUT),
    )


def a_budget_below_the_minimum_on_one_rank(context) -> None:
    here = two_stages()
    budget = 1 if context.rank == 3 else 2
    text = "stage 0: a memory budget of 1 micro-batches is below the minimum of 2"
    x, y = batch(8)

    def step() -> None:
        stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        loss_fn = nn.functional.mse_loss
        schedule = ScheduleEager1F1B(stage, 4, loss_fn, warmup="auto", memory_budget=budget, timeout=TIMEOUT)
        schedule.step(x, target=y)

    raises(ScheduleError if context.rank == 3 else AbortedError, text, call=step)


class Flat(nn.Module):
    """Folds rows and columns: over 2 ranks 5 rows are 3 and 2, but 20 flattened ones would be 10 and 10."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 1)


def an_output_that_does_not_match_its_layout(_) -> None:
    here = two_stages()
    schedule = schedule_of("1F1B", here, Flat() if here.stage == 0 else mlp(1, width=1)[0], 2, 1)
    x, y = batch(5, width=4)
    raises(
        LayoutError,
        "stage 0, output 0",
        "does not match its layout",
        "rank 0",
        "(12, 1)",
        "(10, 1)",
        call=lambda: schedule.step(x, target=y),
    )


def a_pending_sum_that_cannot_travel_yet(_) -> None:
    here = two_stages()
    options = {"output_placements": [Partial("max")]} if here.stage == 0 else {}
    schedule = schedule_of("1F1B", here, mlp(2)[here.stage], 2, 2, **options)
    x, y = batch(8)
    raises(
        LayoutError, "Partial", "cannot leave a stage that trains", call=lambda: schedule.step(x, target=y)
    )


def ranks_that_disagree(context) -> None:
    here = two_stages()
    schedule = schedule_of("1F1B", here, mlp(2)[here.stage], 2, 2 if context.rank != 3 else 4)
    x, y = batch(8)
    raises(
        LayoutError,
        "disagree on microbatches",
        "rank 0 has 2",
        "rank 3 has 4",
        call=lambda: schedule.step(x, target=y),
    )


def a_stage_on_no_rank(_) -> None:
    here = two_stages()
    schedule = schedule_of("1F1B", here, mlp(3)[here.stage], 3, 2)
    x, y = batch(8)
    raises(LayoutError, "stage 2 is on no rank", call=lambda: schedule.step(x, target=y))


def an_edge_to_an_output_that_is_not_there(_) -> None:
    here = two_stages()
    schedule = schedule_of("1F1B", here, mlp(2)[here.stage], 2, 2, edges=[Edge(0, 1, 1, 0)])
    x, y = batch(8)
    raises((LayoutError, AbortedError), "stage 0 has 1 outputs", call=lambda: schedule.step(x, target=y))


def bad_arguments_of_the_stage(_) -> None:
    here = two_stages()
    module = mlp(2)[here.stage]

    def stage(
        index: int = here.stage, stages: int = 2, inner: nn.Module = module, **options
    ) -> Callable[[], object]:
        return lambda: PipelineStage(inner, index, stages, CPU, group=here.group, mesh=here.mesh, **options)

    raises(LayoutError, "stage_index must be in 0..1", call=stage(index=2))
    raises(LayoutError, "get_mesh is not used here", call=stage(get_mesh=lambda *_: None))
    raises(
        LayoutError,
        "expected one placement for each of the 1 mesh dimensions",
        call=stage(input_placements=[Shard(0), Shard(1)]),
    )
    raises(LayoutError, "a cycle of stages cannot run", call=stage(edges=[Edge(1, 0, 0, 0)]))
    raises(LayoutError, "has two edges", call=stage(edges=[Edge(0, 0, 1, 0), Edge(0, 1, 1, 0)]))
    raises(LayoutError, "without a gap", call=stage(edges=[Edge(0, 0, 1, 1)]))
    raises(LayoutError, "stages are 0..1", call=stage(edges=[Edge(0, 0, 4, 0)]))
    raises(LayoutError, "one rank per stage", call=lambda: PipelineStage(module, 0, 2, CPU, group=here.group))
    raises(LayoutError, "at least 1", call=lambda: Schedule1F1B(stage()(), 0))


def a_rank_that_never_calls(context) -> None:
    here = two_stages()
    if context.rank == 4:
        return
    stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, timeout=4.0)
    x, y = batch(8)
    # The ranks that call differ by the time their processes take to get here, which is far below the timeout.
    raises(DeadlineExceededError, "ranks [4]", call=lambda: schedule.step(x, target=y))


assert BOUND < TIMEOUT

CASES = [
    module_raises_case(0, 1, False),
    module_raises_case(1, 2, False),
    module_raises_case(2, 4, False),
    module_raises_case(1, 3, True),
    a_refusal_ends_nothing,
    mistakes_in_arguments,
    a_module_that_raises_at_once,
    a_closed_schedule_on_one_rank,
    made_anew_case(2),
    made_anew_case(3),
    a_schedule_refused_for_its_options,
    a_budget_below_the_minimum,
    a_budget_below_the_minimum_on_one_rank,
    an_output_that_does_not_match_its_layout,
    a_pending_sum_that_cannot_travel_yet,
    ranks_that_disagree,
    a_stage_on_no_rank,
    an_edge_to_an_output_that_is_not_there,
    bad_arguments_of_the_stage,
    a_rank_that_never_calls,
]
