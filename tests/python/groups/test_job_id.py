"""Processes of one job share an id, which the first to come has put in the store."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from meshcast.base import observe
from meshcast.groups.parent import StoreConnection, join_job


def joined(monkeypatch: pytest.MonkeyPatch, *stores: dist.Store) -> list[str]:
    """The ids of a process that comes to these stores one after the other."""
    monkeypatch.setattr(observe, "_jobs", [])
    for store in stores:
        join_job(store)
    return observe.job_ids()


def test_all_groups_of_a_store_are_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first = joined(monkeypatch, dist.PrefixStore("one", store))
    assert len(first) == 1
    assert joined(monkeypatch, dist.PrefixStore("two", dist.PrefixStore("deep", store)), store) == first
    assert joined(monkeypatch, dist.HashStore()) != first


def test_a_group_that_is_made_anew_is_known_by_who_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store is another one. Who joins there has an id in common with who was there before."""
    old, new = dist.HashStore(), dist.HashStore()
    (dead,) = joined(monkeypatch, old)
    (joins,) = joined(monkeypatch, new)
    assert joined(monkeypatch, old, new) == [dead, joins]


def test_a_restart_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps its store."""
    store, found = dist.HashStore(), []
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found += joined(monkeypatch, store)
    assert len(set(found)) == 2


def test_few_ids_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, which all that were there from the start have, and the last ones."""
    stores = [dist.HashStore() for _ in range(20)]
    ids = [joined(monkeypatch, store)[0] for store in stores]
    assert joined(monkeypatch, *stores) == [ids[0], *ids[-15:]]


def test_the_connection_of_a_group_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_jobs", [])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = StoreConnection(store, "of callers of several jobs")
    other()
    assert observe.job_ids() == []
    connection = StoreConnection(store, "own", of_job=True)
    connection(), connection()
    first = observe.job_ids()
    assert joined(monkeypatch, store) == first and len(first) == 1
