"""The wirings of a pipeline: one for all micro-batches of a shape.

Before every step the ranks agree on what it is (`agree_on_step`), and meet once more for each shape of
micro-batches that is new, to find the shapes of all values and compile their transfers.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from meshcast.errors import LayoutError
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.parallel import DataUse, Inferred
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.step import StepFeed
from meshcast.pipelining.table import SharedGradients, StageTable
from meshcast.pipelining.wiring import Wiring, connect
from meshcast.transfers.transfer import PersistentTransfer

__all__ = ["Wirings", "agree_on_step", "check_fit"]

_T = TypeVar("_T")
_KEPT = 64  # combinations of shapes whose transfers stay compiled; of more, those not used for longest go


def agree_on_step(said: dict[int, Any]) -> dict[str, Any]:
    """The first rank's answer to what all ranks say about a step.

    Each says {"refused": text}, or "mode" (train or eval), "shapes" (a name for those of each micro-batch),
    "alike", "weighted", "order" (a name for actions that were given, not built), on the first stage
    "samples" (how many each micro-batch has), on the last "weight" (its part, where that is known),
    "as_torch" (no stage has a mesh), and "given" (of each of its stages what `StepFeed.said` says). The
    answer has the combined names and "rows", how many samples each micro-batch really has, "dealt" (see
    `StepFeed.take`), or who refused what.
    """
    refused = {rank: each["refused"] for rank, each in said.items() if "refused" in each}
    if not refused:
        modes = {rank: each["mode"] for rank, each in said.items()}
        first = min(modes)
        other = next((rank for rank, mode in modes.items() if mode != modes[first]), None)
        if other is not None:
            refused = {
                first: f"the ranks of a pipeline make different calls: rank {first} calls {modes[first]}, "
                f"rank {other} calls {modes[other]}"
            }
    if not refused:
        orders = {rank: each["order"] for rank, each in said.items()}
        first = min(orders)
        other = next((rank for rank, order in orders.items() if order != orders[first]), None)
        if other is not None:
            refused = {
                first: f"the ranks of a pipeline disagree on the order of actions: rank {first} has "
                f"{orders[first]}, rank {other} has {orders[other]}"
            }
    rows: list[int] | None = None
    dealt: dict[str, Any] | None = None
    if not refused:
        given = {
            stage: {
                rank: each["given"][stage] for rank, each in said.items() if stage in each.get("given", {})
            }
            for stage in sorted({stage for each in said.values() for stage in each.get("given", {})}, key=int)
        }
        rows, dealt, refused = _batch(given.get("0", {}))
        for stage, entries in given.items():
            if not refused:
                as_torch = all(each.get("as_torch", False) for each in said.values())
                refused = _misfits(stage, entries, rows, dealt, as_torch=as_torch)
    if refused:
        return {"refused": [[rank, text] for rank, text in sorted(refused.items())]}
    known = [each["weighted"] for each in said.values() if each["weighted"] is not None]
    keys = []
    for number, names in enumerate(zip(*(said[rank]["shapes"] for rank in sorted(said)), strict=True)):
        name = " ".join(names)
        if dealt is not None:  # by which all others are cut too
            name += f" {[each[number] for each in dealt['rows']]}"
        keys.append(hashlib.blake2b(name.encode(), digest_size=8).hexdigest())
    samples = [rows] if dealt is not None else []
    samples += [each["samples"] for each in said.values() if each["samples"] is not None]
    weights = [each["weight"] for each in said.values() if each.get("weight") is not None]
    return {
        "keys": keys,
        "samples": samples[0],
        "rows": rows,
        "dealt": dealt,
        "alike": any(each["alike"] for each in said.values()),
        "weighted": known[0] if known else None,
        "weight": sum(weights) if weights else None,
    }


Entries = Mapping[int, Mapping[str, Any]]  # of a stage, what each of its ranks was given
_NAMES = {"args": "arguments", "kwargs": "keyword arguments", "target": "targets"}


def _batch(first: Entries) -> tuple[list[int] | None, dict[str, Any] | None, dict[int, str]]:
    """The number of samples of each micro-batch, None where no value shows it; how they are dealt out where
    ranks give their own; and what does not fit, by rank."""
    if not first:
        return None, None, {}
    leader = min(first)
    told = first[leader]
    for rank, each in first.items():
        if (each["own"], each["batch"] is None) != (told["own"], told["batch"] is None):
            return None, None, {rank: _unlike("0", leader, rank, "arguments")}
    if not told["own"]:
        return told["batch"], None, {}
    grid: list[int] = told["grid"]
    dealt: dict[int, list[int]] = {}
    holders: dict[int, int] = {}
    for rank, each in sorted(first.items()):
        if dealt.setdefault(each["part"], each["batch"]) != each["batch"]:
            return None, None, {rank: _unlike("0", holders[each["part"]], rank, "arguments")}
        holders.setdefault(each["part"], rank)
    matrix = [dealt[part] for part in sorted(dealt)]
    rows = [sum(each) for each in zip(*matrix, strict=True)]
    for number, total in enumerate(rows):
        for part, expected in enumerate(_chunked(total, grid)):
            if matrix[part][number] != expected:
                rank = holders[part]
                return None, None, {
                    rank: f"{first[rank]['where']}: {sum(matrix[part])} samples of its own were given, "
                    f"{matrix[part][number]} of them for micro-batch {number}, where torch.chunk gives "
                    f"{expected} of all {total} to this rank: give all ranks of the stage equally many, the "
                    "last ones fewer or none"
                }  # fmt: skip
    if not sum(rows):
        return (
            None,
            None,
            {leader: f"{told['where']}: the batch has no samples on any rank; give at least one"},
        )
    return rows, {"rows": matrix, "grid": grid}, {}


def _misfits(
    stage: str, entries: Entries, rows: list[int] | None, dealt: Mapping[str, Any] | None, *, as_torch: bool
) -> dict[int, str]:
    """Returns what the ranks of a stage were given that does not fit the batch, or differs between them."""
    found = {}
    for rank, each in sorted(entries.items()):
        expected = rows
        if each["local"] and dealt is None:
            return {
                rank: f"{each['where']}: local_batch=True, but no rank of stage 0 gives samples of its own"
            }
        if each["local"] and dealt is not None:
            if each["grid"] != dealt["grid"]:
                return {
                    rank: f"{each['where']} splits samples over {math.prod(each['grid'])} ranks, stage 0 "
                    f"over {math.prod(dealt['grid'])} ranks: with local_batch both must be the same. Give "
                    "them as DTensors, or whole"
                }
            expected = dealt["rows"][each["part"]]
        text = None if expected is None else _misfit(each, expected, as_torch=as_torch)
        if text is not None:
            found[rank] = text
    # The same on some ranks only: then the ranks were given different values.
    shapes = {rank: [claim[:5] for claim in each["claims"]] for rank, each in entries.items()}
    groups: dict[Any, list[int]] = {}
    for rank, each in sorted(entries.items()):
        groups.setdefault(each["part"] if each["local"] else None, []).append(rank)
    for ranks in groups.values():
        for rank in ranks[1:]:
            if shapes[rank] != shapes[ranks[0]]:
                return {rank: _unlike(stage, ranks[0], rank, "values")}
    if found:
        return found
    for own in (0, 1):
        firsts: dict[Any, int] = {}
        for rank, each in sorted(entries.items()):
            for kind, digests in each.get("digests", {}).items():
                first = firsts.setdefault((kind, each["part"] if own else None), rank)
                other = entries[first]["digests"][kind]
                if digests[own] != other[own]:
                    return {rank: _unlike(stage, first, rank, _NAMES[kind])}
    return {}


def check_fit(given: Mapping[str, Mapping[str, Any]], *, as_torch: bool) -> None:
    """Raises LayoutError for a value of the first stage that does not fit the batch of its own rank: its
    module would fail on it in a way that says less. given: by stage, see `agree_on_step`."""
    first = given.get("0")
    if first is None or first["batch"] is None or (first["own"] and not first["local"]):
        return
    text = _misfit(first, first["batch"], as_torch=as_torch)
    if text is not None:
        raise LayoutError(text, op="pipeline")


def _misfit(given: Mapping[str, Any], rows: Sequence[int], *, as_torch: bool) -> str | None:
    total = sum(rows)
    for piece, kind, found, name, shape, remedy in given["claims"]:
        expected = total if piece < 0 else rows[piece]
        if as_torch and (kind != "target" or (expected and found % expected == 0)):
            continue  # as in torch each is cut by its own size
        if found != expected:
            whose = "the batch" if piece < 0 else f"micro-batch {piece}"
            return (
                f"{given['where']}: {name} has {found} samples (its shape is {tuple(shape)}), {whose} has "
                f"{expected}. Everything without a chunk spec is cut by samples. {remedy}"
            )
    for piece, found, name, path, kind, remedy in given["objects"]:
        if found > 1 and found == (total if piece < 0 else rows[piece]):
            return (
                f"{given['where']}: {name} is of type {kind}, whose {path} has {found} samples, as many as "
                f"the batch. pytree does not see into {kind}, so nothing of it is cut: register it, by "
                "torch.utils._pytree.register_dataclass or register_pytree_node. " + remedy
            )
    return None


def _unlike(stage: str, first: int, second: int, what: str) -> str:
    return (
        f"ranks {first} and {second} of stage {stage} were given different {what}: each takes its part of "
        "the whole, which must be the same on both. If each rank has samples of its own, say so: "
        "step(..., local_batch=True), or give a DTensor that is Shard(0) on the mesh of the stage"
    )


def _chunked(total: int, grid: Sequence[int]) -> list[int]:
    """Sizes of all parts, cut as torch.chunk does along each dimension of the grid in turn."""
    if not grid:
        return [total]
    each = -(-total // grid[0])
    sizes = [min(each, max(0, total - each * index)) for index in range(grid[0])]
    return [part for size in sizes for part in _chunked(size, grid[1:])]


class Wirings:
    """The wirings of one schedule on one rank.

    Args:
        stages: of this rank, by number.
        varying: micro-batches may differ in shape, in a step and from step to step; else in the number of
            their samples only.
    """

    def __init__(
        self, stages: Mapping[int, PipelineStage], board: PipelineBoard, timeout: float, varying: bool
    ) -> None:
        self._stages = stages
        self._board = board
        self._timeout = timeout
        self._varying = varying
        self._rank = next(iter(stages.values())).rank
        self._known: OrderedDict[str, Wiring] = OrderedDict()
        # By the name of a micro-batch's shapes on the first stage, and whether it is the rank's own part: the
        # shapes that came out there.
        self._looked: OrderedDict[tuple[str, bool], Inferred] = OrderedDict()
        # By stage, the shapes of the first step's micro-batches, and these without samples.
        self._first: dict[int, tuple[list[Any], list[Any]]] = {}
        self._meetings = 0

    @property
    def shared(self) -> SharedGradients | None:
        """The gradients of the shared parameters; None before the first step."""
        return next(iter(self._known.values())).shared if self._known else None

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
            for number in range(feed.count):
                found = feed.shapes(number)
                if found != expected and not (cut and feed.shapes_but_for_samples(number) == known):
                    raise LayoutError(
                        f"rank {self._rank}, stage {index}: micro-batch {number} has shapes "
                        f"{found}, the first one had {expected}; the transfers are compiled "
                        "for one shape. Pad it, or make the schedule with varying_shapes=True",
                        rank=self._rank,
                        op="pipeline",
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

    def of_step(
        self, keys: list[str], samples: list[int], feeds: Mapping[int, StepFeed], table: StageTable
    ) -> list[Wiring]:
        """One for each micro-batch. Called by all ranks, with the names that they agreed on. Raises Refused
        where a rank cannot take a shape."""
        for index, feed in feeds.items():
            self._first.setdefault(index, _of_first(feed))
        for number, key in enumerate(keys):
            if key not in self._known:
                self._known[key] = self._connect(feeds, table, keys, number, samples[number] == 0)
            self._known.move_to_end(key)
        wirings = [self._known[key] for key in keys]
        needed = len(set(keys))
        while len(self._known) > max(_KEPT, needed):
            _, oldest = self._known.popitem(last=False)
            for each in oldest.edge_transfers():
                if each.transfer is not None:
                    each.transfer.close()
        return wirings

    def close(self) -> None:
        for transfer in self.transfers():
            transfer.close()

    def abort(self, reason: str) -> None:
        """Makes all ranks that share an edge with this one fail with this reason."""
        for transfer in self.transfers():
            transfer.abort(reason)

    def _connect(
        self,
        feeds: Mapping[int, StepFeed],
        table: StageTable,
        keys: Sequence[str],
        microbatch: int,
        everywhere_empty: bool,
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
                    keys,
                    microbatch,
                )
                return connect(
                    self._stages,
                    table,
                    self._board,
                    args,
                    kwargs,
                    again,
                    self._timeout,
                    topic,
                    self.shared,
                    everywhere_empty,
                    self._looked.get(_looks(feeds[0])[microbatch]) if 0 in feeds else None,
                )
        except BaseException as error:
            shapes = [f"shapes/{index}{which}" for index in self._stages for which in ("", "/data")]
            for name in (*shapes, "checked"):
                self._board.fail(f"{topic}{name}", str(error) or type(error).__name__)
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
    return feed.shapes(0), feed.shapes_but_for_samples(0)
