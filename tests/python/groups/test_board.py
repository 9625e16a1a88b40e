"""What ranks tell each other through a store, and the meeting of a group: all come to one verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch.distributed as dist
from meshcast.errors import AbortedError, DeadlineExceededError, PeerLostError
from meshcast.groups.board import Board, NotPostedError, Watches, meet


class Interrupted:
    """A store in which something happens right after the first look at a count, which still sees the past."""

    def __init__(self, store: dist.Store, key: str, action: Callable[[], object]) -> None:
        self._store, self._key, self._action = store, key, action

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def add(self, key: str, more: int) -> int:
        found = self._store.add(key, more)
        if (key, more) == (self._key, 0):
            self._key = ""
            self._action()
        return found


def met(
    store: object,
    rank: int,
    seconds: float = 5.0,
    closing: str = "",
    ranks: tuple[int, ...] = (3, 5),
    gone: Sequence[str] = (),
    known: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """One rank of a group of two meets the other, within so many seconds. gone: texts of ranks that died."""
    limit = time.monotonic() + seconds
    watches = Watches(known or {}, lambda text: lambda: f"{text}: refused" if text in gone else "")
    return meet(Board(store, rank), ranks, f"text of {rank}", limit, lambda: closing, watches)


def test_ranks_that_met_have_everybodys_text() -> None:
    store = dist.HashStore()
    seen: list[dict[int, str]] = []
    found = met(Interrupted(store, "members", lambda: seen.append(met(store, 5))), 3)
    assert seen == [found]
    assert found == {3: "text of 3", 5: "text of 5"}


def test_a_rank_that_is_told_to_leave_still_connects_if_the_others_do() -> None:
    """The other rank saw all members and connects; were this one to leave, the other would wait for it until
    its deadline."""
    store = dist.HashStore()
    seen: list[dict[int, str]] = []
    found = met(Interrupted(store, "members", lambda: seen.append(met(store, 5))), 3, closing="out of luck")
    assert seen == [found]


def test_the_rank_that_leaves_first_takes_the_others_along() -> None:
    store = dist.HashStore()
    with pytest.raises(AbortedError, match="rank 3: out of luck"):
        met(store, 3, closing="out of luck")
    with pytest.raises(AbortedError, match="rank 3: out of luck"):
        met(store, 5)


def test_a_late_rank_finds_a_failed_group() -> None:
    store = dist.HashStore()
    with pytest.raises(DeadlineExceededError, match=r"ranks \[5\] did not call") as caught:
        met(store, 3, 0.05)
    assert caught.value.peer == 5
    with pytest.raises(AbortedError, match=r"rank 3: ranks \[5\] did not call"):
        met(store, 5)


def test_a_death_is_seen_by_the_rank_before_it_and_told_to_all() -> None:
    store = dist.HashStore()
    Board(store, 5).post("member", "text of 5")
    found: list[Exception] = []

    def third() -> None:
        with pytest.raises(PeerLostError) as caught:
            met(store, 7, ranks=(3, 5, 7, 9))  # looks after rank 3 alone, which lives
        found.append(caught.value)

    other = threading.Thread(target=third)
    other.start()
    with pytest.raises(PeerLostError, match=r"rank 3 lost rank 5 .*text of 5: refused") as caught:
        met(store, 3, ranks=(3, 5, 7, 9), gone=["text of 5"])
    other.join()
    assert [each.peer for each in (caught.value, *found)] == [5, 5]
    with pytest.raises(AbortedError, match="rank 3 lost rank 5"):  # it comes late
        met(store, 9, ranks=(3, 5, 7, 9))


def test_a_rank_known_from_earlier_is_looked_after_before_it_comes() -> None:
    with pytest.raises(PeerLostError, match=r"lost rank 5 .*earlier text: refused"):
        met(dist.HashStore(), 3, gone=["earlier text"], known={5: "earlier text"})
    with pytest.raises(DeadlineExceededError):
        met(dist.HashStore(), 3, 0.2, gone=["earlier text"])


def test_texts_are_gathered_once_all_are_there() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank) for rank in range(3)]
    boards[0].post("a", "x")
    boards[1].post("a", "y")
    boards[1].post("b", "of another topic")
    with pytest.raises(NotPostedError, match=r"ranks \[2\] posted nothing within 0\.") as caught:
        boards[0].gather("a", range(3), time.monotonic() + 0.05)
    assert caught.value.ranks == [2]
    late = threading.Timer(0.05, lambda: boards[2].post("a", "z"))
    late.start()
    assert boards[0].gather("a", [2, 0, 1], time.monotonic() + 10) == {2: "z", 0: "x", 1: "y"}
    late.join()
    boards[1].forget("a")
    assert not boards[0].has("a", 1) and boards[0].has("b", 1)


def test_a_gathering_ends_where_waiting_has_lost_its_sense() -> None:
    def check() -> None:
        raise AbortedError("no more")

    board = Board(dist.HashStore(), 0)
    with pytest.raises(AbortedError, match="no more"):
        board.gather("a", [1], time.monotonic() + 10, check)
