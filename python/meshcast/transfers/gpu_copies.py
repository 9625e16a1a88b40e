"""Copies between GPUs and pinned host memory, on streams of their own: what a passage asks of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["COPIES", "Copies", "CudaCopies", "Event"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (to, from)


class Event(Protocol):
    """A point in a stream. query(): whether the GPU has passed it; synchronize(): blocks until it has."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Copies(Protocol):
    """What a passage asks of CUDA. device: index of a GPU. Nothing here blocks the host but pinned()."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8, not initialised."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""

    def mark(self, device: int) -> Event:
        """Behind all that the current stream of the device holds."""

    def copy(self, device: int, pairs: Pairs, after: Event) -> Event:
        """Enqueues copies behind `after`, all in one direction, between tensors of one shape and type, and
        returns the event behind them. The GPU's tensors may be freed at once, the pinned ones not."""

    def follow(self, device: int, event: Event) -> None:
        """Lets what comes next in the current stream wait for the event."""


class CudaCopies:
    """Copies by torch. Each GPU has a stream for each direction, since it has a copy engine for each."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, bool], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self, device: int) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def copy(self, device: int, pairs: Pairs, after: Any) -> Event:
        to_host = pairs[0][0].is_cpu
        stream = self._stream(device, to_host)
        event = torch.cuda.Event()
        # In inference mode, tensors that were made in it may be written as well as others. device() comes
        # first: stream() alone puts a thread back on a GPU that it has never used, which then gets a context.
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(after)
            for to, from_ in pairs:
                to.copy_(from_, non_blocking=True)
                # Its memory comes from the caller's stream, and may go back there before this copy has run.
                (from_ if to_host else to).record_stream(stream)
            event.record(stream)
        return event

    def follow(self, device: int, event: Any) -> None:
        torch.cuda.current_stream(device).wait_event(event)

    def _stream(self, device: int, to_host: bool) -> torch.cuda.Stream:
        with self._lock:
            stream = self._streams.get((device, to_host))
            if stream is None:
                stream = self._streams[device, to_host] = torch.cuda.Stream(device)
            return stream


COPIES: Copies = CudaCopies()
