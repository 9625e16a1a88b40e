"""Simpler draws than one that failed, and the search for the simplest that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from multiproc.gradient_draws import DOUBLE, MOST_RANKS, Draw, Input, Output, Stage

__all__ = ["shrink", "simpler", "without_output"]


def with_stage(draw: Draw, number: int, stage: Stage) -> Draw:
    return replace(draw, stages=(*draw.stages[:number], stage, *draw.stages[number + 1 :]))


def without_input(draw: Draw, number: int, index: int) -> Draw:
    """With what passes it on gone as well."""
    for output in reversed(range(len(draw.stages[number].outputs))):
        made = draw.stages[number].outputs[output]
        if made.kind == "pass" and made.of == index:
            draw = without_output(draw, number, output)
    stage = draw.stages[number]
    outputs = tuple(
        replace(made, of=made.of - 1) if made.kind == "pass" and made.of > index else made
        for made in stage.outputs
    )
    inputs = (*stage.inputs[:index], *stage.inputs[index + 1 :])
    return with_stage(draw, number, replace(stage, inputs=inputs, outputs=outputs))


def without_output(draw: Draw, number: int, output: int) -> Draw:
    """With the inputs gone that it feeds. Output 0 stays."""
    for stage in range(number + 1, len(draw.stages)):
        for index in reversed(range(1, len(draw.stages[stage].inputs))):
            each = draw.stages[stage].inputs[index]
            if (each.source, each.output) == (number, output):
                draw = without_input(draw, stage, index)
    outputs = (*draw.stages[number].outputs[:output], *draw.stages[number].outputs[output + 1 :])
    draw = with_stage(draw, number, replace(draw.stages[number], outputs=outputs))
    for stage in range(number + 1, len(draw.stages)):
        made = draw.stages[stage]
        inputs = tuple(
            replace(each, output=each.output - 1) if each.source == number and each.output > output else each
            for each in made.inputs
        )
        draw = with_stage(draw, stage, replace(made, inputs=inputs))
    return draw


def _without_last_stage(draw: Draw) -> Draw:
    last = len(draw.stages) - 2
    stages = (*draw.stages[:last], replace(draw.stages[last], outputs=(), examples=False))
    tied = None if draw.tied and last + 1 in draw.tied[:2] else draw.tied
    return replace(draw, stages=stages, meshes=draw.meshes[:-1], tied=tied)


def _single(draw: Draw) -> Draw | None:
    """One stage on each rank."""
    if draw.schedule not in DOUBLE:
        return None
    tied = (*draw.tied[:2], "key") if draw.tied else None
    shapes = tuple(draw.shape(stage) for stage in range(len(draw.stages)))
    return replace(draw, schedule="1F1B", meshes=shapes, tied=tied)


def _smaller_mesh(draw: Draw, row: int, dim: int) -> Iterator[Draw]:
    shape = draw.meshes[row]
    if shape[dim] > 1:
        made = (*shape[:dim], shape[dim] - 1, *shape[dim + 1 :])
        yield replace(draw, meshes=(*draw.meshes[:row], made, *draw.meshes[row + 1 :]))
    if len(shape) == 2 and shape[dim] == 1:
        meshes = (*draw.meshes[:row], (shape[1 - dim],), *draw.meshes[row + 1 :])
        stages = list(draw.stages)
        for number in draw.rows[row]:
            stage = stages[number]
            kept = 1 - dim
            stages[number] = replace(
                stage,
                roles=(stage.roles[kept],),
                inputs=tuple(replace(each, placed=(each.placed[kept],)) for each in stage.inputs),
                outputs=tuple(replace(each, placed=(each.placed[kept],)) for each in stage.outputs),
                wrapper="fsdp" if stage.wrapper == "hsdp" else stage.wrapper,
                tp=stage.tp and stage.roles[kept] == "tensor",
                blocks=tuple("mlp" if block == "sequence" else block for block in stage.blocks),
                split_loss=stage.split_loss and stage.roles[kept] == "tensor",
            )
            if stages[number].roles == ("tensor",):
                stages[number] = replace(stages[number], wrapper="none")
        yield replace(draw, meshes=meshes, stages=tuple(stages))


def _usual(stage: Stage, value: Input | Output) -> tuple[str, ...]:
    """The plainest placements."""
    kinds = {("data", True): "S0", ("seq", True): "S1"}
    batched = isinstance(value, Input) or value.kind in ("hidden", "same")
    return tuple(kinds.get((role, batched), "R") for role in stage.roles)


def _stages(draw: Draw) -> Iterator[Draw]:
    for number, stage in enumerate(draw.stages):
        for index in reversed(range(1, len(stage.outputs))):
            yield without_output(draw, number, index)
        for index in reversed(range(1, len(stage.inputs))):
            if number > 0:
                yield without_input(draw, number, index)
        changes = [
            {"wrapper": "none"}, {"wrapper": "fsdp"}, {"tp": False}, {"checkpoint": False},
            {"adds": False},
            {"compiled": False}, {"in_place": False}, {"explicit": False}, {"split_loss": False},
        ]  # fmt: skip
        for change in changes:
            made = replace(stage, **change)
            if change == {"tp": False}:
                made = replace(made, blocks=tuple("mlp" if b == "sequence" else b for b in made.blocks))
            if change == {"wrapper": "fsdp"} and stage.wrapper not in ("nested", "hsdp"):
                continue
            if made != stage:
                yield with_stage(draw, number, made)
        for index in range(len(stage.blocks)):
            if len(stage.blocks) > 1:
                yield with_stage(
                    draw, number, replace(stage, blocks=(*stage.blocks[:index], *stage.blocks[index + 1 :]))
                )
            if stage.blocks[index] not in ("mlp", "sequence"):
                blocks = (*stage.blocks[:index], "mlp", *stage.blocks[index + 1 :])
                yield with_stage(draw, number, replace(stage, blocks=blocks))
        for index, each in enumerate(stage.inputs):
            kind = draw.kind(each.source, each.output)
            plain = _usual(stage, each) if kind in ("act", "ids", "mask") else None
            if plain is not None and (each.placed != plain or each.whole) and not _passed(stage, index):
                inputs = list(stage.inputs)
                inputs[index] = replace(each, placed=plain, whole=False)
                yield with_stage(draw, number, replace(stage, inputs=tuple(inputs)))
        for index, made_output in enumerate(stage.outputs):
            plain = _usual(stage, made_output)
            if made_output.kind in ("hidden", "param", "buffer") and made_output.placed != plain:
                if any(other.kind == "same" and other.of == index for other in stage.outputs):
                    continue
                outputs = list(stage.outputs)
                outputs[index] = replace(made_output, placed=plain)
                yield with_stage(draw, number, replace(stage, outputs=tuple(outputs)))


def _passed(stage: Stage, index: int) -> bool:
    return any(made.kind == "pass" and made.of == index for made in stage.outputs)


def simpler(draw: Draw) -> Iterator[Draw]:
    """Each a little simpler than the draw, the greatest steps first."""
    single = _single(draw)
    if single is not None:
        yield single
    elif len(draw.stages) > 1:
        yield _without_last_stage(draw)
    if len(draw.sizes) > 1:
        more = tuple(each[:1] for each in draw.more_sizes)
        yield replace(draw, sizes=draw.sizes[:1], more_sizes=more)
    if draw.columns > 1 and not (draw.columns == 2 and draw.stages[0].wrapper != "none"):
        yield replace(draw, columns=draw.columns - 1, more_sizes=draw.more_sizes[:-1])
    changes = [
        {"evaluates": False}, {"tied": None}, {"delayed": False}, {"backwards": False}, {"pieces": False},
        {"dtype": "float32"}, {"loss": "mean"}, {"hooks": False}, {"more_sizes": ()},
        {"extras": ""},
    ]  # fmt: skip
    yield from (replace(draw, **change) for change in changes)
    if draw.schedule not in (*DOUBLE, "GPipe"):
        yield replace(draw, schedule="1F1B" if draw.schedule != "1F1B" else "GPipe")
    for most in (1, 2) if draw.microbatches > 1 and not draw.more_sizes else ():
        yield replace(draw, sizes=tuple(step[:most] for step in draw.sizes))
    degree = draw.divisor()
    if draw.more_sizes:
        yield from _stages(draw)
        return
    yield replace(draw, sizes=tuple((step[0],) * len(step) for step in draw.sizes))
    yield replace(draw, sizes=tuple((max(2, degree),) * len(step) for step in draw.sizes))
    for row, shape in enumerate(draw.meshes):
        for dim in range(len(shape)):
            if not draw.columns:
                yield from _smaller_mesh(draw, row, dim)
    yield from _stages(draw)


def _allowed(draw: Draw) -> bool:
    degree = draw.divisor()
    fixed = any(stage.examples for stage in draw.stages) or draw.loss == "sum"
    return (
        draw.ranks <= MOST_RANKS
        and all(size % degree == 0 for step in draw.sizes for size in step)
        and not (fixed and draw.varying)
    )


def shrink(draw: Draw, fails: Callable[[Draw], bool], seconds: float) -> tuple[Draw, int]:
    """The simplest draw found that fails as well, and how many were tried."""
    end = time.monotonic() + seconds
    seen = {draw}
    progress = True
    while progress:
        progress = False
        for each in simpler(draw):
            if each in seen or not _allowed(each):
                continue
            if time.monotonic() > end:
                return draw, len(seen)
            seen.add(each)
            if fails(each):
                draw, progress = each, True
                break
    return draw, len(seen)
