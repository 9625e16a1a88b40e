"""The state that a call finds. Modules give their tensors other memory (offloading, `to()`, a checkpoint that
is assigned); a state dict made earlier then holds memory that the module no longer uses."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..base import checks
from ..errors import LayoutError

__all__ = ["Current", "State"]

State = Mapping[str, Any] | torch.nn.Module | Callable[[], Mapping[str, Any]]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Owner = tuple[weakref.ref[Any], str]  # an object, and its attribute or the name of its parameter or buffer


class Current:
    """A state that may get other memory between calls.

    given: {name: entry}, a module, whose state_dict() is taken at each look, or a function that returns a
    mapping, which is called at each look. Entries of a mapping that share the memory of a module's parameters
    or buffers, as those of its state_dict() do, stand for these: where the module has its tensor in other
    memory by now, the look finds that one. None: no entries.

    Raises LayoutError for anything else.
    """

    def __init__(self, what: str, given: Any) -> None:
        self._what, self.given = what, given
        self._entries: dict[str, Any] = {}  # of the mapping, as they were when it last changed
        self._memories: dict[str, Any] = {}
        self._owners: dict[str, list[_Owner]] = {}
        module = isinstance(given, torch.nn.Module)
        self._ask: Callable[[], Any] | None = None
        if module or (callable(given) and not isinstance(given, Mapping)):
            self._ask = given.state_dict if module else given
        elif given is not None:
            self.look()

    def look(self) -> Mapping[str, Any]:
        """The state as it is now. Raises what the function raises, and LayoutError where it returns no
        mapping."""
        given = self.given if self._ask is None else self._ask()
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise LayoutError(
                f"{self._what} must be a mapping by name, a module or a function that returns a mapping, "
                f"found {checks.shown(given)}"
            )
        return given if self._ask is not None else self._followed(given)

    def _followed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        memories = {name: _memory(x) for name, x in given.items() if isinstance(x, torch.Tensor)}
        # Only of entries that the user has changed: the owners of others may have moved since.
        changed = {
            name: memory
            for name, memory in memories.items()
            if self._entries.get(name) is not given[name] or self._memories[name] != memory
        }
        if changed or len(memories) < len(self._memories):
            self._entries, self._memories = {name: given[name] for name in memories}, memories
            kept = {n: own for n, own in self._owners.items() if n in memories and n not in changed}
            self._owners = kept | _owners(self._entries, changed)
        moved = {}
        for name, owners in self._owners.items():
            plain = not isinstance(given[name], DTensor)
            for owner in owners:
                tensor = _tensor_of(owner)
                # In the place of FSDP2's shards a module has the whole parameters now and then.
                if tensor is not None and isinstance(tensor, DTensor) != plain:
                    if _memory(tensor) != memories[name]:
                        moved[name] = tensor.detach()
                    break
        return {**given, **moved} if moved else given


def _tensor_of(owner: _Owner) -> torch.Tensor | None:
    holder, name = owner[0](), owner[1]
    if isinstance(holder, torch.nn.Module):
        found: Any = holder._parameters.get(name)
        found = holder._buffers.get(name) if found is None else found
    else:
        found = getattr(holder, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one piece of memory; None for those without memory of their own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or local.layout is not torch.strided:
        return None
    first = local.data_ptr()  # 0 without elements, and on the meta device
    return (first, local.dtype, local.shape, local.stride()) if first else None


def _owners(entries: Mapping[str, Any], memories: Mapping[str, Any]) -> dict[str, list[_Owner]]:
    """Returns what has the entries' memory as its own, by name. Reads all objects of the process once."""
    names: dict[Any, list[str]] = {}
    for name, memory in memories.items():
        if memory is not None:
            names.setdefault(memory, []).append(name)
    found: dict[str, list[_Owner]] = {}
    if names:
        for holder, attribute, tensor in _held():
            for name in names.get(_memory(tensor), ()):
                if isinstance(tensor, DTensor) == isinstance(entries[name], DTensor):
                    found.setdefault(name, []).append((weakref.ref(holder), attribute))
    return found


def _held() -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The parameters and buffers of all modules, then the shards that FSDP2 keeps of parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kept = (fsdp.FSDPParam,) if fsdp is not None else ()
    sharded = []
    for each in gc.get_objects():
        kind = type(each)  # isinstance() would ask proxies, which may do anything
        if issubclass(kind, torch.nn.Module):
            for tensors in (each.__dict__.get("_parameters"), each.__dict__.get("_buffers")):
                for name, tensor in (tensors or {}).items():
                    if isinstance(tensor, torch.Tensor):
                        yield each, name, tensor
        elif issubclass(kind, kept):
            sharded.append(each)
    for each in sharded:
        tensor = getattr(each, "sharded_param", None)
        if isinstance(tensor, torch.Tensor):
            yield each, "sharded_param", tensor
