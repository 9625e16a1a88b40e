"""EdgeTransfers: those of one edge bundle, or of one link's gradients, one for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshcast.pipelining.deliveries import Delivery
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.transfers.handle import Handle
from meshcast.transfers.transfer import PersistentTransfer

__all__ = ["Arrival", "EdgeTransfers", "LocalShape"]

LocalShape = tuple[tuple[int, ...], torch.dtype]  # local shape and type

# A transfer to wait for, unless the value was here already, and a tensor for each delivery.
Arrival = tuple[Handle[Any] | None, list[torch.Tensor]]


class EdgeTransfers:
    """One transfer for each micro-batch: the values of a bundle, or the gradients of one link.

    transfer: None where both stages are on the same ranks and every rank keeps what it has: values are handed
    over as they are. number: of the lane they are
    ordered in, the same on all of its ranks.
    """

    def __init__(
        self,
        transfer: PersistentTransfer | None,
        consumers: Sequence[int],
        deliveries: Sequence[Delivery],
        sources: Sequence[LocalShape],
        buffers: Sequence[LocalShape],
        stage: PipelineStage,
        number: int,
    ) -> None:
        self.transfer = transfer
        self.number = number
        self.consumers = consumers
        self.deliveries = deliveries
        self._sources = sources  # of what this rank sends; empty on the receiving side
        self._buffers = buffers  # of what it receives; empty on the sending side
        self._device = stage.device
        self._rank = stage.rank
        # A transfer there need not be over when it has been waited for: wait() orders the compute stream.
        self.on_gpu = stage.device.type == "cuda"
        # Whether a receiver may have to pass values on to another.
        self.relays = any(len(each.layout.ranks) > 1 for each in deliveries)

    def send(self, tensors: Sequence[torch.Tensor], timeout: float) -> Handle[Any]:
        """To other ranks, a tensor for each delivery."""
        assert self.transfer is not None
        return self.transfer.start(tensors, [None] * len(tensors), timeout=timeout)

    def receive(self, timeout: float) -> Arrival:
        """From other ranks."""
        assert self.transfer is not None
        buffers = self._empty()
        return self.transfer.start([None] * len(buffers), buffers, timeout=timeout), buffers

    def hand_over(self, tensors: Sequence[torch.Tensor], timeout: float) -> Arrival:
        """From one stage of these ranks to another."""
        if self.transfer is None:
            return None, list(tensors)
        buffers = self._empty()
        return self.transfer.start(tensors, buffers, timeout=timeout), buffers

    def bytes_sent(self, handle: Handle[Any]) -> int:
        """By this rank in a transfer of these that has been waited for."""
        if self.on_gpu and self.transfer is not None:  # which need not be over
            return self.transfer.plan.bytes_sent(self._rank)
        return int(handle.figures()["bytes_sent"])

    def warm_up(self, timeout: float) -> Handle[Any] | None:
        """On GPUs: a transfer of nothing in particular, started by all ranks of the edge. NCCL makes its
        connections in the first one and blocks the host for them, which in the middle of a step could
        be for a rank that waits for this one."""
        if self.transfer is None or not self.on_gpu:
            return None
        nothing = [None] * len(self.deliveries)
        given = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in self._sources]
        return self.transfer.start(given or nothing, self._empty() or nothing, timeout=timeout)

    def _empty(self) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._buffers]
