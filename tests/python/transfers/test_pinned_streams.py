"""What a staging asks of torch.cuda, in which order, with a torch.cuda that only writes it down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshcast.transfers.pinned import CudaCopies

Log = list[tuple[Any, ...]]


class Tensor:
    def __init__(self, log: Log, name: str, is_cpu: bool) -> None:
        self.log, self.name, self.is_cpu = log, name, is_cpu

    def copy_(self, from_: Tensor, *, non_blocking: bool) -> None:
        assert torch.is_inference_mode_enabled(), "a tensor made in inference mode could not be written"
        self.log.append(("copy", self.name, from_.name, non_blocking))

    def record_stream(self, stream: Stream) -> None:
        self.log.append(("keep", self.name, stream.name))


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: object) -> None:
        self.log.append(("wait", self.name, event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    calls: Log = []

    class Event:
        def record(self, stream: Stream) -> None:
            calls.append(("record", stream.name, self))

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        calls.append(("enter", chosen.name))
        yield
        calls.append(("leave", chosen.name))

    @contextlib.contextmanager
    def device(chosen: int) -> Iterator[None]:
        calls.append(("on", chosen))
        yield
        calls.append(("off", chosen))

    made: list[str] = []

    def new_stream(device: int) -> Stream:
        made.append(f"side {len(made)} of {device}")
        return Stream(calls, made[-1])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(calls, f"current of {device}"))
    return calls


def test_copies_run_behind_the_event_on_streams_of_their_own(log: Log) -> None:
    copies, after = CudaCopies(), object()
    host, gpu = Tensor(log, "host", True), Tensor(log, "gpu", False)
    for to, from_, side in ((host, gpu, "side 0 of 3"), (gpu, host, "side 1 of 3")) * 2:
        log.clear()
        event = copies.copy(3, [(to, from_), (to, from_)], after)  # type: ignore[arg-type, list-item]
        moved = [("copy", to.name, from_.name, True), ("keep", "gpu", side)]
        before = [("on", 3), ("enter", side), ("wait", side, after)]
        assert log == [*before, *moved, *moved, ("record", side, event), ("leave", side), ("off", 3)]
    copies.copy(1, [(host, gpu)], after)  # type: ignore[arg-type, list-item]
    assert log[-2:] == [("leave", "side 2 of 1"), ("off", 1)]


def test_callers_are_marked_and_follow_on_their_current_stream(log: Log) -> None:
    copies = CudaCopies()
    event = copies.mark(2)
    copies.follow(2, event)
    assert log == [("record", "current of 2", event), ("wait", "current of 2", event)]


def test_memory_is_pinned_and_a_capture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from and to pageable memory would block the host; in a capture they must not be made at all."""
    copies, asked = CudaCopies(), []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: asked.append((shape, options)))
    copies.pinned(4097)
    assert asked == [((4097,), {"dtype": torch.uint8, "pin_memory": True})]
    for captured in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert copies.capturing() is captured
