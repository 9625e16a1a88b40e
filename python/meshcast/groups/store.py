"""The rendezvous store where it may not answer: torch reads from it without a limit.

Resources that a process may run out of while its groups come up, and the errors for that.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import Caller, DeadlineExceededError, MeshcastError, PeerLostError

__all__ = [
    "Shortage",
    "as_shortage",
    "few_descriptors",
    "first_line",
    "no_thread",
    "shortage",
    "store_failed",
    "store_of_generation",
    "within",
]


class Shortage(Exception):  # noqa: N818  no error of its own: it never leaves the package
    """Carries the error of a meeting that failed since a rank ran out of something. All ranks get it, and all
    may meet again."""

    def __init__(self, error: MeshcastError) -> None:
        super().__init__(str(error))
        self.error = error


_NO_THREAD = "no thread could be had"  # as common/thread_name.h says it
_THREADS = (
    f"{_NO_THREAD}. Raise the limit of threads (ulimit -u, or that of the container), or run fewer of them"
)
_FEW_DESCRIPTORS, _FEW_THREADS = 64, 4  # a process that can have no more than so many is short of them


def no_thread(what: str, caller: Caller) -> MeshcastError:
    return caller.error(MeshcastError, f"{what}: {_THREADS}")


def _descriptors() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process can open no more file descriptors (its limit is {limit}). Raise it (ulimit -n, or "
        "LimitNOFILE), or close some"
    )


def few_descriptors() -> str:
    """Says so where this process can hardly open more; else "". Asked before UCX is used: it may end a
    process that has none left."""
    held: list[int] = []
    try:
        while len(held) < _FEW_DESCRIPTORS:
            held.append(os.eventfd(0))
    except OSError as refused:
        if refused.errno in (errno.EMFILE, errno.ENFILE):
            return _descriptors()
    finally:
        for descriptor in held:
            os.close(descriptor)
    return ""


def shortage(error: Exception) -> str:
    """Names what this process has run out of, threads or file descriptors, after a failure that may come
    of that; "" if it does not. The failure itself does not always say why."""
    if _NO_THREAD in str(error) or "can't start new thread" in str(error):
        return _THREADS
    descriptors = few_descriptors()
    if descriptors:
        return descriptors
    if os.strerror(errno.EMFILE) in str(error):
        return _descriptors()
    go = threading.Event()
    try:
        for _ in range(_FEW_THREADS):
            threading.Thread(target=go.wait, daemon=True).start()
    except RuntimeError:
        return _THREADS
    finally:
        go.set()
    return ""


def as_shortage(error: Exception, caller: Caller) -> MeshcastError | None:
    """The error to raise where a failure comes of a shortage in this process; else None."""
    short = shortage(error)
    if not short:
        return None
    seen = "" if str(error) == short else f" ({error})"
    return caller.error(MeshcastError, f"{short}{seen}")


_T = TypeVar("_T")


def store_of_generation(store: dist.Store, ranks: int) -> dist.Store:
    """The keys of one generation of a group, which its store may outlive. Each rank comes to it once."""
    return dist.PrefixStore(str((int(store.add("arrivals", 1)) - 1) // ranks), store)


def first_line(error: BaseException) -> str:
    """Returns the text of an error without the stack that torch appends."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def store_failed(error: Exception, what: str, lost: tuple[int, str] | None, caller: Caller) -> MeshcastError:
    """For what torch raises of a store. what: was being done. lost: a rank that has exited, and why: the
    store may have been its process's."""
    if lost is not None:
        return caller.error(
            PeerLostError,
            f"lost rank {lost[0]} in {what}: {lost[1]} (and the rendezvous store: {first_line(error)}). Look "
            "at that rank's own output first.",
            peer=lost[0],
        )
    return caller.error(
        MeshcastError,
        f"{what}: the rendezvous store does not answer ({first_line(error)}). The process that has it is "
        "dead or cut off: agreed transfers continue, new ones need it",
    )


def within(
    seconds: float,
    call: Callable[[], _T],
    what: str,
    caller: Caller,
    lost: Callable[[], tuple[int, str] | None] = lambda: None,
) -> _T:
    """Runs call(), which uses a store, and returns or raises what it does. It has a thread of its own, since
    it may never return; then DeadlineExceededError. Exceptions of torch's store become errors by
    store_failed()."""
    done = threading.Event()
    found: list[Any] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:
            failed.append(error)
        done.set()

    try:
        threading.Thread(target=work, name="meshcast-store", daemon=True).start()
    except RuntimeError as error:
        raise no_thread(what, caller) from error
    if not done.wait(seconds):
        raise caller.error(
            DeadlineExceededError,
            f"{what}: the rendezvous store does not answer, for {seconds:.1f} s by now. Its process or its "
            "host is frozen, or cut off",
            elapsed=seconds,
            limit=seconds,
        )
    if failed:
        cause = failed[0]
        if isinstance(cause, (dist.DistError, OSError)) and not isinstance(cause, MeshcastError):
            raise as_shortage(cause, caller) or store_failed(cause, what, lost(), caller) from cause
        raise cause
    return found[0]
