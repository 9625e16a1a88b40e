"""Futures of torch that fail, and keep nothing by that."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["fail"]


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
