"""The wirings of a pipeline: one for all micro-batches of a shape.

Before every step the ranks agree on what it is (`agree_on_step`), and meet once more for each shape of
micro-batches that is new, to find the shapes of all values and compile their transfers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from meshcast.errors import LayoutError
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.shared import SharedGradients
from meshcast.pipelining.step import StepFeed
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.wiring import Wiring, connect
from meshcast.transfers.persistent import PersistentTransfer

__all__ = ["Wirings", "agree_on_step"]

_KEPT = 64  # combinations of shapes whose transfers stay compiled; of more, those not used for longest go


def agree_on_step(said: dict[int, Any]) -> dict[str, Any]:
    """What the first rank makes of all ranks' words on a step.

    Each says {"refused": text}, or "mode" (train or eval), "shapes" (a name for those of each micro-batch),
    "alike", "weighted", "order" (a name for actions that were given, not built) and, on the first stage,
    "samples" (how many each micro-batch has). The answer has the
    combined names, or who refused what.
    """
    refused = {rank: each["refused"] for rank, each in said.items() if "refused" in each}
    if not refused:
        modes = {rank: each["mode"] for rank, each in said.items()}
        first = min(modes)
        other = next((rank for rank, mode in modes.items() if mode != modes[first]), None)
        if other is not None:
            refused = {
                first: f"the ranks of a pipeline make unlike calls: rank {first} calls {modes[first]}, rank "
                f"{other} calls {modes[other]}"
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
    if refused:
        return {"refused": [[rank, text] for rank, text in sorted(refused.items())]}
    known = [each["weighted"] for each in said.values() if each["weighted"] is not None]
    keys = []
    for names in zip(*(said[rank]["shapes"] for rank in sorted(said)), strict=True):
        keys.append(hashlib.blake2b(" ".join(names).encode(), digest_size=8).hexdigest())
    samples = [each["samples"] for each in said.values() if each["samples"] is not None]
    return {
        "keys": keys,
        "samples": samples[0],
        "alike": any(each["alike"] for each in said.values()),
        "weighted": known[0] if known else None,
    }


class Wirings:
    """Those of one schedule on one rank.

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
        self._first: dict[int, list[Any]] = {}  # by stage, the shapes of the first step's micro-batches
        self._meetings = 0

    @property
    def shared(self) -> SharedGradients | None:
        """Of the shared parameters; None before the first step."""
        return next(iter(self._known.values())).shared if self._known else None

    @property
    def last(self) -> Wiring | None:
        """That of the last micro-batch of the last step."""
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
            expected = self._first.setdefault(index, feed.shapes(0))
            for number in range(feed.count):
                found = feed.shapes(number)
                if found != expected and not (cut and _but_for_samples(found) == _but_for_samples(expected)):
                    raise LayoutError(
                        f"rank {self._rank}, stage {index}: micro-batch {number} has shapes "
                        f"{found}, the first one had {expected}; the transfers are compiled "
                        "for one shape. Pad it, or make the schedule with varying_shapes=True",
                        rank=self._rank,
                        op="pipeline",
                    )

    def of_step(
        self, keys: list[str], samples: list[int], feeds: Mapping[int, StepFeed], table: StageTable
    ) -> list[Wiring]:
        """One for each micro-batch. Called by all ranks, with the names that they agreed on. Raises Refused
        where a rank cannot take a shape."""
        for number, key in enumerate(keys):
            if key not in self._known:
                self._known[key] = self._connect(feeds, table, number, samples[number] == 0)
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
        self, feeds: Mapping[int, StepFeed], table: StageTable, microbatch: int, everywhere_empty: bool
    ) -> Wiring:
        topic = f"{self._meetings}/"
        self._meetings += 1
        args = feeds[0].arguments(microbatch) if 0 in feeds else []
        kwargs = {index: feed.keywords(microbatch) for index, feed in feeds.items()}
        try:
            # An evaluation may be the first to come, and steps that train use its wiring.
            with torch.inference_mode(False):
                given, named = tree_map_only(torch.Tensor, _trainable, (args, kwargs))
                return connect(
                    self._stages,
                    table,
                    self._board,
                    given,
                    named,
                    self._timeout,
                    topic,
                    self.shared,
                    everywhere_empty,
                )
        except BaseException as error:
            shapes = [f"shapes/{index}{which}" for index in self._stages for which in ("", "/data")]
            for name in (*shapes, "checked"):
                self._board.fail(f"{topic}{name}", str(error) or type(error).__name__)
            raise


def _trainable(value: torch.Tensor) -> torch.Tensor:
    """Of the same shape, if autograd could not take the value itself: only shapes matter here."""
    return torch.empty_like(value) if value.is_inference() else value


def _but_for_samples(shapes: list[Any]) -> list[Any]:
    """Shapes without their first dimension."""
    return [[*shape[1:]] if len(shape) > 1 else shape for shape in shapes]
