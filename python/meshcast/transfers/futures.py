"""Futures of torch: where their callbacks run, and how they fail without keeping anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .. import _C

__all__ = ["call_back", "fail"]


def call_back(function: Callable[[], None]) -> None:
    """Calls it soon, on a thread that may wait for what it likes. For what completes a future, and so runs
    the callbacks that a user has chained on it: no thread that others need may do that, and no lock may be
    held meanwhile. What it raises is printed."""
    _C.run_callback(function)


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Ends the future with the error, as set_exception does.

    A raised error has the frames that it passed, which may have the future. Torch's future has the error in
    turn, where no garbage collector looks: all of it would stay for ever, and the call and its group as well.
    So the future has a copy without frames, and each raise is of one more.
    """
    bare = _copy_of(error)

    def raise_it(_: Any) -> None:
        raise _copy_of(bare)

    future._set_unwrap_func(raise_it)
    future.set_result(bare)


def _copy_of(error: Exception) -> Exception:
    """Without frames and causes. The same where its type cannot be copied."""
    try:
        return copy.copy(error)
    except Exception:
        return error
