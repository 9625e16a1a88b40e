"""The wirings of a pipeline: one for all micro-batches, or one for each shape of theirs that turned up.

With varying shapes the ranks tell each other before every step which shapes its micro-batches have (one
message of each rank and one look at that of every other, through the store), and meet once more for each
combination that is new, to find the shapes of all values and compile their transfers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from meshcast.errors import LayoutError
from meshcast.pipelining.exchange import Exchange
from meshcast.pipelining.shared import SharedGradients
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.step import StepFeed
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.wiring import Wiring, connect
from meshcast.transfer import Transfer

__all__ = ["Wirings"]

_KEPT = 64  # combinations of shapes whose transfers stay compiled; of more, those not used for longest go
_Key = tuple[str, ...]


class Wirings:
    """Those of one schedule on one rank.

    Args:
        stages: of this rank, by number.
        varying: micro-batches may differ in shape, in a step and from step to step.
    """

    def __init__(
        self, stages: Mapping[int, PipelineStage], exchange: Exchange, timeout: float, varying: bool
    ) -> None:
        self._stages = stages
        self._exchange = exchange
        self._timeout = timeout
        self._varying = varying
        self._rank = next(iter(stages.values())).rank
        self._known: OrderedDict[_Key, Wiring] = OrderedDict()
        self._first: dict[int, list[Any]] = {}  # by stage, the shapes of the first step's micro-batches
        self._steps = 0
        self._connections = 0

    @property
    def shared(self) -> SharedGradients | None:
        """Of the shared parameters; None before the first step."""
        return next(iter(self._known.values())).shared if self._known else None

    @property
    def last(self) -> Wiring | None:
        """That of the last micro-batch of the last step."""
        return next(reversed(self._known.values()), None)

    def transfers(self) -> list[Transfer]:
        return [transfer for wiring in self._known.values() for transfer in wiring.transfers()]

    def of_step(self, feeds: Mapping[int, StepFeed], table: StageTable, microbatches: int) -> list[Wiring]:
        """One for each micro-batch. Called by all ranks. Raises LayoutError for shapes that differ from those
        of the first step, unless they may vary."""
        if self._varying:
            keys = self._exchanged(feeds, microbatches)
        else:
            self._check_shapes(feeds)
            keys = [()] * microbatches
        for number, key in enumerate(keys):
            if key not in self._known:
                self._known[key] = self._connect(feeds, table, number)
            self._known.move_to_end(key)
        wirings = [self._known[key] for key in keys]
        needed = len(set(keys))
        while len(self._known) > max(_KEPT, needed):
            _, oldest = self._known.popitem(last=False)
            for lane in oldest.lanes():
                if lane.transfer is not None:
                    lane.transfer.close()
        self._steps += 1
        return wirings

    def fail(self, cause: str) -> None:
        """Tells ranks that wait for this one in `of_step`."""
        self._exchange.fail(self._topic(self._steps), cause)
        topic = f"{self._connections}/"
        for name in (*(f"shapes/{index}" for index in self._stages), "checked"):
            self._exchange.fail(f"{topic}{name}", cause)

    def close(self) -> None:
        for transfer in self.transfers():
            transfer.close()

    def abort(self, reason: str) -> None:
        """Makes all ranks that share a lane with this one fail with this reason."""
        for transfer in self.transfers():
            transfer.abort(reason)

    def _connect(self, feeds: Mapping[int, StepFeed], table: StageTable, microbatch: int) -> Wiring:
        wiring = connect(
            self._stages,
            table,
            self._exchange,
            feeds[0].arguments(microbatch) if 0 in feeds else [],
            {index: feed.keywords(microbatch) for index, feed in feeds.items()},
            self._timeout,
            f"{self._connections}/",
            self.shared,
        )
        self._connections += 1
        return wiring

    def _exchanged(self, feeds: Mapping[int, StepFeed], microbatches: int) -> list[_Key]:
        """What all ranks have of each micro-batch."""
        mine = [
            [[index, feed.shapes(number, keywords=True)] for index, feed in sorted(feeds.items())]
            for number in range(microbatches)
        ]
        self._exchange.publish(self._topic(self._steps), {"shapes": mine})
        found = self._exchange.collect(self._topic(self._steps))
        if self._steps:  # all have read that one, or they would not be here
            self._exchange.forget(self._topic(self._steps - 1))
        return [
            tuple(str(found[rank]["shapes"][number]) for rank in sorted(found))
            for number in range(microbatches)
        ]

    def _check_shapes(self, feeds: Mapping[int, StepFeed]) -> None:
        for index, feed in feeds.items():
            expected = self._first.setdefault(index, feed.shapes(0))
            for number in range(feed.count):
                if feed.shapes(number) != expected:
                    raise LayoutError(
                        f"rank {self._rank}, stage {index}: micro-batch {number} has shapes "
                        f"{feed.shapes(number)}, the first one had {expected}; the transfers are compiled "
                        "for one shape. Pad it, or make the schedule with varying_shapes=True",
                        rank=self._rank,
                        op="pipeline",
                    )

    @staticmethod
    def _topic(step: int) -> str:
        return f"micro-batches/{step}"
