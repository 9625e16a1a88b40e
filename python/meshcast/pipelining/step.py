"""One step's data on one rank: micro-batches and shards of what it was given, and the wirings that they
travel over, one for all micro-batches of a shape.

Before every step the ranks agree on what it is (`agree_on_step`), and meet once more for each shape of
micro-batches that is new, to find the shapes of all values and compile their transfers.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_map, tree_map_only

from ..errors import LayoutError
from ..transfers.transfer import PersistentTransfer
from .board import PipelineBoard
from .data_parallel import GradientScale
from .edge import RankStage
from .loss import Sharding, StepLoss, microbatch_weights, part_of
from .microbatch import (
    Leaf,
    Pieces,
    Values,
    check_shard,
    digest_of,
    divided,
    extent,
    is_mask,
    local_shard,
    picked,
    sizes_of_parts,
)
from .parallel import DataUse, Inferred, Placements, local_values
from .table import Claim, GivenValues, OpaqueValue, StageTable, StepAnswer
from .wiring import Example, StageValue, Wiring, connect

__all__ = ["StepCall", "StepFeed", "Wirings"]

_T = TypeVar("_T")
_KEPT = 64  # combinations of shapes whose transfers stay compiled; of more, those not used for longest go


@dataclass(frozen=True, slots=True)
class StepCall:
    """One call of ``step`` or ``eval``, as it was made. train: it is ``step``. merge: it returns outputs."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: Mapping[str, Any] | None
    pieces: Pieces
    train: bool
    finalize: bool = True
    merge: bool = True


_PIECES = {"args": "arg_mbs", "kwargs": "kwarg_mbs", "target": "target_mbs"}


class StepFeed:
    """The data that `Runtime` asks for during one step.

    Args:
        chunk_specs: of the arguments and keyword arguments.
        loss_fn, weight_fn, scale_grads: see `PipelineSchedule`.

    Raises LayoutError if a tensor cannot be cut into the micro-batches, or targets are missing.
    """

    def __init__(
        self,
        stage: RankStage,
        microbatches: int,
        call: StepCall,
        chunk_specs: tuple[Any, Any],
        loss_fn: Callable[..., Any] | None,
        weight_fn: Callable[..., Any] | None,
        *,
        scale_grads: bool,
    ) -> None:
        pieces = call.pieces
        pieces.check(microbatches)
        self._stage = stage
        self._microbatches = microbatches
        self.keep_outputs = call.return_outputs
        self._where = f"stage {stage.stage_index}"
        self._keyword_placements, self._target_placements = _split_by_samples(stage)
        self._sample_dims = [dim for dim, each in enumerate(self._keyword_placements) if each == Shard(0)]
        self._grid = [stage.mesh.shape[dim] for dim in self._sample_dims]
        self._local = pieces.local and math.prod(self._grid) > 1
        self._specs = {"args": chunk_specs[0], "kwargs": chunk_specs[1]}
        self._pieces: set[str] = set()  # the kinds that come as micro-batches
        # One value of each kind for the whole batch, or one for each micro-batch.
        self._given: dict[str, list[Values]] = {}
        for kind, whole, cut_already, is_here in (
            ("args", call.args or None, pieces.args, stage.is_first),
            ("kwargs", call.kwargs or None, pieces.kwargs, True),
            ("target", call.target, pieces.targets, stage.is_last),
        ):
            several: Sequence[Any] = [] if whole is None else [whole]
            if cut_already is not None and is_here:
                if several:
                    raise LayoutError(f"step got both {kind} and {_PIECES[kind]}: give one")
                self._pieces.add(kind)
                several = cut_already
            self._given[kind] = [self._values(kind, each) for each in several] if is_here else []
        if stage.is_first and not (self._given["args"] or self._given["kwargs"]):
            raise LayoutError("the first stage needs the batch: step(x, ...)")
        if stage.is_last and call.train and loss_fn is not None and not self._given["target"]:
            raise LayoutError(
                f"{self._where}: the last stage has a loss_fn and needs targets: step(..., target=y)"
            )
        self.shapes = self._shapes()  # of each micro-batch: of its arguments and keyword arguments
        self._arguments: list[list[Any]] = []
        self._keywords: list[Mapping[str, Any]] = []
        self._argument_shardings: list[list[Sharding]] = []
        self.loss = StepLoss(
            stage, microbatches, loss_fn, None, call.loss_kwargs or {}, weight_fn if call.train else None
        )
        self._scale_grads = scale_grads
        self.scale = GradientScale()

    def _values(self, kind: str, given: Any) -> Values:
        if kind == "target" or (kind == "args" and not isinstance(given, tuple)):
            given = (given,)
        specs = self._specs.get(kind) if given else None
        may_be_empty = self._local or kind in self._pieces
        values = Values(kind, given, specs, self._where, may_be_empty=may_be_empty)
        for leaf in [] if self._stage.alone else values.leaves:
            placed = self._placed(kind, leaf)
            if isinstance(leaf.value, torch.Tensor):
                check_shard(leaf.shape, placed)
            if self._local and leaf.dim is not None and not self._is_cut(leaf, placed):
                raise LayoutError(
                    f"{self._where}: each rank gives its own samples (local_batch), but argument {leaf.top} "
                    f"is placed as {list(placed)}, which needs all of them on each rank"
                )
        return values

    def _is_cut(self, leaf: Leaf, placed: Placements) -> bool:
        """Returns whether a value is cut over all ranks of the stage that have other samples."""
        return leaf.dim is not None and all(placed[dim] == Shard(leaf.dim) for dim in self._sample_dims)

    def _placed(self, kind: str, leaf: Leaf) -> Placements:
        """The placements of a value over the ranks of the stage. It is cut by samples, in the dimension that
        has them; arguments also as input_placements say, targets over the tokens that each rank has the loss
        of."""
        stage = self._stage
        base: Placements = {
            "args": stage.input_placements[leaf.top] if kind == "args" else (),
            "kwargs": self._keyword_placements,
            "target": self._target_placements,
        }[kind]
        follows = kind != "args" or not stage.input_placements.given
        found = []
        for dim, each in enumerate(base):
            if each == Shard(0) and dim in (*stage.data_dims, *stage.loss_dims):
                if leaf.dim is None:
                    each = Replicate()
                elif follows:
                    each = Shard(leaf.dim)
            fits = not isinstance(each, Shard) or each.dim < len(leaf.shape)
            found.append(each if fits or (kind == "args" and not leaf.nested) else Replicate())
        return tuple(found)

    # ---- before the ranks agree --------------------------------------------------------------------------

    def shapes_but_for_samples(self, microbatch: int) -> list[Any]:
        """The same without the dimension of the samples."""
        values = self._of("args", microbatch)
        return values.shapes(None, but_for_samples=True) if values else []

    def digests(self) -> list[str]:
        """A name for the shapes of each micro-batch, keyword arguments included."""
        names: list[str] = []
        before: Any = None
        for shapes in self.shapes:
            if shapes is not before:
                name = _digest(shapes)
            names.append(name)
            before = shapes
        return names

    def _shapes(self) -> list[tuple[list[Any], list[Any]]]:
        """Shapes before they are sharded: the size of each tensor in all dimensions, and its dtype.
        Neighbouring micro-batches of the same sizes share one object."""
        whole = [self._given[kind] for kind in ("args", "kwargs") if kind not in self._pieces]
        rows = {
            leaf.rows for each in whole for values in each for leaf in values.leaves if leaf.dim is not None
        }
        sizes = [sizes_of_parts(each, self._microbatches) for each in rows]
        found: list[tuple[list[Any], list[Any]]] = []
        for number in range(self._microbatches):
            if number and len(whole) == 2 and all(each[number] == each[number - 1] for each in sizes):
                found.append(found[-1])
                continue
            shapes = []
            for kind in ("args", "kwargs"):
                values = self._of(kind, number)
                part = None if kind in self._pieces else (number, self._microbatches)
                shapes.append(values.shapes(part) if values else [])
            found.append((shapes[0], shapes[1]))
        return found

    def _of(self, kind: str, microbatch: int) -> Values | None:
        given = self._given[kind]
        return given[microbatch if kind in self._pieces else 0] if given else None

    def samples(self) -> list[int]:
        """The number of samples of each micro-batch, as the first stage knows it: the size of the first
        tensor that is cut; 1 where micro-batches are given."""
        rows, _ = self._batch() if not self._pieces & {"args", "kwargs"} else (None, False)
        return [1] * self._microbatches if rows is None else rows

    def _batch(self) -> tuple[list[int] | None, bool]:
        """The number of samples of each micro-batch, by the first value that has some, and whether they are
        this rank's own only. None: no value shows it."""
        for kind in ("args", "kwargs"):
            firsts = [
                next((leaf for leaf in values.leaves if leaf.dim is not None), None)
                for values in self._given[kind]
            ]
            if not firsts or None in firsts or (kind in self._pieces and self._stage.alone):
                continue
            leaves = [leaf for leaf in firsts if leaf is not None]
            owns = [self._is_own(kind, leaf) for leaf in leaves]
            rows = [_extent(leaf, own=own) for leaf, own in zip(leaves, owns, strict=True)]
            return rows if kind in self._pieces else sizes_of_parts(rows[0], self._microbatches), all(owns)
        return None, False

    def _is_own(self, kind: str, leaf: Leaf) -> bool:
        """Returns whether a value has this rank's samples only, instead of all of them: with local_batch, or
        as a DTensor that is cut by samples over the ranks of the stage that have different ones."""
        value = leaf.value
        if self._local or leaf.dim is None or self._stage.alone or not isinstance(value, DTensor):
            return self._local and leaf.dim is not None
        placed = self._placed(kind, leaf)
        by_samples = [
            Shard(leaf.dim) if dim in self._sample_dims else Replicate() for dim in range(len(placed))
        ]
        return (
            math.prod(self._grid) > 1
            and value.device_mesh == self._stage.mesh.device_mesh
            and list(value.placements) == by_samples
            and self._is_cut(leaf, placed)
        )

    def calls(self) -> list[tuple[int, list[str]]]:
        """For each micro-batch, how many positional arguments were given, and the names of the others."""
        both = [(self._of("args", each), self._of("kwargs", each)) for each in range(self._microbatches)]
        return [(args.count if args else 0, kwargs.names if kwargs else []) for args, kwargs in both]

    @property
    def owns_samples(self) -> bool:
        """Returns whether an argument has the samples of this rank only."""
        return any(
            self._is_own(kind, leaf)
            for kind in ("args", "kwargs")
            for values in self._given[kind]
            for leaf in values.leaves
        )

    def parts(self) -> list[tuple[list[Any], Mapping[str, Any]]] | None:
        """The arguments and keyword arguments that this rank's module gets for each micro-batch, on the first
        stage, before the ranks agree. None where they have to agree first: other ranks' samples decide how
        the batch is cut."""
        owns = self.owns_samples
        if owns and (self._stage.use_dtensor or not self._local):
            return None
        samples = self.samples()
        args = [list(each) for each, _ in self._cut("args", samples, None, keeps=owns)]
        kwargs = [each for each, _ in self._cut("kwargs", samples, None, keeps=owns)]
        none: list[Any] = [[] for _ in samples]
        return list(zip(args or none, kwargs or [{} for _ in samples], strict=True))

    def report(self, *, checked: bool) -> GivenValues | None:
        """A description of what was given, for the ranks to find out whether all fits together; None where
        nothing was given. checked: with digests of the values."""
        if not any(self._given.values()):
            return None
        part = 0
        for dim, size in zip(self._sample_dims, self._grid, strict=True):
            part = part * size + self._stage.mesh.coordinate[dim]
        digests: dict[str, tuple[str, str]] = {}
        if checked and self._stage.mesh.size > 1:
            kinds = [kind for kind, several in self._given.items() if several]
            digests = {kind: (self._digest(kind, own=False), self._digest(kind, own=True)) for kind in kinds}
        claims, opaque = self._claims()
        return GivenValues(self._grid, part, self._local, *self._batch(), claims, opaque, digests)

    def _claims(self) -> tuple[list[Claim], list[OpaqueValue]]:
        claims: list[Claim] = []
        opaque: list[OpaqueValue] = []
        is_cut = self._microbatches > 1 or math.prod(self._grid) > 1
        seen: set[tuple[int, str, int]] = set()
        for kind, several in self._given.items():
            if kind in self._pieces and self._stage.alone:
                continue  # nothing is cut: as in torch, anything goes
            for at, values in enumerate(several):
                piece, begin = (at, f"{_PIECES[kind]}[{at}], ") if kind in self._pieces else (-1, "")
                for number, leaf in enumerate(values.leaves):
                    rows = 0 if leaf.dim is None else _extent(leaf, own=self._local)
                    if leaf.dim is not None and (piece, kind, rows) not in seen:
                        seen.add((piece, kind, rows))
                        name, remedy = begin + values.name(number), values.remedy(number)
                        claims.append(Claim(piece, kind, rows, name, leaf.shape, remedy))
                for number, path, size in values.objects() if is_cut else ():
                    name, type_name = begin + values.name(number), type(values.leaves[number].value).__name__
                    opaque.append(OpaqueValue(piece, size, name, path, type_name, values.remedy(number)))
        return claims, opaque

    def weight_ahead(self) -> float | None:
        """The weight that this rank adds to that of the step, by ``weight_fn``; None where it is not known.
        Ranks that have the same loss each add a part of its weight."""
        if not self.loss.knows_weight or not self._given["target"]:
            return None
        mesh = self._stage.mesh
        parts = self._cut("target", None, None, keeps=True)
        total = sum(self.loss.weight_of(target[0]) for target, _ in parts)
        return total * math.prod(mesh.shape[dim] for dim in self._stage.loss_dims) / mesh.size

    def _digest(self, kind: str, *, own: bool) -> str:
        """A name for the samples that all ranks of the stage were given; or, own, for those that only ranks
        with the same part of the batch were given. Other DTensors are left out: their parts may differ."""
        found = []
        for values in self._given[kind]:
            for leaf in values.by_name():
                shared = not own and not isinstance(leaf.value, DTensor) and leaf.dim is not None
                if own if self._is_own(kind, leaf) else shared:
                    found.append([leaf.top, *digest_of(leaf.value)])
        return _digest(found)

    # ---- once they agreed --------------------------------------------------------------------------------

    def take(self, answer: StepAnswer) -> None:
        """Cuts all that was given into micro-batches, and takes this rank's part of each."""
        samples, dealt = answer.rows or answer.samples, answer.dealt
        order = None if dealt is None else _order(dealt.rows)
        keeps = dealt is not None and dealt.grid == self._grid
        for args, shardings in self._cut("args", samples, order, keeps=keeps):
            self._arguments.append(list(args))
            self._argument_shardings.append(shardings)
        self._keywords = [named for named, _ in self._cut("kwargs", samples, order, keeps=keeps)]
        targets = [each[0] for each, _ in self._cut("target", samples, order, keeps=keeps)]
        self.loss.targets = targets or None

    def _cut(
        self, kind: str, samples: Sequence[int] | None, order: torch.Tensor | None, *, keeps: bool
    ) -> list[tuple[Any, list[Sharding]]]:
        """This rank's part of each micro-batch, and how its tensors are laid out.

        Args:
            samples: of each micro-batch; None: each value is cut by its own size.
            order: in which the samples of whole values come.
            keeps: values that are this rank's own samples stay here.
        """
        found = []
        for at, values in enumerate(self._given[kind]):
            owns = [keeps and self._is_own(kind, leaf) for leaf in values.leaves]
            flat = [self._here(leaf, own=own) for leaf, own in zip(values.leaves, owns, strict=True)]
            parts: list[Any] = [flat]  # of each micro-batch
            if kind not in self._pieces:
                cuts = [
                    self._parts_of(leaf, value, None if own else samples, order)
                    for leaf, value, own in zip(values.leaves, flat, owns, strict=True)
                ]
                parts = list(zip(*cuts, strict=True)) or [()] * self._microbatches
            for number, part in enumerate(parts, at):
                shares = []
                for leaf, value, own in zip(values.leaves, part, owns, strict=True):
                    rows = None  # of the whole, where the value is this rank's own part already
                    if own:
                        rows = leaf.rows if samples is None else samples[number]
                    shares.append(self._share(kind, leaf, value, rows))
                rebuilt = values.rebuilt([local for local, _ in shares])
                found.append((rebuilt, [each for _, each in shares if each is not None]))
        return found

    def _parts_of(
        self, leaf: Leaf, value: Any, samples: Sequence[int] | None, order: torch.Tensor | None
    ) -> list[Any]:
        """The part of a value in each micro-batch. samples, order: as for `_cut`."""
        count = self._microbatches
        if leaf.dim is None:
            return [value] * count
        rows, total = int(extent(value, leaf.dim)), sum(samples or ())
        if not samples or total == 0 or rows % total:
            return divided(value, leaf.dim, sizes_of_parts(rows, count))
        if order is not None and rows == total:
            value = picked(value, leaf.dim, order)
        return divided(value, leaf.dim, [rows // total * each for each in samples])

    def _here(self, leaf: Leaf, *, own: bool) -> Any:
        """A value without DTensors, which only a stage of one rank takes as they are: their mesh joins
        pipelines. Those of which this rank keeps its own part are not gathered."""
        if self._stage.alone or not isinstance(leaf.value, DTensor):
            return leaf.value
        return local_values(leaf.value) if own else leaf.value.full_tensor()

    def _share(self, kind: str, leaf: Leaf, value: Any, samples: int | None) -> tuple[Any, Sharding | None]:
        """This rank's part of a value of a micro-batch, and how the whole is laid out. samples: of the whole,
        where the value is this rank's own part of it already."""
        if self._stage.alone or not (isinstance(value, torch.Tensor) or is_mask(value)):
            return value, None
        placed = cuts = self._placed(kind, leaf)
        if samples is not None:
            cuts = tuple(Replicate() if dim in self._sample_dims else each for dim, each in enumerate(placed))
        local = local_shard(value, self._stage.mesh, cuts)
        if not isinstance(value, torch.Tensor):
            return local, None
        shape = tuple(
            samples if samples is not None and dim == leaf.dim else size
            for dim, size in enumerate(value.shape)
        )
        sharding = (placed, shape, local.shape) if shape else None
        if self._stage.use_dtensor and kind != "kwargs" and (kind == "args" or shape):
            local = self._stage.wrap(local, placed, shape)
        return local, sharding

    def learn_shares(
        self, inputs: Sequence[Mapping[int, StageValue]], answer: StepAnswer, *, as_torch: bool
    ) -> None:
        """Computes what this rank counts in the step.

        Args:
            inputs: of each micro-batch, what other stages send for it; the same object for the same shapes.
            as_torch: losses are returned as the function made them, and gradients scaled once, at the end.
        """
        samples = answer.samples
        stage, known = self._stage, dict[int, tuple[Fraction, Fraction]]()
        of_loss, of_stage = [], []
        for number, values in enumerate(inputs):
            key = id(values) if values else -number - 1
            if key not in known:  # worth it: this runs for every micro-batch
                shardings = self._sharded(number, values)
                # DTensors compute the result of all ranks of the mesh together.
                parts = Fraction(1) if stage.use_dtensor else part_of(stage, stage.data_dims, shardings)
                known[key] = part_of(stage, stage.loss_dims, shardings), parts
            of_loss.append(known[key][0])
            of_stage.append(known[key][1])
        degree = 1 if stage.use_dtensor else stage.batch_parts
        scaled = self._scale_grads
        self.scale = GradientScale(
            of_stage,
            microbatch_weights(samples, answer.alike or as_torch, scaled),
            degree,
            max(1, sum(each > 0 for each in samples)) if scaled else 1,
            None if as_torch else Fraction(1, degree * (self._microbatches if scaled else 1)),
        )
        self.loss.learn_parts(of_loss, self.scale, as_torch)

    def _sharded(self, microbatch: int, values: Mapping[int, StageValue]) -> list[Sharding]:
        if values:
            return [
                (each.layout.placements, each.shape, each.layout.local_shapes(each.shape)[self._stage.rank])
                for each in values.values()
            ]
        return self._argument_shardings[microbatch] if self._argument_shardings else []

    def arguments(self, microbatch: int) -> list[Any]:
        return self._arguments[microbatch] if self._arguments else []

    @property
    def targets(self) -> Sequence[Any] | None:
        return self.loss.targets

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        return self._keywords[microbatch] if self._keywords else {}

    def merged(self, spec: Any) -> Any:
        """The outputs, micro-batches joined as torch.distributed.pipelining does; a list of them where they
        differ in more than their number of samples, or have none."""
        outputs = self._stage.output_chunks
        kinds = {str(tree_map(_kind, output)) for output in outputs}
        joined = len(kinds) == 1 and "('tensor',)" not in next(iter(kinds))
        return merge_chunks(outputs, spec) if joined or spec is not None else list(outputs)


def _digest(value: Any) -> str:
    """value: of lists, numbers and text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _split_by_samples(stage: RankStage) -> tuple[Placements, Placements]:
    """Placements of keyword arguments and of targets, where they have the dimension: as the inputs over the
    ranks that have other samples, targets also over those whose loss is that of other tokens."""
    keywords: list[Any] = []
    targets: list[Any] = []
    for dim in range(len(stage.mesh.shape)):
        cuts = [each[dim] for each in stage.input_placements.listed() if type(each[dim]) is Shard]
        by_samples = Shard(0) in cuts and dim in (*stage.data_dims, *stage.loss_dims)
        keywords.append(Shard(0) if by_samples else Replicate())
        by_tokens = cuts and not by_samples and dim in stage.loss_dims
        targets.append(cuts[0] if by_tokens else keywords[-1])
    return tuple(keywords), tuple(targets)


def _extent(leaf: Leaf, *, own: bool) -> int:
    """Returns how many samples a value has; own: on this rank."""
    if own and isinstance(leaf.value, DTensor):
        assert leaf.dim is not None
        return int(leaf.value.to_local().shape[leaf.dim])
    return leaf.rows


def _order(rows: Sequence[Sequence[int]]) -> torch.Tensor | None:
    """The order of samples whose parts, which follow each other, have so many of them in each micro-batch.
    None where that is their own one."""
    begins = [sum(map(sum, rows[:part])) for part in range(len(rows))]
    found: list[int] = []
    for number in range(len(rows[0])):
        for part, each in enumerate(rows):
            begin = begins[part] + sum(each[:number])
            found += range(begin, begin + each[number])
    return None if found == list(range(len(found))) else torch.tensor(found)


def _kind(value: Any) -> Any:
    """The properties that outputs of micro-batches have in common if they can be joined."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return ("tensor", "rows", *value.shape[1:]) if value.dim() else ("tensor",)


class Wirings:
    """The wirings of one schedule on one rank.

    Args:
        stages: of this rank, by number.
        varying: micro-batches may differ in shape, in a step and from step to step; else in the number of
            their samples only.
    """

    def __init__(
        self, stages: Mapping[int, RankStage], board: PipelineBoard, timeout: float, varying: bool
    ) -> None:
        self._stages = stages
        self._board = board
        self._timeout = timeout
        self._varying = varying
        self._known: OrderedDict[str, Wiring] = OrderedDict()
        # By the name of a micro-batch's shapes on the first stage, and whether it is the rank's own part: the
        # shapes that came out there.
        self._looked: OrderedDict[tuple[str, bool], Inferred] = OrderedDict()
        # By stage, the shapes of the first step's micro-batches, and these without samples.
        self._first: dict[int, tuple[list[Any], list[Any]]] = {}
        self._meetings = 0

    @property
    def last(self) -> Wiring | None:
        """The wiring of the last micro-batch of the last step."""
        return next(reversed(self._known.values()), None)

    def transfers(self) -> list[PersistentTransfer]:
        return [transfer for wiring in self._known.values() for transfer in wiring.transfers()]

    def check_shapes(self, feeds: Mapping[int, StepFeed], *, cut: bool) -> None:
        """Raises LayoutError for shapes that differ from those of the first step, unless they may vary.

        cut: the micro-batches were cut from a batch, and may differ in the number of samples.
        """
        if self._varying:
            return
        for index, feed in feeds.items():
            expected, known = self._first.get(index) or _of_first(feed)
            for number, (found, _) in enumerate(feed.shapes):
                if found != expected and not (cut and feed.shapes_but_for_samples(number) == known):
                    raise LayoutError(
                        f"stage {index}: micro-batch {number} has shapes {found}, the first one had "
                        f"{expected}; the transfers are compiled for one shape. Pad it, or make the schedule "
                        "with varying_shapes=True"
                    )

    def look(self, feeds: Mapping[int, StepFeed], table: StageTable) -> None:
        """Runs the first stage's module for shapes that are new, as `infer_outputs` does. Other ranks are not
        waited for: an error reaches the caller before they come. Raises LayoutError."""
        names = _looks(feeds[0]) if 0 in feeds else []
        data: DataUse = "alone" if len(table.ranks[0]) > 1 else "if needed"
        parts = None if self._looked.keys() >= set(names) else feeds[0].parts()
        for number, name in enumerate(names):
            if name not in self._looked and parts is not None:
                empty = feeds[0].samples()[number] == 0
                if empty and feeds[0].owns_samples:
                    continue  # other ranks may have some: that is known once they agreed
                with torch.inference_mode(False):
                    (args, kwargs), again = _with_next(lambda at: parts[at], names, number)
                    self._looked[name] = self._stages[0].infer(args, kwargs, table.trains, empty, data, again)
            if name in self._looked:
                self._looked.move_to_end(name)
        while len(self._looked) > max(_KEPT, len(names)):
            self._looked.popitem(last=False)

    def of_step(self, answer: StepAnswer, feeds: Mapping[int, StepFeed], table: StageTable) -> list[Wiring]:
        """One for each micro-batch. Called by all ranks. Raises Refused where a rank cannot take a shape."""
        keys = answer.keys
        for index, feed in feeds.items():
            self._first.setdefault(index, _of_first(feed))
        for number, key in enumerate(keys):
            if key not in self._known:
                self._known[key] = self._connect(feeds, table, answer, number)
            self._known.move_to_end(key)
        wirings = [self._known[key] for key in keys]
        needed = len(set(keys))
        while len(self._known) > max(_KEPT, needed):
            _, oldest = self._known.popitem(last=False)
            for each in oldest.edge_transfers():
                if each.transfer is not None:
                    each.transfer.close()
        return wirings

    def _connect(
        self, feeds: Mapping[int, StepFeed], table: StageTable, answer: StepAnswer, microbatch: int
    ) -> Wiring:
        topic = f"{self._meetings}/"
        self._meetings += 1
        try:
            # An evaluation may be the first to come, and steps that train use its wiring.
            with torch.inference_mode(False):
                (args, kwargs), again = _with_next(
                    lambda at: (
                        feeds[0].arguments(at) if 0 in feeds else [],
                        {index: feed.keywords(at) for index, feed in feeds.items()},
                    ),
                    answer.keys,
                    microbatch,
                )
                example = Example(
                    args,
                    kwargs,
                    None if again is None else Example(*again),
                    answer.samples[microbatch] == 0,
                    self._looked.get(_looks(feeds[0])[microbatch]) if 0 in feeds else None,
                )
                return connect(
                    self._stages, table, self._board, example, self._timeout, topic, first=not self._known
                )
        except BaseException as error:
            shapes = [f"shapes/{index}{which}" for index in self._stages for which in ("", "/data")]
            for name in (*shapes, "checked"):
                self._board.fail(f"{topic}{name}", self._board.text_of(error))
            raise


def _with_next(given: Callable[[int], _T], keys: Sequence[Any], microbatch: int) -> tuple[_T, _T | None]:
    """Returns what a rank gets of a micro-batch, and of the next one under the same key, if there is one."""

    def of(number: int) -> _T:
        found: _T = tree_map_only(torch.Tensor, _trainable, given(number))
        return found

    later = (number for number in range(microbatch + 1, len(keys)) if keys[number] == keys[microbatch])
    other = next(later, None)
    return of(microbatch), None if other is None else of(other)


def _looks(feed: StepFeed) -> list[tuple[str, bool]]:
    """Names for what the first stage's module gets of each micro-batch, by its shapes."""
    owns = feed.owns_samples
    return [(name, owns) for name in feed.digests()]


def _trainable(value: torch.Tensor) -> torch.Tensor:
    """A copy where autograd could not take the value itself."""
    return value.clone() if value.is_inference() else value


def _of_first(feed: StepFeed) -> tuple[list[Any], list[Any]]:
    return feed.shapes[0][0], feed.shapes_but_for_samples(0)
