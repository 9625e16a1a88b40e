"""What tells records of one job from those of another: the rendezvous stores through which its ranks met."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from . import settings

__all__ = ["met_through", "stores"]

_KEY = "meshcast/store"
_lock = threading.Lock()
_names: dict[str, None] = {}  # in the order in which they were met


def met_through(store: Any) -> None:
    """Has the store named, by the first rank that comes here. Costs a round trip each time that a group of
    ranks connects, and nothing where no flight record is written. Raises what the store raises."""
    if not settings.FLIGHT_RECORD.text():
        return
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):  # groups, lives and launchers put their own before the keys
        store = store.underlying_store
    name = store.compare_set(_KEY, "", uuid.uuid4().hex).decode()
    with _lock:
        _names[name] = None


def stores() -> list[str]:
    """The names of those that this process has met others through. A process that goes on in another process
    group may have several."""
    with _lock:
        return list(_names)
