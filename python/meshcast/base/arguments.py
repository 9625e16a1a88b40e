"""A net below the checks of single arguments: whatever a public function raises because of them is typed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ..errors import LayoutError, MeshcastError
from .checks import shown

__all__ = ["typed_arguments"]

P = ParamSpec("P")
T = TypeVar("T")


def typed_arguments(kind: type[MeshcastError] = LayoutError) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Errors of Python and torch that come out of the function become a `kind` that shows the arguments. Not
    those of the operating system, and TypeError where arguments are missing or have other names."""

    def net(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (MeshcastError, OSError, torch.OutOfMemoryError):
                raise
            except Exception as cause:
                try:
                    given = inspect.signature(function).bind(*args, **kwargs).arguments
                except TypeError:
                    raise cause from None
                text = ", ".join(f"{key}={shown(value)}" for key, value in given.items() if key != "self")
                what = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
                raise kind(f"{name} cannot work with its arguments ({what}); given were {text}") from cause

        return call

    return net
