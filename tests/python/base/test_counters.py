"""Counters add up what calls moved, whoever counts, and keep it when a transfer is gone."""

from __future__ import annotations

import os
import threading

import meshcast
import pytest
from meshcast._C import Flight, Members, Traffic

# Rank 1 gets 5 messages of 100 bytes in all from rank 0 and sends 2 on, of 30 bytes.
MOVED = [(0, 1, 5, 100), (1, 2, 2, 30)]


def traffic(op: str, bound: float = 0.5) -> Traffic:
    return Traffic(op, bound, 1, MOVED)


def since(before: meshcast.Counters, op: str) -> meshcast.CallCounters:
    return (meshcast.counters() - before).calls[op]


def test_calls_add_up_by_operation_and_pair() -> None:
    before = meshcast.counters()
    one, other = traffic("test sum"), traffic("test sum", 0.0)
    one.ended(2.0, 1.0)
    one.ended(1.0, 0.5)
    other.ended(4.0, 4.0)  # its plan has no bound: it does not count for the ratio
    one.failed()
    one.again()
    found = since(before, "test sum")
    assert (found.calls, found.failed, found.retries) == (3, 1, 1)
    assert (found.messages, found.bytes_sent, found.bytes_received, found.bytes) == (21, 90, 300, 390)
    assert (found.seconds, found.waited, found.bound, found.moving_seconds) == (7.0, 5.5, 1.0, 3.0)
    assert found.ratio == 3.0
    pairs = (meshcast.counters() - before).pairs
    assert (pairs[0, 1].messages, pairs[0, 1].bytes) == (15, 300)
    assert (pairs[1, 2].messages, pairs[1, 2].bytes) == (6, 90)
    assert (pairs[1, 2].calls, pairs[1, 2].failed, pairs[1, 2].retries) == (3, 1, 1)
    assert (pairs[1, 2].seconds, pairs[1, 2].waited, pairs[1, 2].ratio) == (7.0, 5.5, 3.0)


def test_what_is_gone_stays_counted() -> None:
    before = meshcast.counters()
    for _ in range(200):
        traffic("test gone").ended(0.25, 0.25)
    assert since(before, "test gone").calls == 200
    assert since(before, "test gone").seconds == 50.0
    assert (meshcast.counters() - before).pairs[0, 1].bytes == 20_000


def test_threads_lose_nothing() -> None:
    before = meshcast.counters()
    shared = traffic("test threads")
    stop = threading.Event()
    seen = []

    def look() -> None:
        while not stop.is_set():
            seen.append(
                (meshcast.counters() - before).calls.get("test threads", meshcast.CallCounters()).calls
            )

    def count() -> None:
        for _ in range(2000):
            shared.ended(1.0, 1.0)
            traffic("test threads").ended(1.0, 1.0)

    looking = threading.Thread(target=look)
    counting = [threading.Thread(target=count) for _ in range(4)]
    for each in (looking, *counting):
        each.start()
    for each in counting:
        each.join()
    stop.set()
    looking.join()
    found = since(before, "test threads")
    assert (found.calls, found.seconds, found.messages) == (16_000, 16_000.0, 7 * 16_000)
    assert seen == sorted(seen)  # a total never falls


def test_the_record_counts_calls_that_move_nothing() -> None:
    """Agreements of a pipeline and refused calls: once each, however often they are told."""
    before = meshcast.counters()
    for _ in range(3):
        flight = Flight("test agreement", Members("nobody"), 0)
        flight.ended()
        flight.ended()
    refused = Flight("test agreement", Members("nobody"), 0)
    refused.failed(meshcast.LayoutError("no"))
    refused.failed(meshcast.LayoutError("no"))
    found = since(before, "test agreement")
    assert (found.calls, found.failed, found.messages, found.bound, found.ratio) == (3, 1, 0, 0.0, 1.0)
    assert found.seconds == found.waited > 0.0


def test_an_operation_without_calls_is_not_listed() -> None:
    before = meshcast.counters()
    made = traffic("test idle")
    assert "test idle" not in (meshcast.counters() - before).calls
    made.failed()
    assert since(before, "test idle") == meshcast.CallCounters(failed=1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_begins_at_zero() -> None:
    traffic("test fork").ended(1.0, 1.0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            traffic("test child").ended(1.0, 1.0)
            status = 0 if list(meshcast.counters().calls) == ["test child"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "test child" not in meshcast.counters().calls
