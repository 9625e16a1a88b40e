"""The scale of gradients, against one process over the same samples: what modules add to gradients by
themselves, ranks with different numbers of samples. Four ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import PipelineStage
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import CPU, in_a_row, mlp, place, schedule_for
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH, RANKS = 6, 4
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


class AddLoss(torch.autograd.Function):
    """As Megatron's MoEAuxLossAutoScaler: the backward returns ones for the auxiliary loss."""

    @staticmethod
    def forward(ctx, value, loss):
        ctx.save_for_backward(loss)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class Routed(nn.Module):
    """A block whose gate has a z-loss, the mean over its samples, whose gradient it adds by itself. told: the
    loss is left in `loss` instead, for one process to add to its own."""

    def __init__(self, body: nn.Module, seed: int, *, told: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.gate = body, nn.Linear(WIDTH, 3).to(next(body.parameters()).dtype)
        self.told, self.scale = told, 1.0
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        made = self.body(x) * (1 + torch.softmax(scores, -1).amax(-1, keepdim=True))
        loss = torch.logsumexp(scores, -1).square().mean()  # not a number without samples
        if self.told:
            self.loss = loss
            return made
        return AddLoss.apply(made, loss * self.scale)


def routed(stages: int, dtype: torch.dtype, *, told: bool = False) -> list[Routed]:
    return [Routed(each, 40 + i, told=told) for i, each in enumerate(mlp(stages, WIDTH, dtype))]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def pair_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only rows whose first target is positive count."""
    counts = target[:, 0] > 0
    return (output - target).square().mean(-1).mul(counts).sum(), counts.sum()


def pair_weight(target: torch.Tensor) -> torch.Tensor:
    return (target[:, 0] > 0).sum()


def samples(rows: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(rows, WIDTH).to(dtype), torch.randn(rows, WIDTH).to(dtype)
    return x, y


def alone(
    modules: Sequence[nn.Module],
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
    shares: Sequence[float],
    loss_fn: Loss,
) -> None:
    """Gradients of one process: of the sum of shares times mean losses; pairs: of all sums over all weights,
    and of the shares of what the modules add."""
    sums, weights, added = [], [], []
    for (x, y), share in zip(pieces, shares, strict=True):
        output = x
        for module in modules:
            output = module(output)
        found = loss_fn(output, y)
        pair = isinstance(found, tuple)
        sums.append(found[0] if pair else found * share)
        weights.append(float(found[1]) if pair else 0.0)
        added += [module.loss * share for module in modules if isinstance(module, Routed)]
    total = torch.stack(sums).sum() / (sum(weights) if any(weights) else 1.0)
    (total + sum(added)).backward()


def cut(x: torch.Tensor, y: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    each = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    return [(a, b) for a, b in each if len(a)]


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(module: nn.Module, reference: nn.Module, rough: nn.Module, factor: float = 1.0) -> None:
    """rough: one process in the type of the module."""
    for (name, mine), exact, near in zip(
        module.named_parameters(), reference.parameters(), rough.parameters(), strict=True
    ):
        assert mine.grad is not None, f"{name} has no gradient"
        error = (whole(mine.grad).double() / factor - exact.grad).norm() / exact.grad.norm()
        allowed = 4 * (near.grad.double() - exact.grad).norm() / exact.grad.norm()
        allowed = allowed + {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.02}[near.dtype]
        ratio = (whole(mine.grad).double() / factor * exact.grad).sum() / exact.grad.square().sum()
        assert error <= allowed, f"{name}: {error:.2e} away, allowed {allowed:.1e}; {ratio:.4f} times"


def same_bits(module: nn.Module, group: Any) -> None:
    """All ranks of the group have the same parameters, or the same shards of them."""
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        value = (value.to_local() if isinstance(value, DTensor) else value).contiguous()
        every = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, value, group=group)
        assert all(torch.equal(each, value) for each in every), f"{name} differs"


# ---- gradients that modules add --------------------------------------------------------------------------


def added_case(
    name: str,
    sizes: Sequence[int],
    rows: Sequence[int] = (12,),
    microbatches: int = 3,
    dtype: torch.dtype = torch.float64,
    wrapper: str = "",
    loss_fn: Loss = mean_loss,
    pieces: bool = False,
    scaler: bool = False,
    **options: Any,
):
    """Each of `rows` is a step. Without sizes: as torch, one rank a stage and no mesh."""

    def case(_) -> None:
        here = place(in_a_row(sizes or [1, 1]))
        if here is None:
            return
        count = len(here_sizes := sizes or [1, 1])
        numbers = [here.stage]
        if name == "ZBV":
            count, numbers = 2 * len(here_sizes), [here.stage, 2 * len(here_sizes) - 1 - here.stage]
        parts = [routed(count, dtype)[number] for number in numbers]
        modules: list[nn.Module] = list(parts)
        if wrapper == "fsdp":
            modules = [fully_shard(each, mesh=here.mesh) for each in parts]
        elif wrapper == "nested":
            for each in parts:
                fully_shard(each.gate, mesh=here.mesh)
            modules = [fully_shard(each, mesh=here.mesh) for each in parts]
        elif wrapper == "ddp":
            modules = [DistributedDataParallel(each, process_group=here.mesh.get_group()) for each in parts]
        mesh = {"mesh": here.mesh} if sizes else {}
        stages = [
            PipelineStage(module, number, count, CPU, group=here.group, **mesh)
            for module, number in zip(modules, numbers, strict=True)
        ]
        scaling = 64.0 if scaler else 1.0
        for each in parts:
            each.scale = scaling  # as Megatron's set_loss_scale

        def scaled(output: torch.Tensor, target: torch.Tensor) -> Any:
            found = loss_fn(output, target)
            return (found[0] * scaling, found[1]) if isinstance(found, tuple) else found * scaling

        schedule = schedule_for(
            name,
            stages if len(stages) > 1 else stages[0],
            microbatches,
            scaled,
            varying_shapes=pieces,
            **options,
        )
        for step, total in enumerate(rows):
            again = loss_fn is pair_loss and "weight_fn" not in options
            x, y = samples(total, dtype, seed=0 if again else step)
            given = cut(x, y, microbatches)
            alike = pieces or not sizes
            share = [1 / len(given) if alike else len(a) / total for a, _ in given]
            if options.get("scale_grads") is False:
                share = [1.0] * len(given)
            exact, rough = routed(count, torch.float64, told=True), routed(count, dtype, told=True)
            for each, source in zip(exact, rough, strict=True):
                each.load_state_dict(source.state_dict())
            alone(exact, [(a.double(), b.double()) for a, b in given], share, loss_fn)
            alone(rough, given, share, loss_fn)
            for module in modules:
                module.zero_grad()
            if pieces:
                schedule.step(arg_mbs=[(a,) for a, _ in given], target_mbs=[b for _, b in given])
            else:
                schedule.step(x, target=y)
            if loss_fn is pair_loss and step == 0 and "weight_fn" not in options:
                continue  # only now the weight of a micro-batch is known
            for module, number in zip(modules, numbers, strict=True):
                inner = module.module if wrapper == "ddp" else module
                check(inner, exact[number], rough[number], scaling)

    label = "_".join(map(str, sizes)) or "torch"
    more = [str(dtype).removeprefix("torch."), wrapper, *options, "scaler" if scaler else ""]
    more += [loss_fn.__name__ if loss_fn is not mean_loss else "", "pieces" if pieces else ""]
    counts = "_".join(map(str, rows))
    case.__name__ = f"added_{name}_{label}_of_{counts}_in_{microbatches}_{'_'.join(filter(None, more))}"
    return case


F32, BF16 = torch.float32, torch.bfloat16
ADDED = [
    added_case("1F1B", ()),
    added_case("1F1B", (), dtype=F32, rows=(7,)),
    added_case("1F1B", (), rows=(2,), microbatches=4),
    *[added_case("1F1B", sizes) for sizes in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (1, 2, 1))],
    *[added_case("1F1B", sizes, rows=(7, 11)) for sizes in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3))],
    *[added_case("1F1B", (2, 2), rows=(7,), dtype=dtype) for dtype in (F32, BF16)],
    added_case("1F1B", (3, 1), dtype=BF16),
    *[added_case("1F1B", sizes, rows=(2, 7, 1), microbatches=4) for sizes in ((3, 1), (1, 3), (2, 2))],
    *[added_case(name, (2, 2), rows=(7,)) for name in ("GPipe", "ZBH1", "ZBH2", "ZBV")],
    added_case("Eager1F1B", (1, 2), rows=(7,), delay_weight_grad=True),
    added_case("ZBH1", ()),
    *[
        added_case("1F1B", sizes, rows=rows, wrapper=wrapper, dtype=F32)
        for wrapper in ("fsdp", "nested", "ddp")
        for sizes, rows in (((2, 2), (12,)), ((3, 1), (12, 7)), ((2, 2), (7,)))
    ],
    added_case("1F1B", (3, 1), rows=(4,), microbatches=2, wrapper="fsdp", dtype=F32),
    added_case("1F1B", (2, 2), rows=(7,), scale_grads=False),
    added_case("1F1B", (2, 2), rows=(7,), pieces=True),
    *[added_case("1F1B", sizes, rows=(7, 7), loss_fn=pair_loss) for sizes in ((), (1, 1), (2, 2), (3, 1))],
    added_case("ZBH1", (2, 1), rows=(7, 7), loss_fn=pair_loss),
    *[
        added_case("1F1B", sizes, rows=(7, 11), loss_fn=pair_loss, weight_fn=pair_weight)
        for sizes in ((), (1, 1), (2, 2), (1, 3))
    ],
    added_case("ZBV", (2, 2), rows=(7, 11), loss_fn=pair_loss, weight_fn=pair_weight),
    added_case(
        "1F1B", (2, 2), rows=(7, 5), loss_fn=pair_loss, weight_fn=pair_weight, wrapper="fsdp", dtype=F32
    ),
    added_case("1F1B", (2, 2), rows=(7, 5), loss_fn=pair_loss, weight_fn=pair_weight, scaler=True),
    added_case("1F1B", (2, 1), rows=(7, 5), scaler=True),
]


class Total(torch.autograd.Function):
    """The sum over the ranks, of whose gradient each has a part. late: only the gradient is summed."""

    @staticmethod
    def forward(ctx, value, group, late):
        ctx.group = group
        return value.clone() if late else _all_reduced(value, group)

    @staticmethod
    def backward(ctx, gradient):
        return _all_reduced(gradient, ctx.group), None, None


def _all_reduced(value: torch.Tensor, group: Any) -> torch.Tensor:
    made = value.clone()
    dist.all_reduce(made, group=group)
    return made


class Centred(nn.Module):
    """Against the sum over all rows of the micro-batch, also those of other ranks; then as `Routed`."""

    def __init__(self, body: Routed, group: Any, *, late: bool = False) -> None:
        super().__init__()
        self.body, self.group, self.late = body, group, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum(0, keepdim=True)
        if self.group is not None:
            total = Total.apply(total, self.group, self.late)
        return self.body(x - total / 5)


def exchanging_case(rows: int):
    """Ranks with different numbers of samples that exchange values: the loss's gradients are those of one
    process, and what is added counts the same on each rank."""

    def case(_) -> None:
        here = place(in_a_row([1, 3]))
        bodies, plain = routed(2, torch.float64), routed(2, torch.float64, told=True)
        reference = [plain[0], Centred(plain[1], None)]
        x, y = samples(rows, torch.float64)
        for a, b in cut(x, y, 2):
            share = len(a) / rows
            hidden = plain[0](a)
            total = mean_loss(reference[1](hidden), b) * share + plain[0].loss * share
            centred = hidden - hidden.sum(0, keepdim=True) / 5
            for part in centred.chunk(3):
                plain[1](part)
                total = total + plain[1].loss * share / 3
            total.backward()
        module = Centred(bodies[1], here.mesh.get_group()) if here.stage else bodies[0]
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for("1F1B", stage, 2)
        for _step in range(2):
            module.zero_grad()
            schedule.step(x, target=y)
            check(module, reference[here.stage], reference[here.stage])

    case.__name__ = f"exchanging_{rows}"
    return case


def an_exchange_in_the_backward_alone_is_refused(_) -> None:
    """With other numbers of samples on each rank; not with as many."""
    for rows in (9, 7):
        here = place(in_a_row([1, 3]))
        bodies = routed(2, torch.float64)
        module = Centred(bodies[1], here.mesh.get_group(), late=True) if here.stage else bodies[0]
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for("1F1B", stage, 1)
        x, y = samples(rows, torch.float64)
        if rows == 9:
            schedule.step(x, target=y)
        else:
            errors = (LayoutError, AbortedError)
            call = partial(schedule.step, x, target=y)
            raises(errors, "in its backward", call=call)


class Weighed(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_loss(output * self.factor, target)


def others_case(name: str, sizes: Sequence[int], **options: Any):
    """Gradients of what is no parameter of a stage: arguments, parameters of the loss. Those of all ranks add
    up to those of one process."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, module, loss_fn, expected = mlp(2), mlp(2)[here.stage], Weighed(), Weighed()
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for(name, stage, 3, loss_fn, **options)
        for rows in (7, 12, 2):
            x, y = samples(rows, torch.float64, seed=rows)
            x.requires_grad_()
            mine = x.detach().clone().requires_grad_()
            for each in (*reference, module, loss_fn, expected):
                each.zero_grad()
            expected(nn.Sequential(*reference)(x), y).backward()
            schedule.step(mine, target=y)
            check(module, reference[here.stage], reference[here.stage])
            found, exact = (loss_fn.factor, expected.factor) if here.stage else (mine, x)
            total = torch.zeros_like(exact) if found.grad is None else found.grad.clone()
            dist.all_reduce(total, group=here.mesh.get_group())
            assert (total - exact.grad).abs().max() <= 1e-12

    case.__name__ = f"others_{name}_{'_'.join(map(str, sizes))}{'_'.join(['', *options])}"
    return case


# ---- micro-batches of other sizes ------------------------------------------------------------------------


def mixed_case(first_mesh: bool, **options: Any):
    """One of two stages has a mesh, the other none: micro-batches count by their samples on both."""

    def case(_) -> None:
        here = place(in_a_row([1, 1]))
        if here is None:
            return
        reference, module = mlp(2), mlp(2)[here.stage]
        mesh = {"mesh": here.mesh} if (here.stage == 0) == first_mesh else {}
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, **mesh)
        schedule = schedule_for("1F1B", stage, 4, nn.functional.huber_loss, **options)
        for rows in (8, 7, 5):
            x, y = samples(rows, torch.float64, seed=rows)
            for each in (*reference, module):
                each.zero_grad()
            nn.functional.huber_loss(nn.Sequential(*reference)(x), y).backward()
            schedule.step(x, target=y)
            check(module, reference[here.stage], reference[here.stage])

    case.__name__ = f"mixed_{'first' if first_mesh else 'last'}_has_a_mesh{'_'.join(['', *options])}"
    return case


def sum_case(sizes: Sequence[int]):
    """scale_grads=False: each micro-batch's mean loss counts once, whatever its size."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, module = mlp(2), mlp(2)[here.stage]
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for("1F1B", stage, 3, scale_grads=False)
        for rows in (6, 8, 2):
            x, y = samples(rows, torch.float64, seed=rows)
            for each in (*reference, module):
                each.zero_grad()
            for a, b in cut(x, y, 3):
                mean_loss(nn.Sequential(*reference)(a), b).backward()
            schedule.step(x, target=y)
            check(module, reference[here.stage], reference[here.stage])

    case.__name__ = f"sums_of_micro_batches_{'_'.join(map(str, sizes))}"
    return case


def warned_and_refused(_) -> None:
    """Pairs without weight_fn warn of what they do to added gradients; a wrong weight_fn is refused."""
    here = place(in_a_row([2, 2]))
    module = routed(2, torch.float64)[here.stage]
    x, y = samples(12, torch.float64)
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 2, pair_loss)
    for step in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule.step(x, target=y)
        found = [str(each.message) for each in caught if "AddLoss" in str(each.message)]
        assert len(found) == (step == 0) and all("weight_fn=" in each for each in found), found
    for loss_fn, text in ((pair_loss, "weight_fn gave"), (mean_loss, "returns no pairs")):
        here = place(in_a_row([2, 2]))  # the failure ends the group
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        wrong = schedule_for("1F1B", stage, 2, loss_fn, weight_fn=len)
        raises(LayoutError, text, call=lambda wrong=wrong: wrong.step(x, target=y))


CASES = [
    *ADDED,
    *[others_case(name, sizes) for name, sizes in (("1F1B", (2, 2)), ("ZBH1", (1, 3)), ("GPipe", (1, 1)))],
    *[exchanging_case(rows) for rows in (12, 10, 14)],
    an_exchange_in_the_backward_alone_is_refused,
    mixed_case(True),
    mixed_case(False),
    mixed_case(True, varying_shapes=True),
    *[sum_case(sizes) for sizes in ((1, 1), (2, 2), (3, 1))],
    warned_and_refused,
]
