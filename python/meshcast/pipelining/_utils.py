"""torch.distributed.pipelining._utils under the same name here: all of it is torch's, except how the modules
here get the names of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["names_of_torch"]


def names_of_torch(
    module: str, here: dict[str, Any], ours: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that has the names of torch.distributed.pipelining's module
    of that name ("" for the package), private ones included, except for those that it defines itself. here:
    its globals. ours: names of our own that are loaded when they are first used, with the modules below
    meshcast that have them."""
    theirs = import_module(".".join(filter(None, ("torch.distributed.pipelining", module))))
    homes = ours or {}

    def get(name: str) -> Any:
        if name in homes:
            here[name] = value = getattr(import_module(f"meshcast.{homes[name]}"), name)
            return value
        try:
            return getattr(theirs, name)
        except AttributeError:
            raise AttributeError(f"module {here['__name__']!r} has no attribute {name!r}") from None

    return get, lambda: sorted({*here, *homes, *dir(theirs)})


__getattr__, __dir__ = names_of_torch("_utils", globals())
