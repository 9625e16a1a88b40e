"""Which buffer of a WeightSync is served, whole, or being written."""

from __future__ import annotations

import threading
import time

import pytest
from meshcast.errors import AbortedError, DeadlineExceededError, MeshcastError, PlanMismatchError
from meshcast.resharding.state_run import ReshardedState
from meshcast.resharding.weight_buffers import Buffer, Buffers, WeightStats


def arrives(buffers: Buffers, version: int) -> Buffer:
    buffer = buffers.claim()
    buffers.tear(buffer)
    buffers.fill(buffer, ReshardedState(), {}, {}, WeightStats(version, 0, 0, 0.0, 0.0))
    return buffer


def take(buffers: Buffers, wanted: int | None = None, limit: float = 0.0) -> int:
    return buffers.take(wanted, time.monotonic() + limit)


def test_what_is_served_is_never_written() -> None:
    buffers = Buffers(2, 0)
    first = arrives(buffers, 1)
    second = arrives(buffers, 2)  # nobody has pulled 1, which is still whole
    assert second is not first
    assert take(buffers) == 2
    assert buffers.claim() is first
    buffers.release()
    assert arrives(buffers, 3) is first
    assert arrives(buffers, 4) is first  # in place of 3
    assert buffers.version() == 2
    assert take(buffers, 4) == 4
    assert arrives(buffers, 5) is second


def test_a_version_is_not_taken_while_its_buffer_is_being_written() -> None:
    buffers = Buffers(2, 0)
    arrives(buffers, 1)
    assert take(buffers) == 1
    arrives(buffers, 2)
    buffers.claim()
    assert take(buffers) == 1
    buffers.release()  # nothing was written
    assert take(buffers) == 2


def test_only_one_buffer_is_torn_until_it_is_whole() -> None:
    buffers = Buffers(1, 0)
    with pytest.raises(MeshcastError, match="no version has been pulled"):
        buffers.state()
    arrives(buffers, 1)
    assert take(buffers) == 1
    buffers.tear(buffers.claim())
    with pytest.raises(MeshcastError, match=r"torn.*after version 1"):
        buffers.state()
    buffers.release()
    with pytest.raises(MeshcastError, match="torn"):
        buffers.state()
    assert buffers.version() is None
    arrives(buffers, 3)
    assert take(buffers) == 3
    buffers.state()


def test_a_refused_push_is_told_once() -> None:
    buffers = Buffers(2, 0)
    arrives(buffers, 1)
    assert take(buffers) == 1
    buffers.refuse(PlanMismatchError("unlike"))
    assert take(buffers, 1) == 1
    with pytest.raises(PlanMismatchError, match="unlike"):
        take(buffers)
    assert take(buffers) == 1
    buffers.refuse(PlanMismatchError("unlike"))
    arrives(buffers, 2)
    assert take(buffers) == 2
    assert take(buffers) == 2


def test_what_is_whole_is_taken_after_the_end() -> None:
    buffers = Buffers(2, 0)
    arrives(buffers, 1)
    buffers.end(AbortedError("closed"))
    buffers.end(AbortedError("later"))
    assert take(buffers) == 1
    with pytest.raises(AbortedError, match="closed"):
        take(buffers)
    assert take(buffers, 1) == 1
    buffers.state()


def test_a_wait_ends_with_a_version_or_its_limit() -> None:
    buffers = Buffers(2, 0)
    with pytest.raises(DeadlineExceededError, match="any version: no rank has pushed one"):
        take(buffers, None, 0.05)
    buffers.tear(buffers.claim())
    with pytest.raises(DeadlineExceededError, match="version 7 or a newer one: a push is in flight"):
        take(buffers, 7, 0.05)
    buffers.release()
    arrives(buffers, 6)
    threading.Timer(0.1, lambda: arrives(buffers, 7)).start()
    assert take(buffers, 7, 10.0) == 7
