"""Rows of reshard_state_dict where the store does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from meshcast.errors import DeadlineExceededError
from meshcast.resharding.rows import Rows


class CutOff:
    """A conversation over a connection that has been cut: nothing that is asked of it ends."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.over.wait() and None


def test_no_use_of_the_store_outlives_the_call() -> None:
    """The process group's limit is of no account, where the call's is shorter."""
    conversation = CutOff()
    group = SimpleNamespace(conversation=conversation, timeout=3600.0)
    parent = SimpleNamespace(rank=0, ranks=frozenset({0, 1}), private=lambda *_: group)
    rows = Rows(parent)  # type: ignore[arg-type]
    begin = time.monotonic()
    for use in (
        lambda deadline: rows.post("specs", "text", deadline),
        lambda deadline: rows.read("specs", [1], deadline),
        lambda deadline: rows.forget(deadline),
    ):
        with pytest.raises(DeadlineExceededError, match="the rendezvous store does not answer"):
            use(time.monotonic() + 0.1)
    assert time.monotonic() - begin < 30.0
    conversation.over.set()
