"""Programs about orders of actions: loaded, written, run again, run by functions of the user; and wrong
arguments, which raise what torch raises."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from multiproc.torch_programs import (
    CPU,
    Layer,
    batch,
    folded,
    gradients,
    layers,
    looped,
    program,
    raised,
    stages_of,
    step,
)
from multiproc.torch_schedule_cases import LOOPED, UNBALANCED, WITH_W, V, actions, built, mse, placed, shapes
from torch import nn


def text_of(order: Any) -> dict[int, list[str]]:
    return {rank: [str(each) for each in row if each is not None] for rank, row in order.items()}


def runtime_again(name: str) -> None:
    """torch's runtime with the order of another schedule, written to a file and read again."""

    @program(2, name=f"runtime_again_{name}")
    def run(lib: Any, world: Any) -> Any:
        numbers, count = placed(name, world.rank, 2)
        modules = layers(numbers)
        stages = stages_of(lib, modules, numbers, count, world.group)
        order = getattr(lib, name)(stages, 4, loss_fn=mse).pipeline_order
        made = lib.schedules._PipelineScheduleRuntime
        first, second, third = (made(stages, 4, loss_fn=mse) for _ in range(3))
        first._prepare_schedule_with_comms(order)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "order.csv")
            first._dump_csv(path)
            second._load_csv(path, format="compute_comms")
        third._prepare_schedule_with_comms(second.pipeline_order_with_comms, format="compute_comms")
        orders = [text_of(each.pipeline_order_with_comms) for each in (first, second, third)]
        return orders, step(third, stages, *batch(8)), gradients(modules)


for each in LOOPED:
    runtime_again(each)


def from_a_file(base: str, name: str, rows: dict[int, str], places: list[list[int]], count: int) -> None:
    """A subclass that has no order until a file is loaded."""

    @program(2, name=f"from_a_file_{base}_{name}")
    def run(lib: Any, world: Any) -> Any:
        class Mine(getattr(lib.schedules, base)):
            pass

        numbers = places[world.rank]
        modules = layers(numbers)
        stages = stages_of(lib, modules, numbers, sum(map(len, places)), world.group)
        schedule = Mine(stages, count, loss_fn=mse)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "order.csv")
            with open(path, "w") as file:
                file.writelines(f"{rows[rank]}\n" for rank in sorted(rows))
            schedule._load_csv(path)
        return [(step(schedule, stages, *batch(8, seed=seed)), gradients(modules)) for seed in range(2)]


# torch's older base class runs no split backward, and no stages that are elsewhere than in a loop.
from_a_file(
    "PipelineScheduleMulti",
    "looped",
    {0: "0F0,,2F0,,,2B0,,0B0", 1: ",1F0,,3F0,3B0,,1B0,"},
    [[0, 2], [1, 3]],
    1,
)
from_a_file("_PipelineScheduleRuntime", "v", V, [[0, 3], [1, 2]], 1)
from_a_file("_PipelineScheduleRuntime", "unbalanced", UNBALANCED, [[0, 1, 4], [2, 3]], 1)
from_a_file("_PipelineScheduleRuntime", "with_w", WITH_W, [[0, 2], [1, 3]], 2)


@program(2)
def fused_actions_in_a_file(lib: Any, world: Any) -> Any:
    """Without a function for them, their parts run one after the other."""
    numbers = folded(world.rank, 2)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, 4, world.group)
    order = lib.ScheduleDualPipeV(stages, 4, loss_fn=mse).pipeline_order
    schedule = lib.schedules._PipelineScheduleRuntime(stages, 4, loss_fn=mse)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "order.csv")
        first = lib.schedules._PipelineScheduleRuntime(stages, 4, loss_fn=mse)
        first._prepare_schedule_with_comms(order)
        first._dump_csv(path, "compute_comms")
        schedule._load_csv(path, "compute_comms")
        with open(path) as file:
            written = file.read()
    assert "OVERLAP_F_B" in written
    return written, step(schedule, stages, *batch(8)), gradients(modules)


@program(2)
def functions_for_every_computation(lib: Any, world: Any) -> Any:
    s = lib.schedules
    numbers = looped(world.rank, 2, 2)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, 4, world.group)
    schedule = lib.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=mse)
    seen: list[str] = []

    def stage_of(action: Any, context: Any) -> Any:
        seen.append(str(action))
        return next(one for one in context.schedule_ref._stages if one.stage_index == action.stage_index)

    def forward(action: Any, context: Any) -> None:
        stage, number, owner = stage_of(action, context), action.microbatch_index, context.schedule_ref
        if not stage.is_first:
            s._wait_batch_p2p(owner.fwd_recv_ops.pop((stage.stage_index, number)))
        output = stage.forward_one_chunk(number, context.arg_mbs[number], context.kwarg_mbs[number])
        owner._maybe_compute_loss(stage, output, context.target_mbs, number)

    def backward(action: Any, context: Any) -> None:
        stage, number, owner = stage_of(action, context), action.microbatch_index, context.schedule_ref
        if not stage.is_last:
            s._wait_batch_p2p(owner.bwd_recv_ops.pop((stage.stage_index, number)))
        loss = owner._maybe_get_loss(stage, number)
        whole = action.computation_type == s.FULL_BACKWARD
        stage.backward_one_chunk(number, loss=loss, full_backward=whole, last_backward=False)

    def weights(action: Any, context: Any) -> None:
        stage_of(action, context).backward_weight_one_chunk(action.microbatch_index)

    def reduce(action: Any, context: Any) -> None:
        stage_of(action, context).scale_grads(8)

    schedule.register_custom_function(s.FORWARD, forward)
    schedule.register_custom_function(s.FULL_BACKWARD, backward)
    schedule.register_custom_function(s.BACKWARD_INPUT, backward)
    schedule.register_custom_function(s.BACKWARD_WEIGHT, weights)
    schedule.register_custom_function(s.REDUCE_GRAD, reduce)
    found = [step(schedule, stages, *batch(8, seed=seed)) for seed in range(2)]
    # torch reduces a stage when its last backward is over, meshcast when the step is.
    return found, gradients(modules), [each for each in seen if "REDUCE" not in each], sorted(seen)


@program(2)
def weights_by_a_function_where_none_are_apart(lib: Any, world: Any) -> Any:
    """dw_builder under schedules that know whole backwards only."""
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        calls: list[str] = []

        def builder(calls: list[str] = calls) -> Callable[..., None]:
            calls.append("built")
            return lambda *_: calls.append("run")

        modules = layers([world.rank])
        stages = stages_of(lib, modules, [world.rank], 2, world.group, dw_builder=builder, **shapes(4))
        schedule = getattr(lib, name)(stages[0], 4, loss_fn=mse)
        found.append((step(schedule, stages, *batch(8)), gradients(modules), calls))
    return found


# ---- wrong arguments -----------------------------------------------------------------------------------


@program(2)
def wrong_arguments_of_a_step(lib: Any, world: Any) -> Any:
    """Refused before anything is sent: the ranks go on."""
    found: list[Any] = []
    x, y = batch(8)
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        schedule, stages, modules = built(lib, world, name, 2, 4)
        found.append(raised(lambda: schedule._check_inputs(arg_mbs=((x,),) * 4), TypeError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs(arg_mbs=[(x,)] * 3), ValueError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs(kwarg_mbs=[{}] * 5), ValueError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs(kwarg_mbs=({},) * 4), TypeError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs(target_mbs=[y] * 2), ValueError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs(losses=()), TypeError))  # noqa: B023
        checked = schedule._check_inputs(target_mbs=[y] * 4, losses=[])
        found.append((checked, step(schedule, stages, x, y), gradients(modules)))
    return found


@program(2)
def wrong_arguments_of_schedules(lib: Any, world: Any) -> Any:
    s = lib.schedules
    numbers = folded(world.rank, 2)
    stages = stages_of(lib, layers(numbers), numbers, 4, world.group)
    runtime = s._PipelineScheduleRuntime(stages, 2, loss_fn=mse)
    order = {0: "0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1", 1: "1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1"}
    rows = {rank: actions(lib, text) for rank, text in order.items()}
    mixed = {rank: [*row, s._Action(row[0].stage_index, s.SEND_F, 0)] for rank, row in rows.items()}
    prepare = runtime._prepare_schedule_with_comms
    short = {rank: row[:-1] for rank, row in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "order.csv")
        with open(path, "w") as file:
            file.write("0F0,what\n1F0\n")
        wrong_file = raised(lambda: runtime._load_csv(path), RuntimeError)
    return [
        raised(lambda: lib.ScheduleDualPipeV(stages, 2, loss_fn=mse), ValueError),
        raised(lambda: lib.ScheduleGPipe(None, 2), Exception) != "nothing was raised",
        raised(lambda: prepare(mixed), ValueError),
        raised(lambda: prepare(rows, format="text"), NotImplementedError),
        raised(lambda: prepare({0: rows[0]}), AssertionError),
        raised(lambda: prepare(short), AssertionError),
        wrong_file,
        raised(lambda: s._Action.from_str("2X0"), RuntimeError),
        raised(lambda: s._ComputationType.from_str("X"), RuntimeError),
        raised(lambda: s.get_schedule_class("1F2B"), ValueError),
        raised(lambda: runtime.register_custom_function(s.RECV_B, print), ValueError),
    ]


@program(2)
def wrong_calls_of_a_stage(lib: Any, world: Any) -> Any:
    stage = lib.PipelineStage(Layer(0), world.rank, 2, CPU, group=world.group)
    stage.has_backward = True
    return [
        raised(lambda: stage.backward_weight_one_chunk(bwd_chunk_id=0), AssertionError),
        raised(lambda: lib.PipelineStage(Layer(0), 2, 2, CPU, group=world.group), ValueError),
    ]


@program(1)
def wrong_pieces(lib: Any, _: Any) -> Any:
    m = lib.microbatch
    spec = m.TensorChunkSpec
    x, y = batch(6)
    split, merge = m.split_args_kwargs_into_chunks, m.merge_chunks
    return [
        raised(lambda: split((x,), None, 2, (spec(0), spec(0))), AssertionError, ValueError),
        raised(lambda: split((x,), {"y": y}, 2, None, {"z": spec(0)}), AssertionError, KeyError, ValueError),
        raised(lambda: split((x,), None, 2, ("no spec",)), AssertionError, ValueError, TypeError),
        raised(lambda: merge([(x,), (x, y)], None), ValueError),
        raised(lambda: merge([{"a": x}, {"b": x}], None), ValueError, KeyError),
        raised(lambda: m._split_block_mask(_mask(2), 4), AssertionError),
    ]


def _mask(rows: int) -> Any:
    create = nn.attention.flex_attention.create_block_mask
    return create(lambda _, __, q, k: q >= k, rows, None, 256, 256, device="cpu")


@program(1)
def pieces_and_back(lib: Any, _: Any) -> Any:
    m = lib.microbatch
    spec = m.TensorChunkSpec
    x0, x1, x2 = (torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (8, 16, 12))
    args, named = m.split_args_kwargs_into_chunks((x0, x1, x2), {"a": x1, "b": [x2, {"c": x0}]}, 4)
    found = [args, named]
    found.append(m.merge_chunks(args, (spec(0),) * 3))
    found.append(m.merge_chunks([{"a": each["a"]} for each in named], {"a": spec(0)}))
    columns, other = m.split_args_kwargs_into_chunks(
        (x0, x1), {"a": x2}, 2, spec.from_tuple((1, 0)), spec.from_dict({"a": 1})
    )
    found += [columns, other, m.merge_chunks(columns, spec.from_tuple((1, 0)))]
    whole, _ = m.split_args_kwargs_into_chunks((x0, 3, "text", None), {}, 2, (m._Replicate(),) * 4)
    found.append(whole)
    uneven, _ = m.split_args_kwargs_into_chunks((x0[:7],), None, 3)
    found += [uneven, m.merge_chunks(uneven, None)]
    few, more = m.split_args_kwargs_into_chunks((x0[:2],), {"none": None}, 4)
    found += [few, more, len(few)]
    reduced = [(x0.sum(),), (x1.sum(),)]
    found.append(m.merge_chunks(reduced, (m.sum_reducer,)))
    found.append(m.merge_chunks(reduced, (m._CustomReducer(torch.tensor(0.0), lambda a, b: a * 2 + b),)))
    masks = m._split_block_mask(_mask(1), 3)
    found += [len(masks), [str(spec(2)), repr(spec(2)).partition("microbatch.")[2]]]
    return found
