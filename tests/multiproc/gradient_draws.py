"""Drawn pipelines as plain data. gradient_drawing.py draws them, gradient_modules.py says what they mean.

Placements are written "R", "S0", "S1", "S2" and "P", one for each dimension of the stage's mesh. A mesh
dimension has a role: over "data" the samples of the stage are split, over "seq" its tokens (context
parallelism: plain parameters, partial gradients), over "tensor" neither: all ranks compute the same loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_RANKS = 12
TOKENS, WIDTH = 6, 8  # of an activation, beside its samples
DOUBLE = ("ZBV", "Interleaved1F1B")  # two stages on each rank

Placed = tuple[str, ...]


@dataclass(frozen=True)
class Input:
    """Of a stage: output number `output` of stage `source`; of stage 0 (source -1) an argument of the step.
    whole: the stage compares its own samples with all of the batch."""

    source: int
    output: int
    placed: Placed
    whole: bool = False


@dataclass(frozen=True)
class Output:
    """kind: "hidden", "stat" (sum over samples and tokens), "param" and "buffer" (made of one alone), "same"
    (the tensor of output `of` again), "pass" (input `of` as it came)."""

    kind: str
    placed: Placed
    of: int = 0


@dataclass(frozen=True)
class Stage:
    """tp: blocks are tensor parallel by torch's own means. examples: it is given output_args. explicit:
    data_dims and loss_dims are given although they could be left out. split_loss: on a tensor dimension each
    rank takes the loss of its own tokens. adds: it adds gradients of its own, as routers do."""

    roles: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...] = ()
    blocks: tuple[str, ...] = ("mlp",)
    wrapper: str = "none"
    tp: bool = False
    checkpoint: bool = False
    compiled: bool = False
    in_place: bool = False
    examples: bool = False
    explicit: bool = False
    split_loss: bool = False
    adds: bool = False


@dataclass(frozen=True)
class Draw:
    """meshes: shape of the mesh of each row of the schedule. columns: 0, or so many pipelines side by side
    without meshes, as in torch. sizes: samples of each micro-batch of each step; more_sizes: the same for
    each column but the first, where they differ. hooks: the optimizer is in hooks of the parameters. tied:
    two stages and how ("key": shared_parameters, "object": one Parameter in both)."""

    seed: int
    batch: tuple[str, ...]
    meshes: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    sizes: tuple[tuple[int, ...], ...]
    schedule: str = "1F1B"
    delayed: bool = False
    loss: str = "mean"
    dtype: str = "float32"
    pieces: bool = False
    columns: int = 0
    tied: tuple[int, int, str] | None = None
    evaluates: bool = False
    backwards: bool = False  # the first row has the last ranks
    hooks: bool = False
    more_sizes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    extras: str = ""  # how values for each sample and a table for all of them come to every stage, nested
    table: int = 0  # rows of that table, which is declared whole

    @property
    def rows(self) -> list[list[int]]:
        """The stages of each row."""
        count = len(self.stages)
        if self.schedule == "ZBV":
            return [[row, count - 1 - row] for row in range(count // 2)]
        if self.schedule == "Interleaved1F1B":
            return [[row, row + count // 2] for row in range(count // 2)]
        return [[stage] for stage in range(count)]

    def sizes_of(self, step: int, column: int) -> tuple[int, ...]:
        return self.more_sizes[column - 1][step] if column and self.more_sizes else self.sizes[step]

    @property
    def microbatches(self) -> int:
        return len(self.sizes[0])

    @property
    def varying(self) -> bool:
        """Whether its micro-batches are of different sizes."""
        return len({size for step in self.sizes for size in step}) > 1

    @property
    def ranks(self) -> int:
        return sum(map(math.prod, self.meshes)) * max(1, self.columns)

    def shape(self, stage: int) -> tuple[int, ...]:
        return next(shape for shape, stages in zip(self.meshes, self.rows, strict=True) if stage in stages)

    def ranks_of(self, row: int) -> list[int]:
        """Of a row, all columns."""
        if self.columns:
            return [column * len(self.meshes) + row for column in range(self.columns)]
        sizes = [math.prod(shape) for shape in self.meshes]
        start = sum(sizes[row + 1 :]) if self.backwards else sum(sizes[:row])
        return list(range(start, start + sizes[row]))

    def kind(self, stage: int, output: int) -> str:
        """What a value is: "act" (samples, tokens, width), "bias" (1, tokens, width), "stat" (1, 1, width),
        "ids" and "mask" (samples, tokens)."""
        if stage < 0:
            return self.batch[output]
        made = self.stages[stage].outputs[output]
        if made.kind == "same":
            return self.kind(stage, made.of)
        if made.kind == "pass":
            source = self.stages[stage].inputs[made.of]
            return self.kind(source.source, source.output)
        return {"hidden": "act", "stat": "stat"}.get(made.kind, "bias")

    def edges(self) -> list[tuple[int, int, int, int]] | None:
        """From stage, output, to stage, input; None where they are those of a plain chain."""
        found = [
            (each.source, each.output, stage, number)
            for stage, made in enumerate(self.stages)
            for number, each in enumerate(made.inputs)
            if each.source >= 0
        ]
        chain = [
            (stage, number, stage + 1, number)
            for stage, made in enumerate(self.stages[:-1])
            for number in range(len(made.outputs))
        ]
        return None if sorted(found) == chain else sorted(found)

    def data_dims(self, stage: int) -> list[int]:
        return [dim for dim, role in enumerate(self.stages[stage].roles) if role != "tensor"]

    def loss_dims(self) -> list[int]:
        last = len(self.stages) - 1
        return list(range(len(self.shape(last)))) if self.stages[last].split_loss else self.data_dims(last)

    def divisor(self) -> int:
        """Of every micro-batch: ranks whose modules gather the samples of all have equally many."""
        found = 1
        for number, stage in enumerate(self.stages):
            sizes = zip(self.shape(number), stage.roles, strict=True)
            parts = math.prod(size for size, role in sizes if role == "data")
            for made in stage.outputs:
                whole = ("R", "data") in zip(made.placed, stage.roles, strict=True)
                if made.kind == "hidden" and whole:
                    found = math.lcm(found, parts)
        return found

    def names(self, stage: int) -> tuple[str, ...]:
        """Of the mesh's dimensions."""
        roles = self.stages[stage].roles
        return tuple(f"{role}{dim}" if roles.count(role) > 1 else role for dim, role in enumerate(roles))

    def text(self) -> str:
        """To read."""
        head = {
            name: value
            for name, value in vars(self).items()
            if name != "stages" and value != Draw.__dataclass_fields__[name].default
        }
        lines = [f"seed {self.seed}, {self.ranks} ranks: {head}"]
        for number, stage in enumerate(self.stages):
            said = {
                name: value
                for name, value in vars(stage).items()
                if name not in ("inputs", "outputs") and value != Stage.__dataclass_fields__[name].default
            }
            lines.append(f"  stage {number} on {self.shape(number)}: {said}")
            for index, each in enumerate(stage.inputs):
                source = "argument" if each.source < 0 else f"stage {each.source} output"
                lines.append(
                    f"    input {index}: {source} {each.output}, {self.kind(each.source, each.output)} as "
                    f"{each.placed}{', whole batch' if each.whole else ''}"
                )
            for index, made in enumerate(stage.outputs):
                of = f" of {made.of}" if made.kind in ("same", "pass") else ""
                lines.append(f"    output {index}: {made.kind}{of} as {made.placed}")
        return "\n".join(lines)


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """As torch.tensor_split."""
    return tuple(total // parts + (number < total % parts) for number in range(parts))
