"""Destinations that were recorded: what the loader of an engine does, as boxes of the checkpoint in the
memory of its parameters."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.boxes import Piece
from ..base.checks import dtype_name, read_json
from ..base.observe import log
from ..base.wire import pack, unpack
from ..errors import Caller, LayoutError, MeshcastError

__all__ = [
    "Again",
    "Constant",
    "Landing",
    "LandingSource",
    "Left",
    "Load",
    "Located",
    "RecordedDestinations",
    "Recording",
    "bytes_of",
    "call_load",
    "kind_of",
    "load_of",
    "loader_line",
    "memory_of",
    "strides_of",
    "tensors_in",
    "tensors_of",
]

aten = torch.ops.aten
_FORMAT = "meshcast.recorded/1"
_OP = "RecordedDestinations"
_REPLACED = (
    "after= has put another tensor in its place, at {}; what repacks or quantises a parameter runs once: "
    "send whole tensors to the engine's own reload, or quantise on the way to a Layout (quantize=)"
)
Load = Callable[[Any], Any]


class Located(NamedTuple):
    """A parameter or buffer as it was recorded. memory: the name of the first one with its storage. assigned:
    the loader puts a tensor in its place; device: of that."""

    memory: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    assigned: bool
    device: str


class Constant(NamedTuple):
    """Values that the loader writes by itself. path: of dtypes that they have had, first that of `values`."""

    memory: str
    first: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    values: bytes
    origin: int
    strides: tuple[int, ...]
    path: tuple[torch.dtype, ...]


class Again(NamedTuple):
    """A part of the checkpoint that goes to two places of a rank: it arrives in one and is copied to the
    other."""

    memory: str
    first: int
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    source: str
    origin: int
    strides: tuple[int, ...]


class Left(NamedTuple):
    """A parameter that the loader fills by itself, once these entries have arrived whole."""

    reason: str
    where: str
    entries: tuple[str, ...]


class LandingSource(NamedTuple):
    """The part of an entry that arrives in a memory. pieces: boxes of it, each as numbers: the place of its
    first element, then (low, high, distance of two elements there) for each dimension of the entry."""

    entry: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]

    def placed(self) -> list[Piece]:
        """The boxes, and where they lie in the memory."""
        found: list[Piece] = []
        for place, *sides in self.pieces:
            box = tuple(zip(sides[::3], sides[1::3], strict=True))
            found.append((box, (place,), (0,) * len(box), tuple(sides[2::3])))
        return found


class Landing(NamedTuple):
    """Memory of one rank, of one dimension, that parts of several entries arrive in."""

    dtype: torch.dtype
    numel: int
    device_type: str
    sources: tuple[LandingSource, ...]


class Recording(NamedTuple):
    """A recording of one rank. entries: of the checkpoint. landings: what arrives in the memory of the
    parameters; skipped: entries that no rank's loader uses."""

    entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
    parameters: dict[str, Located]
    landings: dict[str, Landing]
    constants: tuple[Constant, ...]
    again: tuple[Again, ...]
    left: dict[str, Left]
    stopped: tuple[str, ...]
    skipped: tuple[str, ...]

    def whole(self) -> tuple[str, ...]:
        """The entries that arrive whole, for the loader, in the order of the checkpoint."""
        found = {name for left in self.left.values() for name in left.entries} | {*self.stopped}
        return tuple(name for name in self.entries if name in found)


class RecordedDestinations:
    """The places of a checkpoint's tensors in the memory of a model, as `record_destinations` learnt them
    from the loader on this rank. Given as `destinations` to reshard_state_dict, StateResharder and
    WeightSync, values arrive in the parameters themselves; `result[name]` is the parameter.

    Attributes:
        left: {parameter: why its values are no copies, with file:line of the loader}. Their tensors of the
            checkpoint arrive whole on this rank, in memory that a WeightSync keeps; then the loader gets
            these alone.
        skipped: names in the checkpoint that no rank's loader uses.
        processed: {parameter: file:line} of `after` that changed it in place, or put another tensor in its
            place, once values have arrived.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        import tempfile

        model = torch.nn.Linear(2, 4, bias=False)
        shapes = {"weight": ((4, 2), torch.float32)}
        recorded = meshcast.record_destinations(model, names_and_shapes=shapes)
        with tempfile.TemporaryDirectory() as folder:  # of this rank
            recorded.save(f"{folder}/recorded.json")
            again = meshcast.RecordedDestinations.load(f"{folder}/recorded.json", model)
        weights = {"weight": torch.ones(4, 2)} if dist.get_rank() == 0 else None
        meshcast.reshard_state_dict(weights, again)
        assert bool((model.weight == 1).all())
    """

    def __init__(
        self, recording: Recording, model: Any, load: Load | None, after: Callable[[], object] | None = None
    ) -> None:
        if after is not None and not callable(after):
            raise LayoutError(f"after is a {type(after).__name__}: expected a function without arguments")
        self._recording, self._model, self._load, self._after = recording, model, load, after
        self.processed: dict[str, str] = {}

    def __repr__(self) -> str:
        count = len(self)
        return (
            f"<RecordedDestinations in {count} parameter{'' if count == 1 else 's'}, {len(self.left)} left>"
        )

    def __len__(self) -> int:
        """The number of parameters that values arrive in on this rank."""
        return len(self._recording.landings)

    @property
    def left(self) -> dict[str, str]:
        return {
            name: f"{left.reason} ({left.where})" if left.where else left.reason
            for name, left in self._recording.left.items()
        }

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._recording.skipped

    @property
    def receives(self) -> bool:
        """``True`` on a rank with something to receive."""
        return bool(self._recording.landings or self._recording.whole())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording of this rank as JSON, without values of the checkpoint."""
        text = json.dumps({"format": _FORMAT, "recording": json.loads(pack(self._recording))})
        Path(path).write_text(text)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        load: Load | None = None,
        after: Callable[[], object] | None = None,
    ) -> RecordedDestinations:
        """Reads what `save` wrote, for a model of the same structure, and writes the loader's constants to
        it. model, load, after: as for record_destinations. Calls no other rank.

        Raises:
            LayoutError: a file of another format, or a model whose parameters are others.
        """
        with Caller(f"{_OP}.load"):
            read = read_json(Path(path), "recording")
            if not isinstance(read, dict) or read.get("format") != _FORMAT:
                raise LayoutError(f"{path} is no recording of the format {_FORMAT}; record again")
            try:
                recording = unpack(Recording, json.dumps(read.get("recording")))
            except MeshcastError as error:
                raise LayoutError(f"{path} cannot be read as a recording: {error}") from None
            found = cls(recording, model, load_of(model, load), after)
            found._place_constants()
            return found

    @property
    def _landings(self) -> dict[str, Landing]:
        return self._recording.landings

    def _whole(self) -> dict[str, tuple[str, torch.dtype]]:
        """The entries that arrive whole, each with its type of device and dtype."""
        devices = {each.device for each in self._recording.parameters.values()}
        device = "cuda" if any(torch.device(each).type == "cuda" for each in devices) else "cpu"
        return {name: (device, self._recording.entries[name][1]) for name in self._recording.whole()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers as they are now. Those that the loader replaces are
        made at the first call. Raises LayoutError where one is not as it was recorded."""
        found = tensors_of(self._model)
        made: dict[str, torch.Tensor] = {}
        for name, located in self._recording.parameters.items():
            tensor = found.get(name)
            if located.assigned and not _same(tensor, located):
                if located.memory not in made:
                    memory = torch.empty_strided(
                        located.shape, located.strides, dtype=located.dtype, device=located.device
                    )
                    made[located.memory] = torch.nn.Parameter(
                        memory, requires_grad=memory.is_floating_point()
                    )
                found[name] = tensor = made[located.memory]
                _assign(self._model, name, tensor)
            if tensor is None or not _same(tensor, located):
                now = "gone" if tensor is None else _text(memory_of(tensor))
                line = self.processed.get(name)
                remedy = "record again" if line is None else _REPLACED.format(line)
                raise LayoutError(
                    f"the parameter {name!r} is {now}, but was {located.shape}, "
                    f"{dtype_name(located.dtype)}, strides {located.strides} when its loader was recorded; "
                    f"{remedy}"
                )
        return {name: found[name] for name in self._recording.parameters}

    def _results(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers once values have arrived, as `after` has left them."""
        if self._after is None:
            return self._tensors()
        now = tensors_of(self._model)
        return {name: now[name] for name in self._recording.parameters if name in now}

    def _memory(self) -> dict[str, torch.Tensor]:
        """The memory that values arrive in, each as one dimension."""
        tensors = self._tensors()
        found: dict[str, torch.Tensor] = {}
        for name, located in self._recording.parameters.items():
            local = memory_of(tensors[name]).detach()
            if local.is_meta:
                raise LayoutError(f"the parameter {name!r} is on the meta device, and has no memory")
            flat = local.as_strided((_storage_numel(local),), (1,), 0)
            first = found.setdefault(located.memory, flat)
            if first.data_ptr() != flat.data_ptr():
                raise LayoutError(
                    f"{located.memory!r} and {name!r} had one memory when their loader was recorded, "
                    "and have two now; record again"
                )
        for name, landing in self._recording.landings.items():
            if found[name].numel() != landing.numel:
                raise LayoutError(f"the memory of {name!r} has another size than was recorded; record again")
        return found

    @torch.no_grad()
    def _place_constants(self) -> None:
        """Writes what the loader writes without the checkpoint. Once: nothing else writes there."""
        if not self._recording.constants:
            return
        memory = self._memory()
        for each in self._recording.constants:
            values = torch.frombuffer(bytearray(each.values), dtype=torch.uint8).view(each.path[0])
            read = values.as_strided(each.sizes, each.strides, each.origin)
            for dtype in each.path[1:]:
                read = read.to(dtype)
            flat = memory[each.memory]
            flat.as_strided(each.sizes, each.steps, each.first).copy_(read)

    @torch.no_grad()
    def _finish(self, memory: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
        """Ends a transfer on this rank: copies what goes to two places, gives the loader its tensors, and
        calls `after`."""
        if self._after is not None:
            self._place_constants()  # it may have changed them
        for each in self._recording.again:
            source = memory[each.source].as_strided(each.sizes, each.strides, each.origin)
            memory[each.memory].as_strided(each.sizes, each.steps, each.first).copy_(source)
        if whole:
            if self._load is None:
                raise LayoutError(
                    f"{sorted(self.left)} are filled by the loader; give it to RecordedDestinations.load"
                )
            try:
                call_load(self._load, [(name, whole[name]) for name in self._recording.whole()])
            except Exception as error:
                text = f"the loader failed on {sorted(whole)[:3]}: {type(error).__name__}: {error}"
                raise MeshcastError(text) from error
        if self._after is not None:
            self._process(self._after)

    def _process(self, after: Callable[[], object]) -> None:
        """Calls it, and notes which parameters it changes, and where."""
        before = {name: memory_of(x).untyped_storage()._cdata for name, x in self._tensors().items()}
        try:
            with _Writes() as writes:
                after()
        except Exception as error:
            raise MeshcastError(f"after= failed: {type(error).__name__}: {error}") from error
        now = tensors_of(self._model)
        replaced = []
        for name, storage in before.items():
            x = now.get(name)
            found = None if x is None else memory_of(x).untyped_storage()._cdata
            if storage in writes.written:
                self.processed[name] = writes.written[storage]
            if found != storage:
                self.processed[name] = writes.made.get(found or 0) or writes.written.get(found or 0, "after=")
                if not _same(x, self._recording.parameters[name]):
                    replaced.append(name)
        if replaced:
            first = replaced[0]
            text = _REPLACED.format(self.processed[first])
            log.warning(
                "%d parameters cannot be received again, the first is %r: %s", len(replaced), first, text
            )


def load_of(model: Any, load: Load | None) -> Load | None:
    """The loader of a model: the one that is given, load_weights, or load_state_dict."""
    if load is not None:
        if not callable(load):
            raise LayoutError(f"load is a {type(load).__name__}: expected a function of pairs")
        return load
    return getattr(model, "load_weights", None) or getattr(model, "load_state_dict", None)


def call_load(load: Load, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """load_state_dict takes a mapping; all others pairs of name and tensor."""
    whole = getattr(load, "__name__", "") == "load_state_dict"
    load(dict(pairs) if whole else iter(pairs))


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, or the tensors of a mapping, by name; of tied ones all."""
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return {name: x for name, x in model.items() if isinstance(x, torch.Tensor)}
    if not isinstance(model, torch.nn.Module):
        raise LayoutError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module, or tensors by name"
        )
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its part on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _assign(model: Any, name: str, tensor: torch.Tensor) -> None:
    if isinstance(model, torch.nn.Module):
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if last in owner._buffers:
            owner._buffers[last] = tensor.detach()
        else:
            owner._parameters[last] = tensor  # type: ignore[assignment]
    else:
        model[name] = tensor


def _same(tensor: torch.Tensor | None, located: Located) -> bool:
    if tensor is None:
        return False
    x = memory_of(tensor)
    found = (tuple(x.shape), x.stride(), x.dtype, x.storage_offset())
    here = not x.is_meta or located.device == "meta"
    return here and found == (located.shape, located.strides, located.dtype, located.offset)


def _text(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)}, {dtype_name(x.dtype)}, strides {x.stride()} on {x.device.type}"


def _storage_numel(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes() // x.dtype.itemsize


def bytes_of(values: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return bytes(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major ones."""
    return torch.empty(tuple(shape), device="meta").stride()


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def loader_line() -> str:
    """file:line of the innermost frame that is neither torch's nor of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _HERE, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


@cache
def kind_of(func: Any) -> str:
    """The kind of an operation: "view", "write", or "new"."""
    if any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments):
        return "write"
    views = any(ret.alias_info is not None for ret in func._schema.returns)
    return "view" if views or func in (aten._unsafe_view.default, aten.lift_fresh.default) else "new"


class _Writes(TorchDispatchMode):
    """The lines that write to memory in its block, with values. written: by storage, the first line; made: by
    address of a result, the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, str] = {}
        self.made: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        kind = kind_of(func)
        if kind == "write":
            for at, arg in enumerate(func._schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    for x in tensors_in(args[at] if at < len(args) else given.get(arg.name)):
                        self.written.setdefault(x.untyped_storage()._cdata, loader_line())
        elif kind == "new":
            for x in tensors_in(result):
                self.made[x.untyped_storage()._cdata] = loader_line()
        return result
