"""Resources that a process may run out of while its groups come up, and the errors for that."""

from __future__ import annotations

import errno
import os
import resource
import threading

from ..errors import MeshcastError

__all__ = ["Shortage", "as_shortage", "few_descriptors", "no_thread", "shortage"]


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


def no_thread(what: str, *, rank: int, op: str, phase: str) -> MeshcastError:
    return MeshcastError(f"rank {rank}: {what}: {_THREADS}", rank=rank, op=op, phase=phase)


def _descriptors() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process can open no more file descriptors (its limit is {limit}). Raise it (ulimit -n, or "
        "LimitNOFILE), or close some"
    )


def few_descriptors() -> str:
    """Says so where this process can hardly open any more; else "". Asked before UCX is used: it may end a
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
    """Names what this process can have no more of, threads or file descriptors, after a failure that may come
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


def as_shortage(error: Exception, *, rank: int, op: str, phase: str) -> MeshcastError | None:
    """The error to raise where a failure comes of a shortage in this process; else None."""
    short = shortage(error)
    if not short:
        return None
    seen = "" if str(error) == short else f" ({error})"
    return MeshcastError(f"rank {rank}: {short}{seen}", rank=rank, op=op, phase=phase)
