"""Messages that the agent of `meshcast.elastic.run` and its workers exchange in the agent's store.

A worker is a process that an agent started. Its name is "LOCAL_RANK.RESTART", on another host than that of
the store "LOCAL_RANK.RESTART@HOST", and never given twice. Whenever the workers that there are change, they
come together: a rendezvous, which has a number.

1. The agent calls the members of rendezvous n (`Call`). Ranks are places in that list.
2. Each member leaves its process group and says which state it has (`version`).
3. The agent answers once all are there (`Start`), or calls another rendezvous where one of them died.

All keys are written once, and looked for rather than waited for: a process that waits in a store can be told
nothing else.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["AGENT", "FINISHED", "JOB", "Call", "Start", "Version", "call_key", "connect", "found"]
__all__ += ["broken_key", "gone_key", "parts_of", "ready_key", "serve", "start_key", "tell", "version_key"]
__all__ += ["worker_name"]

HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=300)
AGENT = "elastic/agent"  # there from the start, the job's id: the store is that of an agent
JOB = "elastic/job"  # id of the job in flight records
FINISHED = "elastic/finished"  # a worker has ended the job in agreement with all others


class Version(NamedTuple):
    """The version of the state that a worker holds; the later is the greater. rendezvous: whose ranks it is
    laid out over; 0 before the first. steps: that are committed."""

    rendezvous: int
    steps: int


class Call(NamedTuple):
    """To a rendezvous. lost: members of the one before that died. No members: the job is over."""

    members: list[str]
    lost: list[str]


class Start(NamedTuple):
    """The start of a process group. port: of its store; 0 where another rendezvous was called instead.
    version: the latest that any member has, None where no one has any. then: the members of that version's
    rendezvous."""

    port: int
    version: list[int] | None
    then: list[str]


def worker_name(local_rank: int, restart: int, host: int = 0) -> str:
    return f"{local_rank}.{restart}@{host}" if host else f"{local_rank}.{restart}"


def parts_of(worker: str) -> tuple[int, int]:
    """Local rank and restart."""
    local_rank, restart = worker.partition("@")[0].split(".")
    return int(local_rank), int(restart)


def gone_key(host: int) -> str:
    """There once the job goes on without that host."""
    return f"elastic/host/{host}/gone"


def ready_key(worker: str) -> str:
    return f"elastic/ready/{worker}"


def call_key(number: int) -> str:
    return f"elastic/{number}/call"


def version_key(number: int, worker: str) -> str:
    """Value: [version, or None], since later keys might have more to say."""
    return f"elastic/{number}/version/{worker}"


def broken_key(number: int) -> str:
    """There once a member of that rendezvous has died. The call to the next may have to wait for a worker."""
    return f"elastic/{number}/broken"


def start_key(number: int) -> str:
    return f"elastic/{number}/start"


def tell(store: dist.Store, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def found(store: dist.Store, key: str) -> Any:
    """The value; None where there is none yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


def serve(port: int = 0, *, everywhere: bool = False) -> tuple[dist.TCPStore, int]:
    """A store in this process, and its port; only this host reaches it, unless everywhere. Raises OSError
    where that port cannot be had."""
    if not everywhere:
        listener = socket.create_server((HOST, port), backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect(port: int, host: str = HOST, limit: timedelta = _LIMIT) -> dist.TCPStore:
    """limit: for the store to be there."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
