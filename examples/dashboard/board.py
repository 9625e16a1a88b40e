"""Figures of meshcast as scalars of TensorBoard. Copy this file into a job of your own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import meshcast


class Board:
    """One rank's figures, step by step.

    writer: a torch.utils.tensorboard.SummaryWriter.

    Figures of an operation are under its name, such as reshard/bytes_sent; those of a pair of ranks under
    pair_0_to_2. Each is that of one step.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._before = meshcast.counters()

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    def step(self, number: int) -> None:
        """Writes what has happened since the last step."""
        now = meshcast.counters()
        found, self._before = now - self._before, now
        for op, call in found.calls.items():
            name = op.replace(" ", "_")
            self._write(name, "calls", call.calls, number)
            self._write(name, "bytes_sent", call.bytes_sent, number)
            self._write(name, "bytes_received", call.bytes_received, number)
            self._write(name, "milliseconds", 1e3 * call.seconds, number)
            self._write(name, "milliseconds_waited", 1e3 * call.waited, number)
            self._write(name, "times_the_bound", call.ratio, number)
            self._write(name, "retries", call.retries, number)
        for (sender, receiver), pair in found.pairs.items():
            self._write(f"pair_{sender}_to_{receiver}", "bytes", pair.bytes, number)
            self._write(f"pair_{sender}_to_{receiver}", "milliseconds_waited", 1e3 * pair.waited, number)

    def _write(self, group: str, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(f"{group}/{name}", value, step)
