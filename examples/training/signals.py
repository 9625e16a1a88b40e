"""SIGTERM as a request: the step at hand is finished, a checkpoint written, and the run ends."""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Made on the main thread of every rank, before training."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True

    def agreed(self) -> bool:
        """True on every rank once any has been asked to stop: they would wait for one that left alone.
        Collective."""
        flag = torch.tensor(self.received, dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)
