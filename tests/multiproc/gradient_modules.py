"""The modules of drawn stages, their losses, and what one process gets for the whole pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from multiproc.gradient_draws import TOKENS, WIDTH, Draw, Stage
from multiproc.gradient_layouts import Place, leave, take
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 12
WORDS = 7
RATE, EPSILON = 0.01, 1e-3  # of AdamW
IGNORED = -100


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Sequence(Mlp):
    """On its tokens alone: under tensor parallelism sequence parallel (each rank a part of them)."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        placed = tuple("S1" if role == "tensor" else "R" for role in place.roles)
        sizes = zip(place.roles, place.shape, strict=True)
        tensor = Place(
            tuple(role if role == "tensor" else "" for role in place.roles),
            tuple(size if role == "tensor" else 1 for role, size in sizes),
            place.coordinate,
            place.groups,
        )
        self._tensor, self._placed = tensor, placed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = leave(x, "act", self._placed, self._tensor)
        made = self.down(torch.tanh(self.up(self.norm(own))))
        return x + take(made, "act", self._placed, self._tensor, whole=True)


class View(nn.Module):
    """Cannot run without samples: the size of -1 would be ambiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x.reshape(x.shape[0], -1, WIDTH // 2))).view(x.shape)


class Attention(nn.Module):
    """Mixes the tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias: that of the keys would have no gradient but noise.
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(WIDTH), -1) @ v)


class Experts(nn.Module):
    """Each token goes to the one expert that scores best. thrifty: experts without tokens do not run."""

    def __init__(self, thrifty: bool) -> None:
        super().__init__()
        self.thrifty = thrifty
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        gate, chosen = torch.softmax(self.router(tokens), -1).max(-1)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(1)
            if len(at) or not self.thrifty:
                weighed = expert(tokens.index_select(0, at)) * gate.index_select(0, at).unsqueeze(1)
                made = made.index_add(0, at, weighed)
        return x + torch.tanh(made).reshape(x.shape)


class _AddLoss(torch.autograd.Function):
    """The gradient of the loss joins that of the value, whatever scale this has."""

    @staticmethod
    def forward(ctx, value, loss):
        ctx.save_for_backward(loss)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.saved_tensors[0])


class Extras(NamedTuple):
    """gain: for each sample. table: the same for all of them."""

    gain: torch.Tensor
    table: torch.Tensor


class Part(nn.Module):
    """A drawn stage, on the part of its mesh that `place` says."""

    def __init__(self, draw: Draw, number: int, place: Place) -> None:
        super().__init__()
        stage = draw.stages[number]
        self._stage, self._place = stage, place
        self._alone = not place.roles
        self._kinds = [draw.kind(each.source, each.output) for each in stage.inputs]
        self._made = [draw.kind(number, index) for index in range(len(stage.outputs))]
        thrifty = stage.wrapper in ("none", "ddp")  # FSDP2 wants gradients on all ranks or on none
        build = {
            "mlp": Mlp,
            "norm": lambda: nn.LayerNorm(WIDTH),
            "view": View,
            "attention": Attention,
            "moe": lambda: Experts(thrifty),
            "sequence": lambda: Sequence(place),
        }
        self.blocks = nn.ModuleList(build[name]() for name in stage.blocks)
        self.tables = nn.ModuleDict(
            {
                str(index): nn.Embedding(WORDS, WIDTH)
                for index, kind in enumerate(self._kinds)
                if kind == "ids"
            }
        )
        sources = {"param": lambda: nn.Parameter(torch.randn(1, TOKENS, WIDTH))}
        self.own = nn.ParameterDict(
            {str(i): sources["param"]() for i, made in enumerate(stage.outputs) if made.kind == "param"}
        )
        for index, made in enumerate(stage.outputs):
            if made.kind == "buffer":
                self.register_buffer(f"own_{index}", torch.randn(1, TOKENS, WIDTH))
        if draw.tied is not None and number in draw.tied[:2]:
            self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.gate = nn.Linear(WIDTH, 3) if stage.adds else None
        self.added: torch.Tensor | None = None  # the loss that it adds, in one process
        last = number == len(draw.stages) - 1
        self.head = nn.Linear(WIDTH, WORDS) if last and draw.loss == "tokens" else None

    def forward(self, *inputs: torch.Tensor, extras: Any = None) -> Any:
        values = list(inputs)
        if self._stage.in_place:
            values[0] = torch.relu(values[0]) if self._alone else torch.relu_(values[0])
        hidden = self._first(values)
        for index in range(1, len(values)):
            hidden = self._with(hidden, index, values[index])
        if extras is not None:
            hidden = self._modulated(hidden, extras)
        if hasattr(self, "tied"):
            hidden = hidden + 0.5 * hidden @ self.tied
        for block in self.blocks:
            hidden = (
                checkpoint(block, hidden, use_reentrant=False) if self._stage.checkpoint else block(hidden)
            )
        if self.gate is not None:
            scores = torch.logsumexp(self.gate(hidden), -1).square()
            loss = scores.sum() / max(1, scores.numel())
            if self._alone:
                self.added = loss
            else:
                hidden = _AddLoss.apply(hidden, loss)
        if not self._stage.outputs:
            hidden = hidden if self.head is None else self.head(hidden)
            if self._stage.split_loss:
                placed = ["S1" if role == "tensor" else "" for role in self._place.roles]
                hidden = leave(hidden, "logits", placed, self._place)
            return hidden
        made: list[torch.Tensor] = []
        for index in range(len(self._stage.outputs)):
            made.append(self._output(index, hidden, values, made))
        return made[0] if len(made) == 1 else tuple(made)

    def _take(self, index: int, value: torch.Tensor) -> torch.Tensor:
        spec = self._stage.inputs[index]
        return take(value, self._kinds[index], spec.placed, self._place, whole=spec.whole)

    def _modulated(self, hidden: torch.Tensor, extras: Any) -> torch.Tensor:
        gain, table = _plain(extras)
        for dim, role in enumerate(self._place.roles):
            whole = all(each.placed[dim] != "S0" for each in self._stage.inputs)
            if role == "data" and whole and self._place.cuts(dim):  # the stage takes its part by itself
                gain = gain.narrow(0, *self._place.part(gain.shape[0], dim))
        return hidden * gain + table.sum(0)

    def _first(self, values: list[torch.Tensor]) -> torch.Tensor:
        value = self._take(0, values[0])
        return self.tables["0"](value) if self._kinds[0] == "ids" else value

    def _with(self, hidden: torch.Tensor, index: int, given: torch.Tensor) -> torch.Tensor:
        value, kind = self._take(index, given), self._kinds[index]
        if kind == "ids":
            return hidden + self.tables[str(index)](value)
        if kind == "mask":
            return hidden * value.unsqueeze(-1)
        if kind == "stat":
            return hidden * (1 + 0.5 * torch.tanh(value))
        if kind == "act" and self._stage.inputs[index].whole:
            # Each sample against all of the batch, token by token.
            scores = torch.einsum("bsd,csd->sbc", hidden, value) / math.sqrt(WIDTH)
            return hidden + torch.einsum("sbc,csd->bsd", torch.softmax(scores, -1), value)
        return hidden + 0.5 * value

    def _output(
        self, index: int, hidden: torch.Tensor, values: list[torch.Tensor], made: list[torch.Tensor]
    ) -> torch.Tensor:
        spec = self._stage.outputs[index]
        if spec.kind == "same":
            return made[spec.of]
        if spec.kind == "pass":
            return values[spec.of]
        if spec.kind == "param":
            value = self.own[str(index)].sin()
        elif spec.kind == "buffer":
            value = getattr(self, f"own_{index}").cos()
        elif spec.kind == "stat":
            value = hidden.sum((0, 1), keepdim=True) / TOKENS
        else:
            value = hidden if index == 0 else hidden.sin()
        return leave(value, self._made[index], spec.placed, self._place)


def _plain(extras: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(extras, dict):
        return extras["gain"], extras["more"]["table"]
    return extras[0], extras[1][0] if isinstance(extras, list) else extras[1]


def extras_of(
    draw: Draw, step: int, column: int, cast: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
) -> list[Any]:
    """Nested values of each micro-batch; None where there are none."""
    if not draw.extras:
        return [None] * draw.microbatches
    torch.manual_seed(104729 * (draw.seed % 1_000_003) + 31 * step + column + 11)
    dtype = getattr(torch, draw.dtype)
    table = cast(torch.randn(draw.table, WIDTH).div(draw.table).to(dtype))
    gains = [cast((0.5 + torch.rand(samples, 1, 1)).to(dtype)) for samples in draw.sizes_of(step, column)]
    return [nested_extras(draw, gain, table) for gain in gains]


def nested_extras(draw: Draw, gain: Any, table: Any) -> Any:
    """As the draw has them; of chunk specs as well."""
    if draw.extras == "dict":
        return {"gain": gain, "more": {"table": table}}
    return [gain, (table,)] if draw.extras == "list" else Extras(gain, table)


def joined_extras(draw: Draw, pieces: list[Any]) -> Any:
    """Those of the whole batch."""
    both = [_plain(each) for each in pieces]
    return nested_extras(draw, torch.cat([gain for gain, _ in both]), both[0][1])


class Loss:
    """Of a rank's outputs: a mean over its samples, or a sum and a weight."""

    def __init__(self, draw: Draw, place: Place) -> None:
        self._draw, self._place = draw, place

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        # Targets come whole where the stage itself takes its part of whole inputs.
        for dim, role in enumerate(self._place.roles):
            along = 0 if role == "data" else 1
            if target.shape[along] > output.shape[along]:
                target = target.narrow(along, *self._place.part(target.shape[along], dim))
        if self._draw.loss == "tokens":
            summed = nn.functional.cross_entropy(
                output.reshape(-1, WORDS), target.reshape(-1), ignore_index=IGNORED, reduction="sum"
            )
            return summed * 4, (target != IGNORED).sum()
        return nn.functional.mse_loss(output, target) * WIDTH


def weight_of(target: torch.Tensor) -> torch.Tensor:
    """Of a target that comes as this rank's part."""
    return (target != IGNORED).sum()


# ---- one process -----------------------------------------------------------------------------------------


def build(draw: Draw, number: int, place: Place) -> Part:
    """The same parameters on every rank."""
    torch.manual_seed(1000 * (draw.seed % 1_000_003) + number + 1)
    part = Part(draw, number, place)
    if draw.tied is not None and number in draw.tied[:2]:
        torch.manual_seed(draw.seed % 1_000_003 + 17)
        with torch.no_grad():
            part.tied.copy_(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
    return part.to(getattr(torch, draw.dtype))


def data(draw: Draw, step: int, column: int) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """Arguments and targets of each micro-batch."""
    torch.manual_seed(7919 * (draw.seed % 1_000_003) + 31 * step + column + 5)
    dtype = getattr(torch, draw.dtype)
    arguments, targets = [], []
    for samples in draw.sizes_of(step, column):
        given = []
        for kind in draw.batch:
            if kind == "act":
                given.append(torch.randn(samples, TOKENS, WIDTH).to(dtype))
            elif kind == "ids":
                given.append(torch.randint(0, WORDS, (samples, TOKENS)))
            else:
                given.append(torch.rand(samples, TOKENS) < 0.8)
        arguments.append(tuple(given))
        if draw.loss == "tokens":
            labels = torch.randint(0, WORDS, (samples, TOKENS))
            targets.append(torch.where(torch.rand(samples, TOKENS) < 0.4, IGNORED, labels))
        else:
            targets.append(torch.randn(samples, TOKENS, WIDTH).to(dtype))
    return arguments, targets


@dataclass
class Alone:
    """What one process gets, for each step: losses by column, evaluated losses, gradients and parameters
    after the step by stage and name; and the shapes of the values."""

    losses: list[list[list[float]]] = field(default_factory=list)
    evaluated: list[list[float]] = field(default_factory=list)
    gradients: list[dict[tuple[int, str], torch.Tensor]] = field(default_factory=list)
    parameters: list[dict[tuple[int, str], torch.Tensor]] = field(default_factory=list)


def alone(draw: Draw, dtype: torch.dtype) -> Alone:
    parts = [build(draw, number, Place()).to(dtype) for number in range(len(draw.stages))]
    if draw.tied is not None:
        parts[draw.tied[1]].tied = parts[draw.tied[0]].tied
    named = {
        (number, name): parameter
        for number, part in enumerate(parts)
        for name, parameter in part.named_parameters()
    }
    distinct = list({id(each): each for each in named.values()}.values())
    optimizer = torch.optim.AdamW(distinct, lr=RATE, eps=EPSILON, foreach=False)
    columns, loss_fn, found = max(1, draw.columns), Loss(draw, Place()), Alone()
    for step in range(len(draw.sizes)):
        optimizer.zero_grad()
        found.losses.append([])
        counts = [sum(size > 0 for size in draw.sizes_of(step, column)) for column in range(columns)]
        weight = 0.0
        if columns > 1 and draw.loss == "tokens":
            targets = (each for column in range(columns) for each in data(draw, step, column)[1])
            weight = sum(float(weight_of(each)) for each in targets) / columns
        for column in range(columns):
            objective, losses = _objective(
                draw, parts, loss_fn, step, column, dtype, sum(counts) / columns, weight
            )
            (objective / columns).backward()
            found.losses[-1].append(losses)
        found.gradients.append(
            {
                key: torch.zeros_like(each) if each.grad is None else each.grad.clone()
                for key, each in named.items()
            }
        )
        optimizer.step()
        found.parameters.append({key: each.detach().clone() for key, each in named.items()})
        if draw.evaluates:
            with torch.no_grad():
                found.evaluated.append(_objective(draw, parts, loss_fn, step, 0, dtype)[1])
    return found


def evaluated_on(draw: Draw, step: int, parameters: Mapping[tuple[int, str], torch.Tensor]) -> list[float]:
    """The losses of a step's micro-batches in double precision, with the parameters given."""
    parts = [build(draw, number, Place()).to(torch.float64) for number in range(len(draw.stages))]
    with torch.no_grad():
        for number, part in enumerate(parts):
            for name, parameter in part.named_parameters():
                parameter.copy_(parameters[number, name])
        return _objective(draw, parts, Loss(draw, Place()), step, 0, torch.float64)[1]


def _objective(
    draw: Draw,
    parts: list[Part],
    loss_fn: Loss,
    step: int,
    column: int,
    dtype: torch.dtype,
    count: float = 0.0,
    weight_of_step: float = 0.0,
) -> tuple[torch.Tensor, list[float]]:
    """What the gradients of a step are those of, and the loss of each micro-batch. count, weight_of_step: the
    means over the columns of their micro-batches with samples, and of the weights of their steps."""
    arguments, targets = data(draw, step, column)
    sums, weights, added = [], [], []
    sizes = draw.sizes_of(step, column)
    if draw.loss == "sum":
        shares = [1.0] * len(sizes)
    elif alike(draw):
        shares = [(size > 0) / (count or 1.0) for size in sizes]
    else:
        shares = [size / sum(sizes) for size in sizes]
    extras = extras_of(draw, step, column, lambda value: value.to(dtype))
    for given, target, extra, share in zip(arguments, targets, extras, shares, strict=True):
        if not len(target):
            sums.append(torch.zeros((), dtype=dtype))
            weights.append(1.0)
            continue
        cast = [each.to(dtype) if each.is_floating_point() else each for each in given]
        output = run_alone(draw, parts, cast, extra)
        goal = target.to(dtype) if target.is_floating_point() else target
        found = loss_fn(output, goal)
        summed, weight = found if isinstance(found, tuple) else (found, torch.ones(()))
        sums.append(summed)
        weights.append(float(weight))
        added += [part.added * share for part in parts if part.added is not None]
    losses = [
        summed.item() / weight if weight else math.nan for summed, weight in zip(sums, weights, strict=True)
    ]
    extra = sum(added, torch.zeros((), dtype=dtype))
    if draw.loss == "tokens":
        of_step = weight_of_step or max(1.0, sum(w for w, size in zip(weights, sizes, strict=True) if size))
        return torch.stack(sums).sum() / of_step + extra, losses
    return sum((loss * share for loss, share in zip(sums, shares, strict=True)), extra), losses


def alike(draw: Draw) -> bool:
    """Whether every micro-batch counts alike, however many samples it has."""
    return draw.pieces or draw.columns > 0


def run_alone(
    draw: Draw, parts: list[Part], arguments: list[torch.Tensor], extras: Any = None
) -> torch.Tensor:
    made: dict[tuple[int, int], torch.Tensor] = {(-1, index): value for index, value in enumerate(arguments)}
    output: Any = None
    for number, part in enumerate(parts):
        stage: Stage = draw.stages[number]
        output = part(*(made[each.source, each.output] for each in stage.inputs), extras=extras)
        for index, value in enumerate(output if isinstance(output, tuple) else (output,)):
            made[number, index] = value
    return output
