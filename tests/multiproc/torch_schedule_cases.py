"""Programs about schedules: torch's classes, custom ones, files, options, errors."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import torch
from multiproc.torch_programs import (
    CPU,
    Layer,
    batch,
    folded,
    forwards,
    gradients,
    layers,
    looped,
    program,
    raised,
    stages_of,
    step,
    stepped,
)
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

mse = nn.functional.mse_loss
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
FOLDED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def placed(name: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """Numbers of this rank's stages, and how many stages there are."""
    if name in SINGLE:
        return [rank], ranks
    return (folded(rank, ranks) if name in FOLDED else looped(rank, ranks, 2)), 2 * ranks


def built(lib: Any, world: Any, name: str, ranks: int, microbatches: int, loss_fn: Any = mse, **more: Any):
    numbers, count = placed(name, world.rank, ranks)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, count, world.group)
    made = getattr(lib, name)
    schedule = made(stages[0] if name in SINGLE else stages, microbatches, loss_fn=loss_fn, **more)
    return schedule, stages, modules


def training(name: str, ranks: int, **more: Any) -> None:
    @program(ranks, name="_".join(["train", name, str(ranks), *more]))
    def run(lib: Any, world: Any) -> Any:
        schedule, stages, modules = built(lib, world, name, ranks, 8, **more)
        found = []
        for seed in (1, 2, 3):  # gradients add up over the steps, as torch scales them
            found.append((step(schedule, stages, *batch(16, seed=seed)), gradients(modules)))
        return found


def loop(name: str) -> None:
    @program(4, name=f"optimizer_and_evaluation_{name}")
    def run(lib: Any, world: Any) -> Any:
        schedule, stages, modules = built(lib, world, name, 4, 8)
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9)
        found = []
        for seed in range(3):
            optimizer.zero_grad()
            found.append((step(schedule, stages, *batch(16, seed=seed)), gradients(modules)))
            optimizer.step()
            with torch.no_grad():  # where torch divides gradients once more
                found.append(step(schedule, stages, *batch(16, seed=seed + 10), call="eval"))
        return found, [parameter.detach().clone() for module in modules for parameter in module.parameters()]


for each in (*SINGLE, *LOOPED, *FOLDED):
    training(each, 4)
    training(each, 2, scale_grads=False)
    if each not in FOLDED:  # torch cannot evaluate with these
        loop(each)


@program(2)
def evaluation_in_inference_mode(lib: Any, world: Any) -> Any:
    schedule, stages, modules = built(lib, world, "Schedule1F1B", 2, 4)
    found = []
    for seed in range(2):
        with torch.inference_mode():
            output, losses = step(schedule, stages, *batch(8, seed=seed), call="eval")
        found.append((None if output is None else output.clone(), losses))
        modules[0].zero_grad()  # which torch divides once more in an evaluation
        found.append((step(schedule, stages, *batch(8, seed=seed)), gradients(modules)))
    return found


@program(2)
def outputs_only_where_wanted(lib: Any, world: Any) -> Any:
    schedule, stages, _ = built(lib, world, "ScheduleGPipe", 2, 4)
    found = [step(schedule, stages, *batch(8), return_outputs=flag) for flag in (False, True)]
    with torch.no_grad():
        for flag in (False, True):
            found.append(step(schedule, stages, *batch(8), call="eval", return_outputs=flag))
    return found


@program(2)
def arguments_of_the_loss(lib: Any, world: Any) -> Any:
    def loss_fn(output: torch.Tensor, target: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return mse(output, target) * factor

    schedule, stages, modules = built(lib, world, "Schedule1F1B", 2, 4, loss_fn)
    found = [step(schedule, stages, *batch(8), loss_kwargs={"factor": 3.0}), gradients(modules)]
    with torch.no_grad():
        found.append(step(schedule, stages, *batch(8), call="eval", loss_kwargs={"factor": 0.5}))
    return found


@program(2)
def losses_need_gradients(lib: Any, world: Any) -> Any:
    schedule, stages, _ = built(lib, world, "ScheduleGPipe", 2, 4)
    losses: list[torch.Tensor] = [torch.zeros(())]
    x, y = batch(8)
    if stages[0].is_last:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step(x)
    return [(loss.requires_grad, loss.dim()) for loss in losses]


@program(3)
def forward_only(lib: Any, world: Any) -> Any:
    module = Layer(world.rank)
    stage = lib.PipelineStage(module, world.rank, 3, CPU, group=world.group)
    schedule = lib.schedules._ScheduleForwardOnly(stage, 4)
    x, y = batch(8)
    found = [schedule.step(x) if world.rank == 0 else schedule.step() for _ in range(2)]
    if world.rank == 2:
        with torch.no_grad():
            found.append(raised(lambda: schedule._step_microbatches(target_mbs=[y] * 4), RuntimeError))
    return found, gradients([module])


@program(3)
def without_a_loss(lib: Any, world: Any) -> Any:
    schedule, _, modules = built(lib, world, "ScheduleGPipe", 3, 4, None)
    x, _ = batch(8)
    return [schedule.step(x) if world.rank == 0 else schedule.step() for _ in range(2)], gradients(modules)


@program(2)
def outputs_without_a_loss_hold_their_graph(lib: Any, world: Any) -> Any:
    """A backward by hand reaches what the last stage has."""
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        schedule, stages, modules = built(lib, world, name, 2, 4, None)
        for quiet in (False, True):
            with torch.set_grad_enabled(not quiet):
                output, _ = stepped(schedule, stages, batch(8)[0])
            found.append((output, None if output is None else output.requires_grad))
            if output is not None and not quiet:
                output.square().sum().backward()
            found.append(gradients(modules))
    return found


@program(1)
def outputs_of_one_stage_without_a_loss_lead_to_the_batch(lib: Any, world: Any) -> Any:
    schedule, _, modules = built(lib, world, "ScheduleGPipe", 1, 4, None)
    x = batch(8)[0].requires_grad_()
    schedule.step(x).square().sum().backward()
    return x.grad, gradients(modules)


@program(2)
def outputs_of_a_step_that_trains_hold_no_graph(lib: Any, world: Any) -> Any:
    schedule, stages, _ = built(lib, world, "ScheduleGPipe", 2, 4)
    output, _ = step(schedule, stages, *batch(8))
    return output is not None and output.requires_grad


@program(2)
def no_gradients_to_train_with(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "ScheduleInterleaved1F1B"):
        schedule, stages, _ = built(lib, world, name, 2, 4)
        with torch.no_grad():
            found.append(raised(lambda: step(schedule, stages, *batch(8)), RuntimeError))  # noqa: B023
    return found


@program(1)
def one_rank(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        schedule, stages, modules = built(lib, world, name, 1, 4)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


@program(2)
def names_of_schedules(lib: Any, _: Any) -> Any:
    get = lib.schedules.get_schedule_class
    names = ("1F1B", "gpipe", "INTERLEAVED1F1B", "LoopedBFS", "interleavedZEROBUBBLE", "zbvzerobubble")
    names += ("DualPipeV", "PipelineScheduleSingle", "pipelineschedulemulti")
    found = [get(name).__name__ for name in names]
    return found, raised(lambda: get("no such schedule"), ValueError)


@program(2)
def wrong_numbers_of_stages(lib: Any, world: Any) -> Any:
    group = world.group

    def made(name: str, numbers: list[int], count: int, microbatches: int = 4) -> str:
        stages = stages_of(lib, layers(numbers), numbers, count, group)
        return raised(lambda: getattr(lib, name)(stages, microbatches, loss_fn=mse), ValueError)

    return [
        made("ScheduleZBVZeroBubble", [world.rank], 2),
        made("ScheduleZBVZeroBubble", looped(world.rank, 2, 3), 6),
        made("ScheduleDualPipeV", [world.rank], 2),
        raised(lambda: lib.PipelineStage(Layer(0), 4, 4, CPU, group=group), ValueError),
        raised(lambda: lib.PipelineStage(Layer(0), 0, 1, CPU, group=group), RuntimeError),
    ]


@program(2)
def what_a_schedule_shows(lib: Any, world: Any) -> Any:
    found: list[Any] = []
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        schedule, stages, _ = built(lib, world, name, 2, 4)
        step(schedule, stages, *batch(8))
        found += [
            schedule._n_microbatches,
            schedule._num_stages,
            schedule.scale_grads,
            schedule._has_backward,
        ]
        found += [schedule._args_chunk_spec, schedule._kwargs_chunk_spec, schedule._loss_fn is mse]
        order = schedule.pipeline_order
        if name != "ScheduleZBVZeroBubble":  # meshcast has an order of its own
            found.append(
                {rank: [str(each) for each in row if each is not None] for rank, row in order.items()}
            )
        if name in SINGLE:
            found.append(schedule._stage is stages[0])
        else:
            found += [
                schedule._stages == stages,
                type(schedule._stages),
                schedule.rank,
                schedule.pp_group_size,
            ]
            found.append(dict(schedule.stage_index_to_group_rank))
        for stage in stages:
            found += [stage.group_rank, stage.group_size, stage.has_backward, stage.is_first, stage.is_last]
            found += [
                dict(stage.stage_index_to_group_rank),
                stage.num_stages,
                stage.stage_index,
                stage.chunks,
            ]
            found += [len(stage.output_chunks), stage.submod is not None, stage.device.type]
            stage.clear_runtime_states()
            found += [len(stage.output_chunks), len(forwards(stage))]
    return found


@program(2)
def a_schedule_with_transfers(lib: Any, world: Any) -> Any:
    schedule, _, _ = built(lib, world, "ScheduleInterleaved1F1B", 2, 4)
    order = schedule.pipeline_order_with_comms
    return {rank: [str(each) for each in row] for rank, row in order.items()}


class Placed:
    """What a schedule looks at of stages that it never runs."""

    def __init__(self, lib: Any, ranks: int, each: int) -> None:
        class Looked(lib.stage._PipelineStageBase):
            def __init__(self, index: int) -> None:
                self.submod, self.group, self.stage_index = None, None, index
                self.num_stages, self.group_size, self.group_rank = ranks * each, ranks, 0
                self.has_backward = False

            _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = None

        self.stages = [Looked(index * ranks) for index in range(each)]


@program(1)
def orders_of_stages_that_do_not_run(lib: Any, _: Any) -> Any:
    found = []
    for name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"):
        for ranks, each, count in ((2, 2, 4), (4, 2, 8), (4, 3, 12)):
            schedule = getattr(lib, name)(Placed(lib, ranks, each).stages, count)
            order = {
                rank: [str(one) for one in row if one is not None]
                for rank, row in schedule.pipeline_order.items()
            }
            checked = lib.schedules._validate_schedule(schedule.pipeline_order, ranks, ranks * each, count)
            found.append((order, checked, schedule.pp_group_size, schedule.rank))
    return found


@program(2)
def weights_before_inputs(lib: Any, world: Any) -> Any:
    stage = lib.PipelineStage(Layer(0), world.rank, 2, CPU, group=world.group)
    stage.has_backward = True
    return raised(lambda: stage.backward_weight_one_chunk(bwd_chunk_id=0), AssertionError)


def actions(lib: Any, text: str) -> list[Any]:
    return [lib.schedules._Action.from_str(each) for each in text.split(",")]


def custom(lib: Any, base: str, rows: dict[int, str]) -> type:
    class Custom(getattr(lib.schedules, base)):
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None) -> None:
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.pipeline_order = {rank: actions(lib, text) for rank, text in rows.items()}
            self._validate_and_set_stage_mapping(self.pipeline_order)

    return Custom


V = {0: "0F0,,,3F0,3B0,,,0B0", 1: ",1F0,2F0,,,2B0,1B0,"}
UNBALANCED = {0: "0F0,1F0,,,4F0,4B0,,,1B0,0B0", 1: ",,2F0,3F0,,,3B0,2B0,,"}
WITH_W = {
    0: "0F0,0F1,2F0,2F1,,2I0,2W0,0I0,2I1,0W0,0I1,2W1,0W1",
    1: ",1F0,1F1,3F0,3I0,3F1,1I0,3I1,3W0,1I1,1W0,3W1,1W1",
}


@program(2)
def a_schedule_with_weights_apart(lib: Any, world: Any) -> Any:
    numbers = looped(world.rank, 2, 2)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, 4, world.group)
    schedule = custom(lib, "PipelineScheduleMulti", WITH_W)(stages, 2, mse)
    return step(schedule, stages, *batch(8)), gradients(modules)


def custom_runtime(name: str, rows: dict[int, str], places: list[list[int]], microbatches: int) -> None:
    @program(2, name=f"runtime_{name}")
    def run(lib: Any, world: Any) -> Any:
        numbers = places[world.rank]
        modules = layers(numbers)
        stages = stages_of(lib, modules, numbers, sum(map(len, places)), world.group)
        schedule = lib.schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=mse)
        schedule._prepare_schedule_with_comms({rank: actions(lib, text) for rank, text in rows.items()})
        found = []
        for seed in range(2):
            found.append((step(schedule, stages, *batch(8, seed=seed)), gradients(modules)))
        return found


custom_runtime("v", V, [[0, 3], [1, 2]], 1)
custom_runtime("unbalanced", UNBALANCED, [[0, 1, 4], [2, 3]], 1)
custom_runtime("with_w", WITH_W, [[0, 2], [1, 3]], 2)


@program(2)
def reordered_with_transfers(lib: Any, world: Any) -> Any:
    modules = layers([world.rank])
    stages = stages_of(lib, modules, [world.rank], 2, world.group)

    # torch 2.15 wants to be told when a send is waited for.
    waits = "WAIT_SEND_F" in lib.schedules._ComputationType.__members__
    after_f, after_b = (",0WAIT_SEND_F0,0WAIT_SEND_F1", ",1WAIT_SEND_B0,1WAIT_SEND_B1") if waits else ("", "")

    class Reordered(lib.schedules._PipelineScheduleRuntime):
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any) -> None:
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.pipeline_order_with_comms = {
                0: actions(lib, "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1" + after_f),
                1: actions(lib, "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1" + after_b),
            }

    schedule = Reordered(stages, 2, mse)
    return step(schedule, stages, *batch(8)), gradients(modules)


@program(2)
def files_of_schedules(lib: Any, world: Any) -> Any:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        for form in ("compute_only", "compute_comms"):
            schedule, stages, _ = built(lib, world, "ScheduleLoopedBFS", 2, 4)
            schedule._dump_csv(path, form)
            numbers = looped(world.rank, 2, 2)
            modules = layers(numbers)
            stages = stages_of(lib, modules, numbers, 4, world.group)
            loaded = lib.schedules._PipelineScheduleRuntime(stages, 4, loss_fn=mse)
            loaded._load_csv(path, format=form)
            found.append((step(loaded, stages, *batch(8)), gradients(modules)))
            if form == "compute_only":
                with open(path) as file:
                    found.append(file.read())
    return found


@program(2)
def texts_of_actions(lib: Any, _: Any) -> Any:
    s = lib.schedules
    texts = ("2F0", "1UNSHARD", "3SEND_F1", "0I4", "0REDUCE_GRAD", "(0F1;1B0)OVERLAP_F_B")
    lowered = s._add_unshard_reshard(actions(lib, "0F0,0F1,0B0,0B1"))
    merged = s._merge_bw(actions(lib, "0F0,0I0,0W0,0I1,0W1"))
    return [str(s._Action.from_str(text)) for text in texts], list(map(str, lowered)), list(map(str, merged))


@program(2)
def functions_for_actions(lib: Any, world: Any) -> Any:
    s = lib.schedules
    numbers = folded(world.rank, 2)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, 4, world.group)
    schedule = lib.ScheduleDualPipeV(stages, 4, loss_fn=mse)
    seen: list[str] = []

    def both(action: Any, context: Any) -> None:
        seen.append(str(action))
        owner = context.schedule_ref
        mine = {stage.stage_index: stage for stage in owner._stages}
        for part in action.sub_actions:
            index, number = part.stage_index, part.microbatch_index
            stage = mine[index]
            if part.computation_type == s.FORWARD:
                if not stage.is_first and index - 1 not in mine:
                    s._wait_batch_p2p(owner.fwd_recv_ops.pop((index, number)))
                output = stage.forward_one_chunk(
                    number, context.arg_mbs[number], context.kwarg_mbs[number], save_forward_output=True
                )
                owner._maybe_compute_loss(stage, output, context.target_mbs, number)
                if index + 1 in mine:
                    mine[index + 1].set_local_fwd_input(output, number)
            else:
                if not stage.is_last and index + 1 not in mine:
                    s._wait_batch_p2p(owner.bwd_recv_ops.pop((index, number)))
                loss = owner._maybe_get_loss(stage, number)
                owner.backward_counter[index] += 1
                stage.backward_one_chunk(
                    number,
                    loss=loss,
                    full_backward=part.computation_type == s.FULL_BACKWARD,
                    last_backward=owner.backward_counter[index] == owner._n_microbatches,
                )
                if index - 1 in mine:
                    mine[index - 1].set_local_bwd_input(stage.get_local_bwd_output(number), number)

    schedule.register_custom_function(s.OVERLAP_F_B, both)
    found = [step(schedule, stages, *batch(8)) for _ in range(2)]
    refused = raised(lambda: schedule.register_custom_function(s.SEND_F, both), ValueError)
    return found, gradients(modules), seen, refused


def functions_that_gather(name: str) -> None:
    """Functions for what FSDP2 needs are called where torch calls them, though nothing is sharded."""

    @program(2, name=f"functions_that_gather_{name}")
    def run(lib: Any, world: Any) -> Any:
        s = lib.schedules
        schedule, stages, modules = built(lib, world, name, 2, 4)
        seen: list[str] = []

        def note(action: Any, context: Any) -> None:
            seen.append(f"{action} {context.schedule_ref is schedule}")

        schedule.register_custom_function(s.UNSHARD, note)
        schedule.register_custom_function(s.RESHARD, note)
        for stage in stages:
            noted(stage, seen)
        return [step(schedule, stages, *batch(8)) for _ in range(2)], gradients(modules), seen

    del run


def noted(stage: Any, seen: list[str]) -> None:
    """Writes down when a stage computes."""
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def forward_one_chunk(number: int, *args: Any, **named: Any) -> Any:
        seen.append(f"{stage.stage_index}F{number}")
        return forward(number, *args, **named)

    def backward_one_chunk(number: int, *args: Any, **named: Any) -> Any:
        seen.append(f"{stage.stage_index}B{number}")
        return backward(number, *args, **named)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk


for each in ("ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"):
    functions_that_gather(each)


@program(2)
def functions_that_gather_where_a_schedule_says(lib: Any, world: Any) -> Any:
    """An order that holds its transfers names the places; forwards alone call the functions too."""
    s = lib.schedules
    rows = {
        0: "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RESHARD,0RECV_B0,0UNSHARD,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        1: "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD",
    }
    if hasattr(torch_schedules, "WAIT_REDUCE_GRAD"):  # torch 2.15: what was begun is to be waited for
        begun = re.compile(r"(\d)(REDUCE_GRAD|SEND_[FB]\d)")
        rows = {rank: begun.sub(r"\1\2,\1WAIT_\2", row) for rank, row in rows.items()}
    found, seen = [], []
    for loss_fn in (mse, None):
        numbers = [world.rank]
        modules = layers(numbers)
        stages = stages_of(lib, modules, numbers, 2, world.group)
        schedule = s._PipelineScheduleRuntime(stages, 2, loss_fn=loss_fn)
        schedule._prepare_schedule_with_comms(
            {rank: actions(lib, text) for rank, text in rows.items()}, format="compute_comms"
        )
        for kind in (s.UNSHARD, s.RESHARD):
            schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
        for stage in stages if loss_fn else ():  # torch also makes the calls for backwards that do nothing
            noted(stage, seen)
        x, y = batch(8)
        found.append(step(schedule, stages, x, y) if loss_fn else stepped(schedule, stages, x))
    return found, seen


@program(2)
def functions_in_an_evaluation(lib: Any, world: Any) -> Any:
    s = lib.schedules
    schedule, stages, _ = built(lib, world, "ScheduleLoopedBFS", 2, 4)
    seen: list[str] = []

    def forward(action: Any, context: Any) -> None:
        seen.append(str(action))
        index, number = action.stage_index, action.microbatch_index
        mine = {stage.stage_index: stage for stage in stages}
        stage = mine[index]
        if not stage.is_first:
            s._wait_batch_p2p(schedule.fwd_recv_ops.pop((index, number)))
        output = stage.forward_one_chunk(
            number, context.arg_mbs[number], context.kwarg_mbs[number], save_forward_output=True
        )
        schedule._maybe_compute_loss(stage, output, context.target_mbs, number)

    schedule.register_custom_function(s.FORWARD, forward)
    schedule.register_custom_function(s.UNSHARD, lambda action, _: seen.append(str(action)))
    with torch.no_grad():
        output, losses = step(schedule, stages, *batch(8), call="eval")
    return output, losses, seen


@program(2)
def weights_by_a_function_of_the_user(lib: Any, world: Any) -> Any:
    class Late(nn.Module):
        """Keeps what the gradient of its weight is made of, and makes it when told to."""

        def __init__(self, number: int) -> None:
            super().__init__()
            torch.manual_seed(number)
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.kept: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Product.apply(x, self.weight, self.kept)

        def compute_dw(self) -> None:
            x, gradient = self.kept.pop(0)
            made = gradient.t() @ x
            self.weight.grad = made if self.weight.grad is None else self.weight.grad + made

    class _Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kept: list[Any]) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            ctx.kept = kept
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            ctx.kept.append((x, gradient))
            return gradient @ weight, None, None

    found = []
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        numbers, count = placed(name, world.rank, 2)
        modules = layers(numbers, Late)
        calls: list[int] = []

        def builder(module: Any, calls: list[int]) -> Any:
            def build() -> Any:
                calls.append(len(module.kept))
                return module.compute_dw

            return build

        stages = [  # with shapes, since torch runs the module to find them
            lib.PipelineStage(
                module, number, count, CPU, group=world.group, dw_builder=builder(module, calls), **shapes(4)
            )
            for module, number in zip(modules, numbers, strict=True)
        ]
        schedule = getattr(lib, name)(stages, 4, loss_fn=mse)
        x, y = batch(8)
        found.append((step(schedule, stages, x.requires_grad_(), y), gradients(modules)))
    return found


def shapes(rows: int) -> dict[str, Any]:
    example = torch.empty(rows // 2, 6, requires_grad=True)
    return {"input_args": example, "output_args": example}
