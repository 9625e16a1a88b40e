"""The thread of a rank that receives weights while it serves others."""

from __future__ import annotations

import threading

import torch

from ..base.observe import log
from ..groups.shortage import no_thread
from .state_background import behind, own_stream
from .weight_side import Side

__all__ = ["Receiver"]

_OP = "WeightSync"


class Receiver:
    """Takes part in every push. Between two it waits in the rendezvous store, on a connection of its own, and
    needs no CPU time."""

    def __init__(self, side: Side, on_gpu: bool) -> None:
        """on_gpu: it receives there, behind what the stream of this thread holds by then."""
        self._side = side
        gpu = on_gpu and torch.cuda.is_available()
        self._stream = torch.cuda.current_stream() if gpu else own_stream()
        self._thread = threading.Thread(target=self._run, name="meshcast-weights", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            rank = self._side.parent.rank
            raise no_thread("a WeightSync receives", rank=rank, op=_OP, phase="start") from error

    def join(self, seconds: float) -> None:
        """Waits until it has ended, after Side.leave() and Side.end()."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        side = self._side
        with behind(self._stream):
            while not side.leaving() and not side.buffers.over:
                try:
                    side.received()
                except Exception as error:
                    log.warning("rank %d: %s: %s", side.parent.rank, _OP, error)
                    if not side.buffers.over:  # the next pull raises it, and pushes go on
                        side.buffers.refuse(error)
