"""One step's data: micro-batches and shards of the batch, losses and outputs collected; orders of actions and
functions that were given as torch's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.pipelining.schedules import REDUCE_GRAD
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_map

from ..errors import LayoutError
from .action import Action, ActionKind, Actions
from .compat import Gathering, actions_of, fused_pairs, parts_of, torch_action, with_gathering
from .data_parallel import GradientScale
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
from .parallel import Placements, local_values
from .stage import PipelineStage
from .table import StageTable
from .wiring import StageValue

__all__ = ["Arriving", "Functions", "GivenOrder", "StepFeed", "functions_for", "functions_of"]


class GivenOrder:
    """order: torch's actions of each of its ranks. lowered: with their transfers."""

    def __init__(self, order: dict[int, list[Any]], lowered: bool) -> None:
        self.order, self.lowered = order, lowered
        self.pairs = fused_pairs(order)
        actions = actions_of(order)
        text = str(sorted((rank, list(map(str, row))) for rank, row in actions.items()))
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._rows = [row for row in actions.values() if row]

    @staticmethod
    def of(schedule: Any) -> GivenOrder | None:
        """The order that ``_load_csv`` or ``_prepare_schedule_with_comms`` got last, else ``pipeline_order``,
        else ``pipeline_order_with_comms``. None where the schedule runs what is built by its name."""
        prepared, order = schedule._given_order, schedule.pipeline_order
        if prepared is None and schedule.name is not None and order is schedule._built_order:
            return None
        given = prepared or (order, False)
        if not given[0]:
            given = getattr(schedule, "pipeline_order_with_comms", None), True
        if not given[0]:
            raise LayoutError(
                f"{type(schedule).__name__} has no actions: give it a pipeline_order, or load a file"
            )
        return GivenOrder(*given)

    def rows(self, table: StageTable) -> Actions:
        """By row of the schedule."""
        return dict(sorted((table.row_of(row[0].stage), row) for row in self._rows))

    def row_of(self, stages: set[int]) -> list[Any]:
        """torch's actions of the rank that has these stages."""
        return next(row for row in self.order.values() if any(a and a.stage_index in stages for a in row))

    def reduced(self, stages: Iterable[int]) -> list[int]:
        """The stages whose gradients are scaled: an order that holds its transfers says which."""
        told = {
            each.stage_index
            for row in self.order.values()
            for each in row
            if each is not None and each.computation_type == REDUCE_GRAD
        }
        return [stage for stage in stages if not self.lowered or stage in told]

    def side_by_side(self, row: list[Action]) -> list[Action]:
        """A lowered row with the parts of each fused action next to each other: receives between them come
        before, sends behind."""
        for _, parts in self.pairs.values():
            if parts[0] not in row:
                continue
            first, last = row.index(parts[0]), row.index(parts[-1])
            between = [each for each in row[first : last + 1] if each not in parts]
            receives = [each for each in between if each.kind.is_recv]
            sends = [each for each in between if not each.kind.is_recv]
            row = [*row[:first], *receives, *parts, *sends, *row[last + 1 :]]
        return row


_WHAT = ("args", "kwargs", "target")
_PIECES = {"args": "arg_mbs", "kwargs": "kwarg_mbs", "target": "target_mbs"}


class StepFeed:
    """The data that `Runtime` asks for during one step. All arguments as in ``PipelineSchedule.step``.

    Raises LayoutError if a tensor cannot be cut into the micro-batches, or targets are missing.
    """

    def __init__(
        self,
        stage: PipelineStage,
        microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        chunk_specs: tuple[Any, Any],
        loss_fn: Callable[..., Any] | None,
        loss_kwargs: Mapping[str, Any],
        scale_grads: bool,
        keep_outputs: bool,
        pieces: Pieces,
        train: bool,
        weight_fn: Callable[..., Any] | None = None,
    ) -> None:
        pieces.check(microbatches)
        self._stage = stage
        self._microbatches = microbatches
        self.keep_outputs = keep_outputs
        for name, given, cut_already in (("args", args, pieces.args), ("kwargs", kwargs, pieces.kwargs)):
            if given and cut_already is not None:
                raise LayoutError(f"step got both {name} and {name[:-1]}_mbs: give one")
        if target is not None and pieces.targets is not None:
            raise LayoutError("step got both target and target_mbs: give one")
        self._where = f"rank {stage.rank}, stage {stage.stage_index}"
        if stage.is_first and not (args or kwargs or pieces.args or pieces.kwargs):
            raise LayoutError(f"rank {stage.rank}: the first stage needs the batch: step(x, ...)")
        if stage.is_last and train and loss_fn is not None and target is None and pieces.targets is None:
            raise LayoutError(
                f"{self._where}: the last stage has a loss_fn and needs targets: step(..., target=y)"
            )
        self._keyword_placements, self._target_placements = _split_by_samples(stage)
        self._sample_dims = [dim for dim, each in enumerate(self._keyword_placements) if each == Shard(0)]
        self._grid = [stage.mesh.shape[dim] for dim in self._sample_dims]
        self._local = pieces.local and math.prod(self._grid) > 1
        self._specs = {"args": chunk_specs[0], "kwargs": chunk_specs[1]}
        given_args: Sequence[Any] = [args] if args else []
        given_target: Sequence[Any] = [] if target is None else [target]
        self._pieces: set[str] = set()  # the kinds that come as micro-batches
        # Of each kind one of the whole batch, or one for each micro-batch.
        self._given: dict[str, list[Values]] = {}
        for kind, whole, cut_already in (
            ("args", given_args, pieces.args if stage.is_first else None),
            ("kwargs", [kwargs] if kwargs else [], pieces.kwargs),
            ("target", given_target, pieces.targets if stage.is_last else None),
        ):
            if cut_already is not None:
                self._pieces.add(kind)
            self._given[kind] = [
                self._values(kind, each) for each in (whole if cut_already is None else cut_already)
            ]
        self._shapes = self._all_shapes()
        self._arguments: list[list[Any]] = []
        self._keywords: list[Mapping[str, Any]] = []
        self._argument_shardings: list[list[Sharding]] = []
        self.loss = StepLoss(stage, microbatches, loss_fn, None, loss_kwargs, weight_fn)
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

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return self._microbatches

    # ---- before the ranks agree --------------------------------------------------------------------------

    def shapes(self, microbatch: int) -> list[Any]:
        """The shapes of a micro-batch's arguments before they are sharded: the size of each tensor in all
        dimensions, and its dtype."""
        return self._shapes[microbatch][0]

    def shapes_but_for_samples(self, microbatch: int) -> list[Any]:
        """The same without the dimension of the samples."""
        values = self._of("args", microbatch)
        return values.shapes(None, but_for_samples=True) if values else []

    def digests(self) -> list[str]:
        """A name for the shapes of each micro-batch, keyword arguments included."""
        names: list[str] = []
        before: Any = None
        for shapes in self._shapes:
            if shapes is not before:
                name = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
            names.append(name)
            before = shapes
        return names

    def _all_shapes(self) -> list[tuple[list[Any], list[Any]]]:
        """Shapes of the arguments and of the keyword arguments. Neighbouring micro-batches of the same sizes
        share one object."""
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

    def said(self, *, checked: bool) -> dict[str, Any] | None:
        """A description of what was given, for the ranks to find out whether all fits together
        (`agree_on_step`); None where nothing was given. checked: with digests of the values."""
        if not any(self._given.values()):
            return None
        known: dict[str, Any] = {"where": self._where, "grid": self._grid, "local": self._local, "part": 0}
        for dim, size in zip(self._sample_dims, self._grid, strict=True):
            known["part"] = known["part"] * size + self._stage.mesh.coordinate[dim]
        known["batch"], known["own"] = self._batch()
        known["claims"], known["objects"] = [], []
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
                        known["claims"].append([piece, kind, rows, name, leaf.shape, remedy])
                for number, path, size in values.objects() if is_cut else ():
                    name, type_name = begin + values.name(number), type(values.leaves[number].value).__name__
                    known["objects"].append([piece, size, name, path, type_name, values.remedy(number)])
        if checked and self._stage.mesh.size > 1:
            known["digests"] = {
                kind: [self._digest(kind, own=own) for own in (False, True)]
                for kind in _WHAT
                if self._given[kind]
            }
        return known

    def weight_ahead(self) -> float | None:
        """The weight that this rank adds to that of the step, by ``weight_fn``; None where it is not known.
        Ranks that have the same loss each add a part of its weight."""
        stage, total = self._stage, 0.0
        if not self.loss.knows_weight or not self._given["target"]:
            return None
        for values in self._given["target"]:
            flats: list[list[Any]] = []
            for leaf in values.leaves:
                own = self._is_own("target", leaf)
                value = self._here(leaf, own=own)
                cuts = [value]
                if "target" not in self._pieces:
                    total_rows = 0 if leaf.dim is None else _extent(leaf, own=own)
                    rows = sizes_of_parts(total_rows, self._microbatches)
                    cuts = _microbatches(leaf, value, rows, None, own=own)
                flats.append(
                    [self._share("target", leaf, each, leaf.rows if own else None)[0] for each in cuts]
                )
            for flat in zip(*flats, strict=True):
                total += self.loss.weight_of(values.rebuilt(list(flat))[0])
        apart = [stage.mesh.shape[dim] for dim in stage.loss_dims]
        return total * math.prod(apart) / stage.mesh.size

    def _digest(self, kind: str, *, own: bool) -> str:
        """A name for the samples that all ranks of the stage were given; or, own, for those that only ranks
        with the same part of the batch were given. Other DTensors are left out: their parts may differ."""
        found = []
        for values in self._given[kind]:
            for leaf in values.by_name():
                shared = not own and not isinstance(leaf.value, DTensor) and leaf.dim is not None
                if own if self._is_own(kind, leaf) else shared:
                    found.append([leaf.top, *digest_of(leaf.value)])
        return hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()

    # ---- once they agreed --------------------------------------------------------------------------------

    def take(self, samples: Sequence[int], dealt: Mapping[str, Any] | None) -> None:
        """Cuts all that was given into micro-batches, and takes this rank's part of each.

        Args:
            samples: of each micro-batch, on all ranks.
            dealt: where ranks of the first stage give samples of their own: "rows", how many each part of
                the batch has in each micro-batch, and "grid", over how many ranks in each dimension they are.
        """
        order = None if dealt is None else _order(dealt["rows"])
        keeps = dealt is not None and dealt["grid"] == self._grid
        for args, shardings in self._cut("args", samples, order, keeps=keeps):
            self._arguments.append(list(args))
            self._argument_shardings.append(shardings)
        self._keywords = [named for named, _ in self._cut("kwargs", samples, order, keeps=keeps)]
        targets = [each[0] for each, _ in self._cut("target", samples, order, keeps=keeps)]
        self.loss.targets = targets or None

    def _cut(
        self, kind: str, samples: Sequence[int], order: torch.Tensor | None, *, keeps: bool
    ) -> list[tuple[Any, list[Sharding]]]:
        """This rank's part of each micro-batch, and how its tensors are laid out. order: in which the samples
        of whole values come. keeps: values that are this rank's own samples stay here."""
        several = self._given[kind]
        owns = [[keeps and self._is_own(kind, leaf) for leaf in values.leaves] for values in several]
        flats = [
            [self._here(leaf, own=own) for leaf, own in zip(values.leaves, mine, strict=True)]
            for values, mine in zip(several, owns, strict=True)
        ]
        if kind not in self._pieces:
            flats = [
                list(each)
                for values, mine, flat in zip(several, owns, flats, strict=True)
                for each in zip(
                    *(
                        _microbatches(leaf, value, samples, None if own else order, own=own)
                        for leaf, value, own in zip(values.leaves, flat, mine, strict=True)
                    ),
                    strict=True,
                )
            ] or [[] for _ in range(self._microbatches) if several]
        found = []
        for number, flat in enumerate(flats):
            at = number if kind in self._pieces else 0
            shares = [
                self._share(kind, leaf, value, samples[number] if own else None)
                for leaf, value, own in zip(several[at].leaves, flat, owns[at], strict=True)
            ]
            rebuilt = several[at].rebuilt([local for local, _ in shares])
            found.append((rebuilt, [each for _, each in shares if each is not None]))
        return found

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
        self,
        inputs: Sequence[Mapping[int, StageValue]],
        samples: Sequence[int],
        alike: bool,
        as_torch: bool,
    ) -> None:
        """Returns what this rank counts in the step.

        Args:
            inputs: of each micro-batch, what other stages send for it; the same object for the same shapes.
            samples: of each micro-batch, on all ranks.
            alike: every micro-batch that has samples counts the same, however many they are.
            as_torch: losses are returned as the function made them, and gradients scaled once, at the end.
        """
        stage, known = self._stage, dict[int, tuple[Fraction, Fraction]]()
        of_loss, of_stage = [], []
        for number, values in enumerate(inputs):
            key = id(values) if values else -number - 1
            if key not in known:  # worth it: this runs for every micro-batch
                shardings = self._sharded(number, values)
                # DTensors compute what all ranks of the mesh do together.
                parts = Fraction(1) if stage.use_dtensor else part_of(stage, stage.data_dims, shardings)
                known[key] = part_of(stage, stage.loss_dims, shardings), parts
            of_loss.append(known[key][0])
            of_stage.append(known[key][1])
        degree = 1 if stage.use_dtensor else stage.batch_parts
        scaled = self._scale_grads
        self.scale = GradientScale(
            of_stage,
            microbatch_weights(samples, alike or as_torch, scaled),
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

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        return self._keywords[microbatch] if self._keywords else {}

    def merged(self, spec: Any) -> Any:
        """The outputs, micro-batches joined as torch.distributed.pipelining does; a list of them where they
        differ in more than their number of samples, or have none."""
        outputs = self._stage.output_chunks
        kinds = {str(tree_map(_kind, output)) for output in outputs}
        joined = len(kinds) == 1 and "('tensor',)" not in next(iter(kinds))
        return merge_chunks(outputs, spec) if joined or spec is not None else list(outputs)


def _split_by_samples(stage: PipelineStage) -> tuple[Placements, Placements]:
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


def _microbatches(
    leaf: Leaf, value: Any, samples: Sequence[int], order: torch.Tensor | None, *, own: bool
) -> list[Any]:
    """A value cut like the samples. order: in which the samples of a whole value come."""
    if leaf.dim is None:
        return [value] * len(samples)
    rows, total = int(extent(value, leaf.dim)), sum(samples)
    if own or total == 0 or rows % total:
        return divided(value, leaf.dim, sizes_of_parts(rows, len(samples)))
    if order is not None and rows == total:
        value = picked(value, leaf.dim, order)
    return divided(value, leaf.dim, [rows // total * each for each in samples])


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


class Arriving:
    """The values that such a function waits for first; torch has works of torch.distributed there."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.wait = settle


@dataclass(slots=True)
class Functions:
    """The functions of a step.

    fused: of the first of the actions that run as one: the function, and all of them. inside: all of those.
    forward_arriving, backward_arriving: by stage and micro-batch. gathering: by the action before which they
    are called, those for UNSHARD and RESHARD, with torch's action; under None those behind the last action.
    """

    by_kind: dict[ActionKind, Callable[[Action], None]] = field(default_factory=dict)
    fused: dict[Action, tuple[Callable[[], None], list[Action]]] = field(default_factory=dict)
    inside: frozenset[Action] = frozenset()
    forward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)
    backward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)

    gathering: dict[Action | None, list[tuple[Any, Callable[[], None]]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_kind or self.fused or self.gathering)


def functions_of(schedule: Any) -> Mapping[Any, Callable[..., None]]:
    """By torch's kind of action."""
    return getattr(schedule, "_comp_type_to_function_map", {})


def functions_for(
    schedule: Any,
    given: GivenOrder | None,
    feeds: Mapping[int, StepFeed],
    row: Sequence[Action],
    place: tuple[int, int],
    *,
    train: bool,
) -> Functions:
    """Functions of one step; the schedule gets what torch's functions look at.

    row: what this rank runs. place: number of the row, and how many there are.
    """
    found, registered = Functions(), functions_of(schedule)
    if not registered:
        return found
    first = next(iter(feeds.values()))
    targets = [feed.loss.targets for feed in feeds.values() if feed.loss.targets is not None]
    context = torch_schedules._PipelineContext(
        schedule,
        [tuple(feeds[0].arguments(number)) if 0 in feeds else () for number in range(first.count)],
        [dict(first.keywords(number)) for number in range(first.count)],
        list(targets[0]) if targets else None,
    )
    schedule.fwd_recv_ops, schedule.bwd_recv_ops = found.forward_arriving, found.backward_arriving
    schedule.backward_counter.clear()
    both = registered.get(torch_schedules.OVERLAP_F_B)
    if both is not None and given is not None and train:
        for start, (whole, parts) in given.pairs.items():
            found.fused[start] = _call(both, whole, context), parts
        found.inside = frozenset(part for _, parts in given.pairs.values() for part in parts)
    for kind, run in registered.items():
        if kind.value in ActionKind.__members__:
            found.by_kind[ActionKind[kind.value]] = _call_for(run, context)
    for before, action in _gathering(schedule._gathering, given, row, place):
        if action.computation_type in registered:
            run = _call(registered[action.computation_type], action, context)
            found.gathering.setdefault(before, []).append((action, run))
    return found


def _gathering(
    options: Gathering, given: GivenOrder | None, row: Sequence[Action], place: tuple[int, int]
) -> list[tuple[Action | None, Any]]:
    """torch's UNSHARD and RESHARD in their order, each with the action of the row that it comes before: where
    a given order with transfers has them, else where torch would put them."""
    order: list[Any] = [torch_action(each) for each in row if each.kind.is_compute]
    if given is not None:
        order = given.row_of({each.stage for each in row})
    if given is None or not given.lowered:
        order = with_gathering(order, options, *place)
    runs = frozenset(row)
    before: Action | None = None
    found: list[tuple[Action | None, Any]] = []
    for each in reversed(order):
        if each is None:
            continue
        if each.computation_type in (torch_schedules.UNSHARD, torch_schedules.RESHARD):
            found.append((before, each))
        else:
            before = next((part for part in parts_of(each) if part in runs), before)
    return found[::-1]


def _call(run: Callable[..., None], whole: Any, context: Any) -> Callable[[], None]:
    return lambda: run(whole, context)


def _call_for(run: Callable[..., None], context: Any) -> Callable[[Action], None]:
    return lambda action: run(torch_action(action), context)
