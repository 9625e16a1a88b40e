"""A run of a loader without values: where each element of the checkpoint goes in a model's memory.

The loader gets recording tensors instead of the checkpoint's. Each stands for a storage on the meta
device, so that torch itself computes what a view is. An operation that copies says from which region to
which; one that makes new values leaves its result unknown, with the loader's line. Nothing is written
to the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .recorded import kind_of, loader_line, tensors_in
from .strided import Contents, Dim, IrregularError, Link, dims_of, numel

__all__ = [
    "Entry",
    "Fill",
    "Literal",
    "Recorder",
    "RecordingTensor",
    "Storage",
    "Unknown",
    "Unrecordable",
]

aten = torch.ops.aten


class Entry(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Fill(NamedTuple):
    """One value, which the loader writes by itself."""

    value: float | int | bool


class Literal:
    """Values that the loader makes without the checkpoint: a whole storage, as a tensor of one dimension."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Unknown(NamedTuple):
    """Values that are no copies. where: file:line of the loader; entries: of the checkpoint that they are
    made of."""

    reason: str
    where: str
    entries: frozenset[str]


class Unrecordable(BaseException):
    """The loader asks for values. No Exception: loaders may catch those."""

    def __init__(self, cause: Unknown) -> None:
        super().__init__(cause.reason)
        self.cause = cause


class Storage:
    """A storage. name: of the parameter whose memory it is; None for what the loader makes. keep: a tensor of
    it, which keeps its address from being used again."""

    def __init__(
        self, keep: torch.Tensor, dtype: torch.dtype, links: Iterable[Link] = (), name: str | None = None
    ) -> None:
        self.keep, self.dtype, self.name = keep, dtype, name
        self.numel = keep.untyped_storage().nbytes() // max(dtype.itemsize, 1)
        self.contents = Contents(links)
        self.unknown: Unknown | None = None  # of all of it, if its regions cannot be distinguished

    def write(self, link: Link) -> None:
        try:
            self.contents.write(link)
        except IrregularError as error:
            self.spoil(f"writes that overlap: {error}", self.entries() | _entries_of([link]))

    def spoil(self, reason: str, entries: frozenset[str]) -> None:
        self.unknown = self.unknown or Unknown(reason, loader_line(), entries)

    def entries(self) -> frozenset[str]:
        """The entries of the checkpoint that something in it is made of."""
        return _entries_of(self.contents.links) | (self.unknown.entries if self.unknown else frozenset())


def _entries_of(links: Iterable[Link]) -> frozenset[str]:
    found: set[str] = set()
    for link in links:
        if isinstance(link.source, Entry):
            found.add(link.source.name)
        elif isinstance(link.source, Unknown):
            found |= link.source.entries
    return frozenset(found)


class RecordingTensor(torch.Tensor):
    """A tensor of the checkpoint, or what a loader makes of some, without values."""

    _inner: torch.Tensor
    _recorder: Recorder

    @staticmethod
    def __new__(cls, recorder: Recorder, inner: torch.Tensor, device: torch.device) -> RecordingTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=False,
        )
        made._inner, made._recorder = inner, recorder
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        recorder = next(x._recorder for x in tensors_in((args, kwargs)) if isinstance(x, RecordingTensor))
        return recorder.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RecordingTensor({tuple(self.shape)}, {self.dtype})"

    def _values(self, *_: Any, **__: Any) -> Any:
        raise self._recorder.asks("its values, outside of torch", [self._inner])

    numpy = tolist = __array__ = __dlpack__ = data_ptr = _values


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The value with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._inner if isinstance(tensor, RecordingTensor) else tensor


_ASKING = {  # for values, so that no result can be made without them
    aten._local_scalar_dense.default: "a value as a number",
    aten.is_nonzero.default: "whether a value is zero",
    aten.equal.default: "whether values are equal",
    aten.nonzero.default: "where values are zero",
}


class Recorder:
    """One run of a loader. Any thread may use its tensors; memory of the model is watched in the thread of
    `run` alone."""

    def __init__(self, memory: Mapping[str, torch.Tensor]) -> None:
        """memory: of the model, by the names of its parameters and buffers."""
        self._known: dict[int, Storage] = {}
        self._lock = threading.RLock()
        self.odd: dict[int, str] = {}  # of parameters that are no plain memory
        self.places: dict[str, Storage] = {}
        for name, tensor in memory.items():
            storage = tensor.untyped_storage()._cdata
            if storage not in self._known:
                self._known[storage] = Storage(tensor, tensor.dtype, name=name)
            self.places[name] = self._known[storage]

    def tensor(self, entry: Entry, device: torch.device) -> RecordingTensor:
        """The tensor that the loader gets for an entry."""
        inner = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        dims = dims_of([max(inner.numel(), 1)], [1], [1])
        self._made(inner, [Link(0, dims, entry, 0, (entry.dtype,))] if inner.numel() else [])
        return RecordingTensor(self, inner, device)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Records what happens in its block."""
        with _Watched(self), _Rebound(self):
            yield

    def asks(self, what: str, tensors: Iterable[torch.Tensor]) -> Unrecordable:
        """The error of a loader that asks for values."""
        entries = frozenset(name for x in tensors for name in self._entries(x))
        return Unrecordable(Unknown(f"the loader asks for {what}", loader_line(), entries))

    def links(self, tensor: torch.Tensor) -> list[Link]:
        """The links of a tensor, as if it were contiguous."""
        inner = _inner(tensor)
        return self._read(inner, 0, _contiguous(inner.shape), inner.dtype)

    # What follows is called by torch for each operation.

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        own = [x for x in given if isinstance(x, RecordingTensor)]
        kind = kind_of(func)
        if kind == "view":
            made = func(*_changed(args, _inner), **_changed(kwargs, _inner))
            return _changed(made, lambda x: RecordingTensor(self, x, own[0].device)) if own else made
        with self._lock:
            known = [x for x in given if self._find(_inner(x)) is not None]
            if not known:
                return func(*args, **kwargs)
            if func in _ASKING and any(self._recorded(x) for x in known):
                raise self.asks(_ASKING[func], known)
            if kind == "write":
                return self._write(func, args, kwargs, given)
            if not own and not any(self._recorded(x) for x in known):
                # Of what the model held before: its values are there, but the real loader would find others.
                made = func(*args, **kwargs)
                for x in tensors_in(made):
                    self._made(x, []).spoil("it is made of what the model held before", frozenset())
                return made
            device = own[0].device if own else torch.device("cpu")
            made = _COPIES[func](self, *args, **kwargs) if func in _COPIES else None
            if made is None:
                made = self._calculated(func, args, kwargs, given)
            if "device" in kwargs and kwargs["device"] is not None:
                device = torch.device(kwargs["device"])
            return _changed(made, lambda x: RecordingTensor(self, x, device))

    def rebind(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """`tensor.data = value`. Returns whether nothing more is to be done."""
        place = self._find(_inner(tensor))
        if isinstance(tensor, RecordingTensor) or place is None or place.name is None:
            if isinstance(value, RecordingTensor):
                raise self.asks("tensor.data = recorded values, of a tensor that is no parameter", [value])
            return False
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            self._copy(_inner(tensor), _inner(value))
        else:
            text = f"{place.name}.data gets a tensor of {tuple(value.shape)}, {value.dtype}"
            place.spoil(text, place.entries() | self._entries(_inner(value)))
        return True

    def _find(self, inner: torch.Tensor) -> Storage | None:
        return self._known.get(inner.untyped_storage()._cdata)

    def _recorded(self, x: torch.Tensor) -> bool:
        """Returns whether values of a tensor are recorded, and not real ones."""
        place = self._find(_inner(x))
        return place is not None and bool(place.contents.links or place.unknown or place.name is None)

    def _entries(self, inner: torch.Tensor) -> frozenset[str]:
        place = self._find(inner)
        return frozenset() if place is None else place.entries()

    def _made(self, inner: torch.Tensor, links: Iterable[Link]) -> Storage:
        """New memory, which is known from now on."""
        made = self._known[inner.untyped_storage()._cdata] = Storage(inner, inner.dtype, links)
        return made

    def _calculated(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """The result of an operation that makes new values: unknown ones."""
        try:
            made = func(*_changed(args, _meta), **_on_meta(_changed(kwargs, _meta)))
        except Exception as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise self.asks(f"the result of {func}, which depends on values", given) from error
            raise
        entries = frozenset(name for x in given for name in self._entries(_inner(x)))
        for x in tensors_in(made):
            self._made(x, []).spoil(f"{func} makes new values", entries)
        return made

    def _write(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """An operation that changes some of its tensors. Returns what it returns."""
        into = args[0] if args and isinstance(args[0], torch.Tensor) else None
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and func in _INTO:
            self._watch(out)
            made = _COPIES[_INTO[func]](self, *args, **{k: v for k, v in kwargs.items() if k != "out"})
            if made is not None and made.shape == out.shape:
                self._copy(_inner(out), made)
                return out
        if into is not None and func in _WRITES:
            self._watch(into)
            _WRITES[func](self, *args, **kwargs)
            return into
        entries = frozenset(name for x in given for name in self._entries(_inner(x)))
        written = [
            kwargs.get(arg.name) if at >= len(args) or arg.kwarg_only else args[at]
            for at, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        for x in tensors_in(written):
            self._watch(x)
            self._spoil_region(_inner(x), f"{func} changes values", entries)
        return written[0] if len(written) == 1 else tuple(written)

    def _watch(self, x: torch.Tensor) -> Storage:
        """Storage that is about to be written. What the loader has made itself is known from now on."""
        inner = _inner(x)
        found = self._find(inner)
        if found is not None:
            return found
        made = self._made(inner, [])
        if not inner.is_meta and made.numel:
            whole = inner.detach().as_strided((made.numel,), (1,), 0)
            made.contents.write(Link(0, dims_of([made.numel], [1], [1]), Literal(whole), 0, (inner.dtype,)))
        return made

    def _spoil_region(self, inner: torch.Tensor, reason: str, entries: frozenset[str]) -> None:
        place = self._find(inner)
        assert place is not None
        self._fill(inner, Unknown(reason, loader_line(), entries))

    def _fill(self, inner: torch.Tensor, source: Fill | Unknown) -> None:
        """Writes one source to a region."""
        place = self._watch(inner)
        if not inner.numel():
            return
        if inner.dtype != place.dtype:
            place.spoil("its bits are written as another dtype", place.entries())
            return
        try:
            dims = dims_of(inner.shape, inner.stride(), [0] * inner.ndim)
            place.write(Link(int(inner.storage_offset()), dims, source, 0, (inner.dtype,)))
        except IrregularError as error:
            place.spoil(str(error), place.entries())

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`to` gets the values of a source, which is broadcast."""
        place = self._watch(to)
        if not to.numel():
            return
        if to.dtype != place.dtype:
            place.spoil("its bits are written as another dtype", place.entries() | self._entries(source))
            return
        steps = [step if size > 1 else 0 for size, step in zip(to.shape, to.stride(), strict=True)]
        for link in self._read(source.expand(to.shape), int(to.storage_offset()), steps, to.dtype):
            place.write(link)

    def _read(self, source: torch.Tensor, first: int, steps: Sequence[int], dtype: torch.dtype) -> list[Link]:
        """The links of a region that begins at `first` and has these steps, and gets the source's values."""
        place = self._find(source)
        sizes, strides = source.shape, source.stride()
        try:
            if place is None:
                return self._constant(source, first, steps, dtype)
            if place.unknown is not None:
                cause = place.unknown
            elif source.dtype != place.dtype:
                cause = Unknown("its bits are read as another dtype", loader_line(), place.entries())
            else:
                moving = [at for at, size in enumerate(sizes) if size > 1]
                apart = [Dim(sizes[at], strides[at], steps[at]) for at in moving if strides[at]]
                again = [Dim(sizes[at], steps[at], 0) for at in moving if not strides[at]]
                apart = list(
                    dims_of([d.size for d in apart], [d.step for d in apart], [d.source for d in apart])
                )
                links = place.contents.read(int(source.storage_offset()), apart, first)
                if sum(numel(link.dims) for link in links) == numel(apart):
                    return [_copied(link, again, dtype) for link in links]
                text = f"it depends on what {place.name or 'memory of the loader'} held before"
                cause = Unknown(text, loader_line(), place.entries())
            return [Link(first, dims_of(sizes, steps, [0] * len(sizes)), cause, 0, (dtype,))]
        except IrregularError as error:
            cause = Unknown(str(error), loader_line(), self._entries(source))
            try:
                return [Link(first, dims_of(sizes, steps, [0] * len(sizes)), cause, 0, (dtype,))]
            except IrregularError:
                raise self.asks(f"memory with {error}", [source]) from None

    def _constant(
        self, source: torch.Tensor, first: int, steps: Sequence[int], dtype: torch.dtype
    ) -> list[Link]:
        """The links of values that no entry has a part in."""
        where: Any
        if source.is_meta:
            where = Unknown("the values are on the meta device", loader_line(), frozenset())
        elif _uniform(source):
            where = Fill(source.reshape(-1)[0].item())
        else:
            flat = source.detach().contiguous().clone().reshape(-1)
            return [
                Link(
                    first,
                    dims_of(source.shape, steps, _contiguous(source.shape)),
                    Literal(flat),
                    0,
                    (source.dtype, dtype),
                )
            ]
        return [Link(first, dims_of(source.shape, steps, [0] * source.ndim), where, 0, (source.dtype, dtype))]

    # Operations that copy. Each returns the inner tensor of its result; None where it is no copy.

    def _new(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.empty_like(_meta(like), dtype=dtype)
        self._made(made, [])
        return made

    def _clone(self, x: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
        kind = torch.preserve_format if memory_format is None else memory_format
        made = torch.empty_like(_meta(x), memory_format=kind)
        self._made(made, [])
        self._copy(made, _inner(x))
        return made

    def _to_copy(self, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        made = self._new(x, dtype)
        self._copy(made, _inner(x))
        return made

    def _cat(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made = torch.cat([_meta(x) for x in tensors], dim)
        self._made(made, [])
        at, old = 0, [x for x in tensors if x.shape != (0,)]
        for x in old:
            self._copy(made.narrow(dim, at, x.shape[dim]), _inner(x))
            at += x.shape[dim]
        return made

    def _stack(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made = torch.stack([_meta(x) for x in tensors], dim)
        self._made(made, [])
        for at, x in enumerate(tensors):
            self._copy(made.select(dim, at), _inner(x))
        return made

    def _index_select(self, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
        if self._find(_inner(index)) is not None or index.ndim > 1:
            return None
        made = torch.index_select(_meta(x), dim, _meta(index))
        self._made(made, [])
        for to, begin, step, count in _runs(index.reshape(-1).tolist(), x.shape[dim]):
            self._copy(_every(made, dim, to, 1, count), _every(_inner(x), dim, begin, step, count))
        return made

    def _index(self, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        given = [at for at, index in enumerate(indices) if index is not None]
        index = indices[given[0]] if len(given) == 1 else None
        if index is None or index.ndim != 1 or index.dtype in (torch.bool, torch.uint8):
            return None
        return self._index_select(x, given[0], index)

    def _index_put(
        self,
        x: torch.Tensor,
        indices: Sequence[torch.Tensor | None],
        values: torch.Tensor,
        accumulate: bool = False,
        *_: Any,
    ) -> None:
        given = [at for at, index in enumerate(indices) if index is not None]
        index = indices[given[0]] if len(given) == 1 else None
        plain = index is not None and index.ndim == 1 and index.dtype not in (torch.bool, torch.uint8)
        if index is None or not plain or accumulate or self._find(_inner(index)) is not None:
            entries = self._entries(_inner(x)) | self._entries(_inner(values))
            self._spoil_region(_inner(x), "values are written by an index that is no list of rows", entries)
            return
        dim, inner = given[0], _inner(x)
        shape = [*inner.shape[:dim], index.numel(), *inner.shape[dim + 1 :]]
        source = _inner(values).expand(shape)
        for at, begin, step, count in _runs(index.tolist(), inner.shape[dim]):
            self._copy(_every(inner, dim, begin, step, count), _every(source, dim, at, 1, count))

    def _index_copy(self, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> None:
        self._index_put(x, [None] * (dim % x.ndim) + [index], source)

    def _repeat(self, x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
        made = _meta(x).repeat(repeats)
        self._made(made, [])
        inner = _inner(x)
        inner = inner.reshape([1] * (len(repeats) - inner.ndim) + list(inner.shape))
        pairs = [size for pair in zip(repeats, inner.shape, strict=True) for size in pair]
        ones = [size for each in inner.shape for size in (1, each)]
        self._copy(made.view(pairs), inner.view(ones))
        return made

    def _pad(self, x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor | None:
        if any(each < 0 for each in pad):
            return None
        made = torch.constant_pad_nd(_meta(x), pad, 0)
        self._made(made, [])
        self._fill(made, Fill(value))
        inside = made
        for at in range(len(pad) // 2):
            dim = x.ndim - 1 - at
            inside = inside.narrow(dim, pad[2 * at], x.shape[dim])
        self._copy(inside, _inner(x))
        return made

    def _empty(
        self, x: torch.Tensor, *args: Any, func: Any, value: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        made: torch.Tensor = func(_meta(x), *args, **_on_meta(kwargs))
        self._made(made, [])
        if value is not None:
            self._fill(made, Fill(value))
        return made

    def _zero(self, x: torch.Tensor, value: Any = 0) -> None:
        if isinstance(value, torch.Tensor):
            self._copy(_inner(x), _inner(value).reshape(()))
        else:
            self._fill(_inner(x), Fill(value))

    def _copy_to(self, x: torch.Tensor, source: torch.Tensor, *_: Any) -> None:
        self._copy(_inner(x), _inner(source))


def _uniform(x: torch.Tensor) -> bool:
    """Returns whether all values have the same bits."""
    rows = x.detach().contiguous().view(-1, 1).view(torch.uint8)
    return bool((rows == rows[:1]).all())


def _copied(link: Link, again: Sequence[Dim], dtype: torch.dtype) -> Link:
    """The link of a copy, as this dtype, and once more along each dimension of `again`."""
    path = link.path if link.path[-1] == dtype else (*link.path, dtype)
    dims = [*link.dims, *again]
    joined = dims_of([d.size for d in dims], [d.step for d in dims], [d.source for d in dims])
    return link._replace(dims=joined, path=path)


def _contiguous(shape: Sequence[int]) -> list[int]:
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * max(shape[dim + 1], 1)
    return steps


def _meta(x: torch.Tensor) -> torch.Tensor:
    inner = _inner(x)
    if inner.is_meta:
        return inner
    return torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.device("meta") if key == "device" else each for key, each in kwargs.items()}


def _runs(index: Sequence[int], size: int) -> Iterator[tuple[int, int, int, int]]:
    """(place, first, step, count) of rows that are equally far from each other."""
    index = [each % size for each in index] if size else []
    at = 0
    while at < len(index):
        end = at + 1
        step = index[end] - index[at] if end < len(index) else 1
        while step > 0 and end < len(index) and index[end] - index[end - 1] == step:
            end += 1
        yield at, index[at], max(step, 1), end - at
        at = end


def _every(x: torch.Tensor, dim: int, begin: int, step: int, count: int) -> torch.Tensor:
    return aten.slice.Tensor(x, dim, begin, begin + (count - 1) * step + 1, step)


def _empty_of(func: Any, value: Any = None) -> Callable[..., torch.Tensor]:
    return lambda recorder, x, *args, **kwargs: recorder._empty(x, *args, func=func, value=value, **kwargs)


_COPIES: dict[Any, Callable[..., torch.Tensor | None]] = {
    aten.clone.default: Recorder._clone,
    aten._to_copy.default: Recorder._to_copy,
    aten.cat.default: Recorder._cat,
    aten.stack.default: Recorder._stack,
    aten.index_select.default: Recorder._index_select,
    aten.index.Tensor: Recorder._index,
    aten.repeat.default: Recorder._repeat,
    aten.constant_pad_nd.default: Recorder._pad,
    aten.empty_like.default: _empty_of(aten.empty_like.default),
    aten.new_empty.default: _empty_of(aten.new_empty.default),
    aten.new_empty_strided.default: _empty_of(aten.new_empty_strided.default),
    aten.zeros_like.default: _empty_of(aten.zeros_like.default, 0),
    aten.new_zeros.default: _empty_of(aten.new_zeros.default, 0),
    aten.ones_like.default: _empty_of(aten.ones_like.default, 1),
    aten.new_ones.default: _empty_of(aten.new_ones.default, 1),
}
_WRITES: dict[Any, Callable[..., None]] = {
    aten.copy_.default: Recorder._copy_to,
    aten.fill_.Scalar: Recorder._zero,
    aten.fill_.Tensor: Recorder._zero,
    aten.zero_.default: Recorder._zero,
    aten.index_put_.default: Recorder._index_put,
    aten._index_put_impl_.default: Recorder._index_put,
    aten.index_copy_.default: Recorder._index_copy,
}
_INTO = {aten.cat.out: aten.cat.default, aten.stack.out: aten.stack.default}


class _Watched(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.dispatch(func, args, kwargs or {})


class _Rebound(TorchFunctionMode):
    """Sees `tensor.data = ...`, which is no operation of torch's dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sets = getattr(func, "__name__", "") == "__set__" and func.__self__ is torch.Tensor.data
        if sets and self._recorder.rebind(*args):
            return None
        return func(*args, **(kwargs or {}))
