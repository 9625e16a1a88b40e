"""Texts that ranks post in a store, and gather."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from meshcast.errors import AbortedError
from meshcast.groups.board import Board, NotPostedError


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
