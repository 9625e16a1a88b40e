"""Draws pipelines at random: what `draw` makes of a seed is the same in every process. `corners` are some
that matter most, by name."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from multiproc.gradient_draws import DOUBLE, MOST_RANKS, TOKENS, Draw, Input, Output, Stage, split_sizes
from multiproc.gradient_shrink import without_output


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    while True:
        made = _torchs_way(rng, seed) if rng.random() < 0.08 else _drawn(rng, seed)
        if made.ranks <= MOST_RANKS:
            made = _with_more(random.Random(f"more {seed}"), made)
            return _with_extras(random.Random(f"extras {seed}"), made)


def _with_more(rng: random.Random, made: Draw) -> Draw:
    """What does not change the rest: gradients that modules add, hooks, columns of other sizes."""
    made = replace(made, hooks=_often(rng, 0.2))
    if made.columns > 1 and _often(rng, 0.7):
        # Cut from a batch, of which there may be fewer samples than micro-batches.
        count, steps = made.microbatches, rng.choice([1, 2])
        sizes = tuple(
            tuple(split_sizes(rng.randint(1, 3 * count), count) for _ in range(steps))
            for _ in range(made.columns)
        )
        stages = tuple(replace(each, examples=False) for each in made.stages)
        loss = rng.choice(["mean", "mean", "tokens"])
        made = replace(made, stages=stages, sizes=sizes[0], more_sizes=sizes[1:], loss=loss)
    if _often(rng, 0.4):
        added = tuple(
            replace(stage, adds=_often(rng, 0.6) and _can_add(made, number))
            for number, stage in enumerate(made.stages)
        )
        last = made.stages[-1]
        shown = all(
            placed == {"data": "S0", "seq": "S1"}.get(role, placed)
            for placed, role in zip(last.inputs[0].placed, last.roles, strict=True)
        )
        if made.loss != "tokens" or (shown and not last.split_loss):  # weight_fn sees targets alone
            made = replace(made, stages=added)
    return made


def _can_add(made: Draw, number: int) -> bool:
    """Whether what a stage adds counts by the samples and tokens of its ranks: these show in its first input,
    and its ranks exchange nothing, or have equal parts."""
    stage = made.stages[number]
    split = [dim for dim, role in enumerate(stage.roles) if role == "data" and made.shape(number)[dim] > 1]
    parts = math.prod(made.shape(number)[dim] for dim in split)
    if all(size % parts == 0 for step in made.sizes for size in step):
        return not stage.compiled
    joins = any(
        each.kind in ("hidden", "stat") and placed == "R"
        for each in stage.outputs
        for placed, role in zip(each.placed, stage.roles, strict=True)
        if role != "tensor"
    )
    shows = all(stage.inputs[0].placed[dim] == "S0" for dim in split)
    return shows and not joins and not stage.compiled


def _with_extras(rng: random.Random, drawn: Draw) -> Draw:
    """Nested keyword arguments for every stage: cut by samples, and whole."""
    if not _often(rng, 0.3):
        return drawn
    rows = rng.choice([1, TOKENS, sum(drawn.sizes[0]), drawn.sizes[0][0], rng.randint(2, 9)])
    return replace(drawn, extras=rng.choice(["dict", "list", "NamedTuple"]), table=rows)


def _often(rng: random.Random, chance: float) -> bool:
    return rng.random() < chance


def _schedule(rng: random.Random) -> tuple[str, bool, int]:
    """Name, delayed, rows."""
    name = rng.choice(
        ["GPipe", "GPipe", "1F1B", "1F1B", "Eager1F1B", "Eager1F1B", "ZBH1", "ZBH1", "ZBH2", *DOUBLE]
    )
    delayed = name in ("GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B") and _often(rng, 0.3)
    return name, delayed, rng.choice([1, 2, 2]) if name in DOUBLE else rng.choice([1, 2, 2, 2, 3, 3, 4])


def _drawn(rng: random.Random, seed: int) -> Draw:
    schedule, delayed, rows = _schedule(rng)
    count = 2 * rows if schedule in DOUBLE else rows
    dtype = "bfloat16" if _often(rng, 0.1) else "float32"
    meshes = tuple(_mesh(rng) for _ in range(rows))
    loss = rng.choice(["mean", "mean", "mean", "tokens", "tokens", "sum"])
    skeleton = Draw(seed, (), meshes, (Stage((), ()),) * count, ((1,),), schedule, loss=loss)
    roles = [_roles(rng, skeleton.shape(stage)) for stage in range(count)]
    batch = rng.choice([("act",), ("act",), ("ids",), ("act", "ids"), ("ids", "mask"), ("act", "mask")])
    microbatches = rng.choice([1, 2, 2, 3, 4, 5, 6])
    equal = loss == "sum" or microbatches == 1 or _often(rng, 0.45)
    tied = _tied(rng, skeleton, roles)
    stages: list[Stage] = []
    for number in range(count):
        so_far = replace(skeleton, batch=batch, stages=(*stages, *skeleton.stages[number:]))
        made = _stage(rng, so_far, number, roles[number], equal, dtype, tied is not None and number in tied)
        stages.append(made)
    pruned = _pruned(rng, Draw(seed, batch, meshes, tuple(stages), ((1,),), schedule))
    sizes, pieces = _sizes(rng, pruned, microbatches, equal)
    return Draw(
        seed,
        batch,
        meshes,
        pruned.stages,
        sizes,
        schedule,
        delayed,
        loss,
        dtype,
        pieces,
        tied=tied,
        evaluates=_often(rng, 0.15),
        backwards=_often(rng, 0.15),
    )


def _torchs_way(rng: random.Random, seed: int) -> Draw:
    """A group for each pipeline, no meshes; wrappers join the columns."""
    schedule, delayed, rows = _schedule(rng)
    rows = max(2, min(rows, 3))
    count = 2 * rows if schedule in DOUBLE else rows
    columns = rng.choice([1, 2, 2, 3])
    wrapper = "none" if columns == 1 else rng.choice(["ddp", "fsdp", "nested"])
    inputs = [(Input(number - 1, 0, ("S0",)),) for number in range(count)]
    stages = tuple(
        Stage(
            ("data",),
            inputs[number],
            () if number == count - 1 else (Output("hidden", ("S0",)),),
            tuple(rng.choice(["mlp", "norm", "attention"]) for _ in range(rng.randint(1, 2))),
            wrapper,
            examples=wrapper in ("fsdp", "nested"),
        )
        for number in range(count)
    )
    microbatches = rng.randint(1, 4)
    if wrapper in ("none", "ddp") and _often(rng, 0.5):
        total = rng.randint(microbatches, 3 * microbatches)
        sizes = split_sizes(total, microbatches)
    else:
        sizes = (rng.randint(1, 3),) * microbatches
    return Draw(seed, ("act",), ((1,),) * rows, stages, (sizes,), schedule, delayed, columns=columns)


def _mesh(rng: random.Random) -> tuple[int, ...]:
    if _often(rng, 0.5):
        return (rng.choice([1, 1, 2, 2, 3]),)
    return rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 2, 3])


def _roles(rng: random.Random, shape: Sequence[int]) -> tuple[str, ...]:
    if len(shape) == 1:
        return (rng.choice(["data", "data", "data", "tensor", "seq"]),)
    pairs = [("data", "tensor")] * 5 + [("data", "seq"), ("data", "data"), ("tensor", "data")]
    return rng.choice(pairs)


def _tied(rng: random.Random, drawn: Draw, roles: Sequence[tuple[str, ...]]) -> tuple[int, int, str] | None:
    count = len(roles)
    if count < 2 or not _often(rng, 0.4 if drawn.schedule in DOUBLE else 0.2):
        return None
    row = rng.choice(drawn.rows)
    if drawn.schedule in DOUBLE and roles[row[0]] == roles[row[1]]:
        return row[0], row[1], "object"
    first = rng.randrange(count - 1)
    return first, rng.randrange(first + 1, count), "key"


def _stage(
    rng: random.Random,
    drawn: Draw,
    number: int,
    roles: tuple[str, ...],
    equal: bool,
    dtype: str,
    tied: bool,
) -> Stage:
    last = number == len(drawn.stages) - 1
    inputs = _inputs(rng, drawn, number, roles)
    degree = math.prod(drawn.shape(number))
    tp = "tensor" in roles and _often(rng, 0.5)
    wrapper = _wrapper(rng, roles, tp, tied)
    sharded = wrapper in ("fsdp", "nested", "hsdp")
    blocks = ["mlp", "mlp", "mlp", "norm", "view", *(["sequence"] if tp else [])]
    blocks += [] if "seq" in roles else ["attention", "attention"]
    blocks += ["moe"] if equal and dtype == "float32" else []
    chosen = tuple(rng.choice(blocks) for _ in range(rng.choice([1, 1, 2, 2, 3])))
    outputs = () if last else _outputs(rng, roles, inputs, equal and degree > 1)
    joined = [made.placed for made in outputs if made.kind in ("hidden", "stat")]
    joined += [each.placed for each in inputs if not each.whole]
    whole = any(("R", "data") in zip(placed, roles, strict=True) for placed in joined)
    if whole or (sharded and "moe" in chosen):
        # The module itself joins or cuts the samples of its ranks: one without samples takes part as is. Or
        # nobody can find out whether it runs without (docs/limitations.md).
        chosen = tuple("mlp" if block == "view" else block for block in chosen)
    in_place = (
        number > 0
        and not sharded  # FSDP2 itself allows no change of its inputs
        and _often(rng, 0.12)
        and not any(made.kind == "pass" and made.of == 0 for made in outputs)
        and len({(each.source, each.output) for each in inputs}) == len(inputs)
    )
    simple = tuple("S0" if role == "data" else "R" for role in roles)
    plain = wrapper == "none" and not tp and all(each.placed == simple for each in inputs) and not outputs[1:]
    return Stage(
        roles,
        inputs,
        outputs,
        chosen,
        wrapper,
        tp,
        checkpoint=_often(rng, 0.15),
        compiled=plain and degree <= 2 and "moe" not in chosen and not in_place and _often(rng, 0.04),
        in_place=in_place,
        examples="moe" in chosen or (equal and sharded),
        explicit=_often(rng, 0.95 if _is_cut(roles, inputs) else 0.15),
        split_loss=last and can_split_loss(roles, inputs) and _often(rng, 0.3),
    )


def can_split_loss(roles: Sequence[str], inputs: Sequence[Input]) -> bool:
    """Over a tensor dimension, the loss of each rank that of its own tokens."""
    return "tensor" in roles and not any(
        (placed, role) == ("S2", "tensor")
        for each in inputs
        for placed, role in zip(each.placed, roles, strict=True)
    )


def _is_cut(roles: Sequence[str], inputs: Sequence[Input]) -> bool:
    """Whether an input is cut over a tensor dimension: as it is under context parallelism, so that the stage
    must be told."""
    return any(
        role == "tensor" and placed != "R"
        for each in inputs
        for placed, role in zip(each.placed, roles, strict=True)
    )


def _wrapper(rng: random.Random, roles: tuple[str, ...], tp: bool, tied: bool) -> str:
    if all(role == "tensor" for role in roles) or _often(rng, 0.5):
        return "none"
    if tied:
        return "none" if tp else "ddp"
    offered = ["fsdp", "fsdp", "nested", "nested", *([] if tp else ["ddp", "ddp"])]
    if len(roles) == 2 and "tensor" not in roles:
        offered += ["hsdp", "hsdp", "hsdp"]
    return rng.choice(offered)


def _inputs(rng: random.Random, drawn: Draw, number: int, roles: tuple[str, ...]) -> tuple[Input, ...]:
    if number == 0:
        chosen = [(-1, index) for index in range(len(drawn.batch))]
    else:
        chosen = [(number - 1, 0)]
        known = [
            (stage, index) for stage in range(number) for index in range(len(drawn.stages[stage].outputs))
        ]
        new = [each for each in known if each[0] == number - 1 and each[1] > 0]
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            chosen.append(rng.choice(new if new and _often(rng, 0.6) else known))
    found = [_input(rng, drawn, roles, *each) for each in chosen]
    found[0] = replace(found[0], whole=False)  # what the stage begins with are its own samples
    if number == len(drawn.stages) - 1 and drawn.loss != "tokens":
        # A mean counts by the samples that it is of, which show in how the input is split.
        placed = zip(found[0].placed, roles, drawn.shape(number), strict=True)
        found[0] = replace(
            found[0],
            placed=tuple("S0" if role == "data" and size > 1 else each for each, role, size in placed),
        )
    return tuple(found)


def _input(rng: random.Random, drawn: Draw, roles: tuple[str, ...], source: int, output: int) -> Input:
    kind = drawn.kind(source, output)
    batched = kind in ("act", "ids", "mask")
    whole = kind == "act" and source >= 0 and _often(rng, 0.15)
    everywhere = whole or not batched or _often(rng, 0.12)
    offered = {
        "data": ["R" if everywhere else "S0"],
        "seq": ["R"] if kind == "stat" else ["S1", "S1", "R"],
        "tensor": {"act": ["R", "R", "R", "S1", "S2"], "bias": ["R", "R", "S1", "S2"]}.get(
            kind, ["R", "R", "S2" if kind == "stat" else "S1"]
        ),
    }
    return Input(source, output, tuple(rng.choice(offered[role]) for role in roles), whole)


def _outputs(
    rng: random.Random,
    roles: tuple[str, ...],
    inputs: Sequence[Input],
    gathers: bool,
) -> tuple[Output, ...]:
    made = [_output(rng, "hidden", roles, gathers)]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        kind = rng.choice(["param", "param", "stat", "stat", "same", "pass", "buffer", "hidden"])
        if kind == "same":
            made.append(Output("same", made[0].placed, 0))
        elif kind == "pass":
            of = rng.randrange(len(inputs))
            made.append(Output("pass", inputs[of].placed, of))
        else:
            made.append(_output(rng, kind, roles, gathers))
    return tuple(made)


def _output(rng: random.Random, kind: str, roles: tuple[str, ...], gathers: bool) -> Output:
    whole = gathers and _often(rng, 0.12)
    statistic = rng.choice("PPR")
    offered = {
        "data": {"hidden": ["R" if whole else "S0"], "stat": [statistic]}.get(kind, ["R"]),
        "seq": {"hidden": ["S1", "S1", "R"], "stat": [statistic]}.get(kind, ["R", "S1"]),
        "tensor": {"stat": ["R", "R", "S2", "P"]}.get(kind, ["R", "R", "R", "S1", "S2", "P"]),
    }
    return Output(kind, tuple(rng.choice(offered[role]) for role in roles))


def _pruned(rng: random.Random, drawn: Draw) -> Draw:
    """Without most of the outputs that nobody uses."""
    for stage in range(len(drawn.stages) - 1):
        for output in reversed(range(1, len(drawn.stages[stage].outputs))):
            used = any(
                (each.source, each.output) == (stage, output) for made in drawn.stages for each in made.inputs
            )
            if not used and _often(rng, 0.8):
                drawn = without_output(drawn, stage, output)
    return drawn


def _sizes(
    rng: random.Random, drawn: Draw, microbatches: int, equal: bool
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """And whether the batch comes in micro-batches."""
    pieces = _often(rng, 0.2)
    fixed = any(stage.examples for stage in drawn.stages)
    divisor = drawn.divisor()
    steps = 2 if _often(rng, 0.25) else 1
    made = []
    for _ in range(steps):
        if equal:
            made.append((divisor * rng.choice([1, 1, 2, 3, 4] if divisor == 1 else [1, 2]),) * microbatches)
        elif pieces:
            made.append(tuple(rng.randint(1, 5) for _ in range(microbatches)))
        else:
            made.append(split_sizes(rng.randint(microbatches, 4 * microbatches), microbatches))
    if fixed:
        made = made[:1] * steps
    return tuple(made), pieces


# ---- named draws -----------------------------------------------------------------------------------------


def _chain(*stages: Stage, meshes: Sequence[tuple[int, ...]], **options: object) -> Draw:
    return Draw(-1, options.pop("batch", ("act",)), tuple(meshes), stages, options.pop("sizes"), **options)  # type: ignore[arg-type]


def corners() -> dict[str, Draw]:
    """What fifteen random draws might miss."""
    act, rows = Input(-1, 0, ("S0",)), (Output("hidden", ("S0",)),)
    first = Stage(("data",), (act,), rows)
    after = Input(0, 0, ("S0",))
    return {
        "plain chain": _chain(first, Stage(("data",), (after,)), meshes=[(2,), (3,)], sizes=((6, 6),)),
        "replicated input on the data dimension": _chain(
            first,
            Stage(("data",), (after, Input(0, 0, ("R",), whole=True))),
            meshes=[(1,), (3,)],
            sizes=((6, 6),),
        ),
        "parameters as a replicated output under ZBH1": _chain(
            Stage(("data",), (act,), (*rows, Output("param", ("R",)))),
            Stage(("data",), (after, Input(0, 1, ("R",)))),
            meshes=[(2,), (1,)],
            sizes=((4, 4, 4),),
            schedule="ZBH1",
        ),
        "nested FSDP2": _chain(
            Stage(("data",), (act,), rows, ("mlp", "norm", "mlp"), "nested", examples=True),
            Stage(("data",), (after,), (), ("attention", "mlp"), "nested", examples=True),
            meshes=[(2,), (3,)],
            sizes=((6, 6, 6),),
        ),
        "token weights, uneven micro-batches, an empty rank": _chain(
            first,
            Stage(("data",), (after,)),
            meshes=[(2,), (3,)],
            sizes=(split_sizes(7, 3),),
            loss="tokens",
        ),
        "nested and whole arguments": _chain(
            first,
            Stage(("data",), (after,)),
            meshes=[(2,), (3,)],
            sizes=(split_sizes(7, 3),),
            extras="dict",
            table=7,
        ),
        "loss of a context-parallel stage": _chain(
            first,
            Stage(("data", "seq"), (Input(0, 0, ("S0", "S1")),)),
            meshes=[(1,), (2, 2)],
            sizes=((4, 4),),
        ),
    }
