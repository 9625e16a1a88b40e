"""What a step is given: nested and whole values, what does not fit the batch, batches that differ. Six ranks;
run by test_pipeline_arguments.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import PipelineStage, get_schedule_class
from meshcast.pipelining.microbatch import TensorChunkSpec, _Replicate
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import CPU, TIMEOUT, Place, batch, check_gradients, in_a_row, mlp, place
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._pytree import register_dataclass

mse = nn.functional.mse_loss
SIZES = (12, 7, 2, 1)  # of the batches: ranks and micro-batches often have none


class Pair(NamedTuple):
    gain: torch.Tensor
    shift: torch.Tensor


@dataclass
class Known:
    gain: torch.Tensor
    shift: torch.Tensor


register_dataclass(Known)


@dataclass
class Unknown:
    """No pytree."""

    gain: torch.Tensor
    shift: torch.Tensor


class Slots:
    __slots__ = ("both",)

    def __init__(self, gain: torch.Tensor, shift: torch.Tensor) -> None:
        self.both = [gain, shift]


# How a value for each sample comes, and how the module finds it.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Sequence[torch.Tensor]]]] = {
    "dict": (
        lambda g, s: {"gain": g, "more": {"shift": s, "number": 3}},
        lambda v: (v["gain"], v["more"]["shift"]),
    ),
    "list": (lambda g, s: [g, "text", (s, None)], lambda v: (v[0], v[2][0])),
    "NamedTuple": (Pair, lambda v: v),
    "dataclass": (Known, lambda v: (v.gain, v.shift)),
}  # fmt: skip


class Modulated(nn.Module):
    """Each sample has a gain and a shift of its own, in a nested value."""

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        self.body, self.found = body, KINDS[kind][1]

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        gain, shift = self.found(given)
        return self.body(x * gain) + shift


def extras(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.rand(rows, 1).to(dtype), torch.randn(rows, 6).to(dtype)


def schedule_on(here: Place, module: nn.Module, microbatches: int, name: str = "1F1B", **options: Any) -> Any:
    of_stage = {
        key: options.pop(key) for key in ("use_dtensor", "input_placements", "data_dims") if key in options
    }
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **of_stage)
    return get_schedule_class(name)(stage, microbatches, **{"loss_fn": mse, "timeout": TIMEOUT, **options})


def distance(module: nn.Module, exact: nn.Module) -> float:
    """Largest relative difference of a gradient."""
    pairs = zip(module.parameters(), exact.parameters(), strict=True)
    return max(((a.grad.double() - b.grad).norm() / b.grad.norm()).item() for a, b in pairs)


class Alone:
    """One process over whole batches: exactly, and in the type of the pipeline, which says how far off a
    pipeline may be."""

    def __init__(self, build: Callable[[], list[nn.Module]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.exact, self.rough = ([each.to(dtype) for each in build()] for _ in range(2))
        self.exact = [each.double() for each in self.exact]

    def check(
        self, here: Place, module: nn.Module, run: Callable[[list[nn.Module], Callable], torch.Tensor]
    ) -> None:
        """run(stages, cast): the loss of the whole batch."""
        for stages, cast in ((self.exact, torch.Tensor.double), (self.rough, lambda value: value)):
            for each in stages:
                each.zero_grad()
            run(stages, cast).backward()
        allowed = max(1e-5, 6 * distance(self.rough[here.stage], self.exact[here.stage]))
        allowed = max(allowed, 0.05) if self.dtype == torch.bfloat16 else allowed
        found = distance(module, self.exact[here.stage])
        assert found <= allowed, f"gradients differ by {found}, allowed {allowed}"
        module.zero_grad()


def nested_case(kind: str, dtype: torch.dtype, *, pieces: bool = False):
    """A nested argument of the first stage, a nested keyword argument of the second, a nested target."""

    def case(_) -> None:
        here = place(in_a_row([2, 3]))
        if here is None:
            return
        made = KINDS[kind][0]

        def build() -> list[nn.Module]:
            return [Modulated(body, kind) for body in mlp(2)]

        def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
            return mse(output * target["weight"][0], target["y"])

        alone, module = Alone(build, dtype), build()[here.stage].to(dtype)
        schedule = schedule_on(here, module, 3, loss_fn=loss_fn, varying_shapes=pieces)
        for step, rows in enumerate(SIZES[:1] if pieces else SIZES):
            (x, y), first, second = (
                batch(rows, dtype=dtype, seed=step),
                *(extras(rows, dtype, 9 + i) for i in (0, 1)),
            )
            if pieces:
                cuts = [slice(0, 4), slice(4, 8), slice(8, 12)]
                given = {
                    "arg_mbs": [(x[at], made(*(each[at] for each in first))) for at in cuts],
                    "kwarg_mbs": [{"given": made(*(each[at] for each in second))} for at in cuts],
                    "target_mbs": [{"y": y[at], "weight": [second[0][at]]} for at in cuts],
                }
                if here.stage == 0:
                    del given["kwarg_mbs"]
                schedule.step(**given)
            elif here.stage == 0:
                schedule.step(x, made(*first))
            else:
                schedule.step(given=made(*second), target={"y": y, "weight": [second[0]]})

            def run(stages: list[nn.Module], cast: Callable) -> torch.Tensor:
                one, two = (made(*map(cast, each)) for each in (first, second))  # noqa: B023
                output = stages[1](stages[0](cast(x), one), two)  # noqa: B023
                return loss_fn(output, {"y": cast(y), "weight": [cast(second[0])]})  # noqa: B023

            alone.check(here, module, run)

    case.__name__ = f"nested_{kind}_{str(dtype).removeprefix('torch.')}{'_pieces' * pieces}"
    return case


class Masked(nn.Module):
    """Attention under a BlockMask, as FlexAttention has it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, *, mask: BlockMask) -> torch.Tensor:
        # mask_mod itself, and how many blocks count: FlexAttention on the CPU has no backward.
        at = [torch.arange(size) for size in (x.shape[0], 1, x.shape[1], x.shape[1])]
        seen = torch.vmap(
            torch.vmap(torch.vmap(torch.vmap(mask.mask_mod, (None, None, None, 0)), (None, None, 0, None)),
                       (None, 0, None, None)), (0, None, None, None)
        )(*at)[:, 0]  # fmt: skip
        scores = torch.where(seen, x @ x.transpose(1, 2), -1e4).softmax(-1)
        blocks = mask.kv_num_blocks.to(x.dtype).mean((1, 2)).view(-1, 1, 1)
        return self.body(scores @ x) * blocks


def mask_of(lengths: Sequence[int], tokens: int = 8) -> BlockMask:
    """Each sample sees tokens up to a length of its own. One length: one row for all of them."""
    known = torch.tensor(list(lengths))

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        del h, q
        return k < known[b if len(known) > 1 else 0]

    return create_block_mask(mask_mod, len(known), None, tokens, tokens, device="cpu", BLOCK_SIZE=4)


def masks_case(dtype: torch.dtype, *, whole: bool = False):
    """A BlockMask for each stage, cut over micro-batches and ranks; or one row for all samples."""

    def case(_) -> None:
        here = place(in_a_row([2, 3]))
        if here is None:
            return

        def build() -> list[nn.Module]:
            return [Masked(body) for body in mlp(2)]

        alone, module = Alone(build, dtype), build()[here.stage].to(dtype)
        schedule = schedule_on(here, module, 3)
        for rows in SIZES[:3]:
            torch.manual_seed(rows)
            x, y = (torch.randn(rows, 8, 6).to(dtype) for _ in range(2))
            masks = [
                mask_of([6] if whole else [1 + (3 * i + stage) % 8 for i in range(rows)]) for stage in (0, 1)
            ]
            schedule.step(*([x] if here.stage == 0 else []), target=y, mask=masks[here.stage])

            def run(stages: list[nn.Module], cast: Callable) -> torch.Tensor:
                first = stages[0](cast(x), mask=masks[0])  # noqa: B023
                return mse(stages[1](first, mask=masks[1]), cast(y))  # noqa: B023

            alone.check(here, module, run)

    case.__name__ = f"block_masks_{str(dtype).removeprefix('torch.')}{'_whole' * whole}"
    return case


class Rotated(nn.Module):
    """table is the same for all samples, whatever its shape; gain is not."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, *, gain: torch.Tensor, more: Any = None
    ) -> torch.Tensor:
        added = table.sum(0) if more is None else table.sum(0) + more["bias"].sum(0) * more["factor"]
        return self.body(x * gain) + added


def whole_case(rows: int, dtype: torch.dtype):
    """A table of so many rows that a chunk spec declares whole: over micro-batches and ranks, positional, by
    keyword and nested. Specs go by name, whatever their order."""

    def case(_) -> None:
        here = place(in_a_row([2, 3]))
        if here is None:
            return

        def build() -> list[nn.Module]:
            return [Rotated(body) for body in mlp(2)]

        alone, module = Alone(build, dtype), build()[here.stage].to(dtype)
        torch.manual_seed(3)
        table, bias, factor = (
            torch.randn(rows, 6).to(dtype),
            torch.randn(rows, 6).to(dtype),
            torch.tensor(0.5).to(dtype),
        )
        more = {"bias": bias, "factor": factor}
        specs: dict[str, Any] = {"kwargs_chunk_spec": {"more": _Replicate(), "gain": TensorChunkSpec(0)}}
        if here.stage == 0:
            specs["args_chunk_spec"] = (TensorChunkSpec(0), _Replicate)
        else:
            specs["kwargs_chunk_spec"] = {
                "more": {"factor": _Replicate(), "bias": _Replicate()},
                "table": _Replicate(),
                "gain": TensorChunkSpec(0),
            }
        schedule = schedule_on(here, module, 3, **specs)
        for step, samples in enumerate((12, 7, 2)):
            (x, y), (gain, _) = batch(samples, dtype=dtype, seed=step), extras(samples, dtype, step)
            if here.stage == 0:
                schedule.step(x, table, gain=gain, more=more)
            else:
                schedule.step(target=y, gain=gain, table=table, more=more)

            def run(stages: list[nn.Module], cast: Callable) -> torch.Tensor:
                value = cast(x)  # noqa: B023
                named = {"bias": cast(bias), "factor": cast(factor)}
                for each in stages:
                    value = each(value, cast(table), gain=cast(gain), more=named)  # noqa: B023
                return mse(value, cast(y))  # noqa: B023

            alone.check(here, module, run)

    case.__name__ = f"whole_tables_of_{rows}_{str(dtype).removeprefix('torch.')}"
    return case


def samples_in_dimension_1(_) -> None:
    """A chunk spec of another dimension counts for the ranks too."""
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    dtype = torch.float32

    class Sideways(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
            return self.body(x) + shift.t()

    def build() -> list[nn.Module]:
        return [Sideways(body) for body in mlp(2)]

    alone, module = Alone(build, dtype), build()[here.stage].to(dtype)
    schedule = schedule_on(here, module, 2, kwargs_chunk_spec={"shift": TensorChunkSpec(1)})
    for step, rows in enumerate((12, 7)):
        (x, y), (_, shift) = batch(rows, dtype=dtype, seed=step), extras(rows, dtype, step)
        schedule.step(*([x] if here.stage == 0 else []), target=y, shift=shift.t())

        def run(stages: list[nn.Module], cast: Callable) -> torch.Tensor:
            first = stages[0](cast(x), shift=cast(shift).t())  # noqa: B023
            return mse(stages[1](first, shift=cast(shift).t()), cast(y))  # noqa: B023

        alone.check(here, module, run)


# ---- what does not fit -----------------------------------------------------------------------------------


class Takes(nn.Module):
    """Anything, and uses its first argument alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.body(x)


def refused(ranks: Sequence[int], *words: str, call: Callable[[], object]) -> None:
    """On all ranks, by a LayoutError on those that gave what does not fit."""
    raises(LayoutError if dist.get_rank() in ranks else AbortedError, *words, call=call)


def what_does_not_fit_the_batch(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    schedule = schedule_on(here, Takes(module), 2)
    x, y = batch(4)
    first, last = (0, 1), (2, 3, 4)

    def step(*args: Any, target: Any = y, stage: int | None = None, **kwargs: Any) -> None:
        given = (args or (x,)) if here.stage == 0 else ()
        schedule.step(*given, target=target, **(kwargs if here.stage == stage else {}))

    for rows in (2, 3, 5, 8):
        refused(last, "target", f"has {rows} samples", "the batch has 4", "loss_kwargs",
                call=lambda: step(target=batch(rows)[1]))  # noqa: B023  # fmt: skip
    wider = x.unsqueeze(1)
    refused(last, "target has 3 samples", call=lambda: step(wider, target=y[:3]))  # and fixes no shapes
    refused(last, "target['labels'][1]", "(3, 6)", "the batch has 4",
            call=lambda: step(target={"y": y, "labels": [y, y[:3]]}))  # fmt: skip
    refused(first, "argument 1", "(6, 2)", "the batch has 4", "args_chunk_spec", "_Replicate()",
            call=lambda: step(x, torch.ones(6, 2)))  # fmt: skip
    refused(first, "argument 1[0].shift", "(1, 2)", call=lambda: step(x, [Known(x, torch.ones(1, 2))]))
    for stage, ranks in ((0, first), (1, last)):
        for rows in (1, 2, 6):
            refused(ranks, f"stage {stage}", "keyword argument 'table'", f"({rows}, 3)", "the batch has 4",
                    "kwargs_chunk_spec={'table': _Replicate()}",
                    call=lambda: step(stage=stage, table=torch.ones(rows, 3)))  # noqa: B023  # fmt: skip
    refused(
        last, "keyword argument 'mask' has 3 samples", call=lambda: step(stage=1, mask=mask_of([1, 2, 3]))
    )
    # Of objects that pytree does not see into.
    refused(first, "argument 1", ".gain", "Unknown", "register_dataclass", "register_pytree_node",
            call=lambda: step(x, Unknown(x, y)))  # fmt: skip
    refused(last, "keyword argument 'cache'['a']", ".both[0]", "Slots", "register_pytree_node",
            call=lambda: step(stage=1, cache={"a": Slots(x, y)}))  # fmt: skip
    specs = {"kwargs_chunk_spec": {"tabel": _Replicate()}} if here.stage else {}
    other = schedule_on(here, Takes(mlp(2)[here.stage]), 2, **specs)
    named = {"table": y} if here.stage else {}
    refused(last, "kwargs_chunk_spec names 'tabel'", call=lambda: other.step(x, target=y, **named))
    # Whole ones are taken: without samples of the batch, or numbers.
    third = schedule_on(here, Takes(mlp(2)[here.stage]), 2)
    third.step(x, Unknown(torch.ones(3), torch.ones(())), 3, torch.tensor(2.0), target=y)
    mse(reference[1](reference[0](x)), y).backward()
    step(stage=1, scale=torch.tensor(2.0), words=["a", None])
    check_gradients(module, reference[here.stage])


def objects_that_are_declared_whole(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    specs = {"kwargs_chunk_spec": {"cache": _Replicate()}} if here.stage else {
        "args_chunk_spec": (TensorChunkSpec(0), _Replicate())
    }  # fmt: skip
    x, y = batch(4)
    schedule = schedule_on(here, Takes(mlp(2)[here.stage]), 2, **specs)
    if here.stage == 0:
        schedule.step(x, Unknown(x, y))
    else:
        schedule.step(target=y, cache=Slots(x, y))


# ---- batches that differ ---------------------------------------------------------------------------------


def batches_that_differ(_) -> None:
    """One rank of a stage has another batch, target or keyword argument than the others."""
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    schedule = schedule_on(here, Takes(module), 2)
    x, y = batch(6)
    rank = dist.get_rank()

    def off(value: torch.Tensor, odd: int, change: float = 1e-3) -> torch.Tensor:
        other = value.clone()
        other[-1, -1] += change if rank == odd else 0.0
        return other

    both = (LayoutError, AbortedError)
    for _ in range(2):
        raises(both, "ranks 0 and 1 of stage 0", "different arguments", "local_batch=True",
               call=lambda: schedule.step(off(x, 1), target=y))  # fmt: skip
    raises(
        both, "ranks 2 and 4 of stage 1", "different targets", call=lambda: schedule.step(x, target=off(y, 4))
    )
    named = {"m": {"a": off(y, 3)}} if here.stage else {}
    raises(both, "ranks 2 and 3 of stage 1", "different keyword arguments",
           call=lambda: schedule.step(x, target=y, **named))  # fmt: skip
    raises(both, "ranks 0 and 1 of stage 0", call=lambda: schedule.step(x if rank else x[:4], target=y))
    mse(reference[1](reference[0](x)), y).backward()
    schedule.step(x, target=y)
    check_gradients(module, reference[here.stage])
    for _ in range(2):
        schedule.eval(x)
    every = 0
    for _ in range(200):  # one in so many later ones
        try:
            schedule.eval(off(x, 1))
        except both:
            break
        every += 1
    assert 0 < every < 128, f"{every} evaluations of different batches were taken"


def own_samples_case(way: str, sizes: Sequence[int], dtype: torch.dtype):
    """Each rank gives its own samples: by local_batch, or as DTensors, with targets of all kinds."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return

        def build() -> list[nn.Module]:
            return [Modulated(body, "dict") for body in mlp(2)]

        def mean_square(output: Any, target: Any) -> torch.Tensor:
            return (output - target).square().mean()

        alone, module = Alone(build, dtype), build()[here.stage].to(dtype)
        at, ranks = here.mesh.get_local_rank(), here.mesh.size()
        schedule = schedule_on(here, module, 3, loss_fn=mean_square)

        def own(value: torch.Tensor) -> torch.Tensor:
            parts = [*value.chunk(ranks), *[value[:0]] * ranks]
            return parts[at]

        def as_given(value: torch.Tensor) -> torch.Tensor:
            if way == "local":
                return own(value)
            return distribute_tensor(value, here.mesh, [Shard(0)], src_data_rank=None)

        named = {"local_batch": True} if way == "local" else {}
        counts = (
            (12, 6)
            if way == "local" and sizes[1] > 1 and sizes[0] == 3
            else (12, 8)
            if way == "local"
            else (12, 7, 5)
        )
        for step, rows in enumerate(counts):
            (x, y), (gain, shift) = batch(rows, dtype=dtype, seed=step), extras(rows, dtype, 9)
            nested = KINDS["dict"][0]
            if here.stage == 0:
                schedule.step(as_given(x), nested(as_given(gain), as_given(shift)), **named)
            else:
                target = y if way == "DTensor, whole targets" else as_given(y)
                extra = shift if way == "DTensor, whole targets" else as_given(shift)
                output = schedule.step(given=nested(as_given(gain), extra), target=target, **named)
                assert len(output) == len(own(y)) or sizes[0] != sizes[1]

            def run(stages: list[nn.Module], cast: Callable) -> torch.Tensor:
                given = nested(cast(gain), cast(shift))  # noqa: B023
                return mean_square(stages[1](stages[0](cast(x), given), given), cast(y))  # noqa: B023

            alone.check(here, module, run)

    kind = way.replace(", ", "_").replace(" ", "_")
    case.__name__ = f"own_samples_{kind}_{'_'.join(map(str, sizes))}_{str(dtype).removeprefix('torch.')}"
    return case


def own_samples_that_do_not_fit(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    rank = dist.get_rank()
    schedule = schedule_on(here, Takes(mlp(2)[here.stage]), 1)
    both = (LayoutError, AbortedError)
    x, y = batch(6)
    raises(both, "rank 0", "2 samples of its own", "equally many",
           call=lambda: schedule.step(x[: 2 + 2 * rank], target=y, local_batch=True))  # fmt: skip
    raises(both, "stage 1", "3 ranks", "2 ranks", "local_batch",
           call=lambda: schedule.step(x[:3], target=y[:2], local_batch=True))  # fmt: skip
    raises(
        both, "different calls", "local_batch", call=lambda: schedule.step(x, target=y, local_batch=rank == 1)
    )


def a_tensor_dimension_has_the_same_samples(_) -> None:
    """Over it the batches of ranks are compared, also where each gives its own."""
    here = place([[[0, 1], [2, 3]], [[4], [5]]])
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    schedule = schedule_on(here, module, 2)
    x, y = batch(8)
    part = slice(0, 4) if here.mesh.get_coordinate()[0] == 0 else slice(4, 8)
    mine = x[part].clone()
    mine[0, 0] += 1.0 if dist.get_rank() == 3 else 0.0
    raises((LayoutError, AbortedError), "ranks 2 and 3 of stage 0", "different arguments",
           call=lambda: schedule.step(mine, target=y[part], local_batch=True))  # fmt: skip
    schedule.step(x[part], target=y[part], local_batch=True)
    mse(reference[1](reference[0](x)), y).backward()
    check_gradients(module, reference[here.stage])


FLOATS = (torch.float32, torch.bfloat16)
CASES = [
    *[nested_case(kind, torch.float32) for kind in KINDS],
    nested_case("dict", torch.bfloat16),
    nested_case("NamedTuple", torch.float32, pieces=True),
    masks_case(torch.float32),
    masks_case(torch.bfloat16),
    masks_case(torch.float32, whole=True),
    *[whole_case(rows, torch.float32) for rows in (1, 12, 5)],
    whole_case(12, torch.bfloat16),
    samples_in_dimension_1,
    what_does_not_fit_the_batch,
    objects_that_are_declared_whole,
    batches_that_differ,
    *[own_samples_case("local", sizes, torch.float32) for sizes in ((2, 2), (3, 3), (2, 1))],
    own_samples_case("local", (2, 2), torch.bfloat16),
    *[own_samples_case("DTensor", sizes, torch.float32) for sizes in ((2, 2), (2, 3), (3, 1))],
    own_samples_case("DTensor, whole targets", (2, 3), torch.bfloat16),
    own_samples_case("DTensor, whole targets", (3, 3), torch.float32),
    own_samples_that_do_not_fit,
    a_tensor_dimension_has_the_same_samples,
]
