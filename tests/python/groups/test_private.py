"""Meeting of a private group: all ranks come to one verdict, whoever leaves at whatever moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from meshcast.errors import AbortedError, DeadlineExceededError
from meshcast.groups.private import PrivateGroup


class Interrupted:
    """A store in which something happens right after the first look at a key, which still sees the past."""

    def __init__(self, store: dist.Store, key: str, action: Callable[[], object]) -> None:
        self._store, self._key, self._action = store, key, action

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        if keys == [self._key]:
            self._key = ""
            self._action()
        return found


def pair(store: dist.Store) -> tuple[PrivateGroup, PrivateGroup]:
    return PrivateGroup(store, (3, 5), 3, 10.0), PrivateGroup(store, (3, 5), 5, 10.0)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_all_who_met_get_every_host() -> None:
    store = dist.HashStore()
    left, right = pair(store)
    seen: list[dict[int, tuple[str, str]]] = []
    hosts = left._gather(
        Interrupted(store, "member/5", lambda: seen.append(right._gather(store, soon(), "", ""))),
        soon(),
        "",
        "",
    )
    assert seen == [hosts]
    assert set(hosts) == {3, 5}


def test_who_is_told_to_leave_still_connects_if_the_others_do() -> None:
    """The other rank saw all members and connects; were this one to leave, the other would wait for it until
    its deadline."""
    store = dist.HashStore()
    left, right = pair(store)
    seen: list[dict[int, tuple[str, str]]] = []
    left.abort("out of luck")
    hosts = left._gather(
        Interrupted(store, "member/5", lambda: seen.append(right._gather(store, soon(), "", ""))),
        soon(),
        "",
        "",
    )
    assert seen == [hosts]


def test_who_leaves_first_takes_the_others_along() -> None:
    store = dist.HashStore()
    left, right = pair(store)
    left.abort("out of luck")
    with pytest.raises(AbortedError, match="rank 3: out of luck"):
        left._gather(store, soon(), "", "")
    with pytest.raises(AbortedError, match="rank 3: out of luck"):
        right._gather(store, soon(), "", "")


def test_a_late_rank_finds_a_failed_group() -> None:
    store = dist.HashStore()
    left, right = pair(store)
    with pytest.raises(DeadlineExceededError, match=r"ranks \[5\] did not call") as caught:
        left._gather(store, soon(0.05), "", "")
    assert caught.value.peer == 5
    with pytest.raises(AbortedError, match=r"rank 3: ranks \[5\] did not call"):
        right._gather(store, soon(), "", "")
