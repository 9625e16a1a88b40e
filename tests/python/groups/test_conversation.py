"""Texts that ranks say through a store, as Python uses them: waits, errors and what ends a wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from meshcast import _C
from meshcast.errors import AbortedError, DeadlineExceededError


@pytest.fixture
def talks() -> list[_C.Conversation]:
    store = dist.HashStore()
    return [_C.Conversation(store, rank, 3) for rank in range(3)]


def test_texts_are_heard_once_all_have_come(talks: list[_C.Conversation]) -> None:
    talks[0].say("a", "x")
    talks[1].say("a", "y: ä")
    talks[1].say("b", "of another topic")
    late = "ranks {missing}, of which {first} is the first, said nothing within {elapsed} s"
    text = r"^ranks \[2\], of which 2 is the first, said nothing within 0\.\d s$"
    with pytest.raises(DeadlineExceededError, match=text) as caught:
        talks[0].hear("a", range(3), time.monotonic() + 0.05, late, "op", "agree")
    found = caught.value
    assert (found.rank, found.peer, found.op, found.phase) == (0, 2, "op", "agree")
    assert found.limit == pytest.approx(0.05, abs=0.04) and found.elapsed is not None
    assert talks[0].silent("a", [2, 0, 1]) == [2]
    comes = threading.Timer(0.05, lambda: talks[2].say("a", ""))
    comes.start()
    said = talks[0].hear("a", [2, 0, 1], None, late, "op", "agree")
    assert said == {2: "", 0: "x", 1: "y: ä"}
    comes.join()
    talks[1].forget("a")
    assert talks[0].heard("a", 1) is None and talks[0].heard("b", 1) == "of another topic"


def test_the_first_proposal_is_the_verdict(talks: list[_C.Conversation]) -> None:
    assert talks[0].verdict("v") == ""
    assert talks[0].await_verdict("v", time.monotonic() + 0.01) == ""
    assert talks[1].verdict("v", "mine") == "mine"
    assert talks[0].verdict("v", "another") == "mine"
    assert talks[0].await_verdict("v", None) == "mine"
    assert [talk.count("c", 1) for talk in talks] == [1, 2, 3]
    for topic in ("v", "c"):
        talks[0].erase(topic)
    assert talks[1].verdict("v") == "" and talks[1].count("c", 0) == 0


@pytest.mark.parametrize("wait", ["hear", "await_verdict"])
def test_a_look_ends_a_wait(talks: list[_C.Conversation], wait: str) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise AbortedError("no more")

    begin = time.monotonic()
    arguments: tuple[Any, ...] = ([1], None, "", "", "") if wait == "hear" else (None,)
    with pytest.raises(AbortedError, match="no more"):
        getattr(talks[0], wait)("a", *arguments, look, 0.1)
    assert time.monotonic() - begin >= 0.2  # not more often than every 0.1 s


class AlarmError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGUSR1, ring)
    rings = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    rings.start()
    yield
    rings.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("alarm")
def test_a_handler_of_a_signal_ends_a_wait_in_which_other_threads_run(talks: list[_C.Conversation]) -> None:
    ran = 0
    over = threading.Event()

    def run() -> None:
        nonlocal ran
        while not over.wait(0.005):
            ran += 1

    other = threading.Thread(target=run)
    other.start()
    try:
        with pytest.raises(AlarmError):
            talks[0].hear("a", [1], None, "", "", "")
    finally:
        over.set()
        other.join()
    assert ran > 2


def test_ranks_are_looked_after_by_what_they_said(talks: list[_C.Conversation]) -> None:
    known = _C.KnownOffers()
    gone: set[str] = set()
    watches = _C.Watches(
        known, lambda said: None if said == "unseen" else lambda: "killed" if said in gone else ""
    )
    talks[0].say("here", "zero")
    talks[2].say("here", "two")
    assert watches.lost(talks[1], "here", [0, 1, 2]) is None
    gone.add("zero")
    assert watches.lost(talks[1], "here", [0, 1, 2]) is None  # rank 2 comes first
    assert watches.lost(talks[1], "here", [0, 2], each=True) == (0, "killed")
    gone.add("two")
    assert watches.lost(talks[1], "here", [0, 1, 2]) == (2, "killed")
    assert watches.lost_soon([0, 1, 2], 1) == (0, "killed")
    fresh = _C.Watches(known, lambda said: lambda: "killed" if said == "earlier" else "")
    assert fresh.lost_soon([0, 1, 2], 1) is None
    known.add({2: "earlier"})
    assert fresh.lost_soon([0, 1, 2], 1) == (2, "killed")
