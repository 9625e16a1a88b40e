"""Values that are no tensors as text that keeps their exact Python types, for entries of a state dict.

Text is JSON: what JSON has is itself, lists included, and anything else is {kind: content}. Nothing that a
text names is imported: enumerations and named tuples are looked up among the modules that this process has.
"""

from __future__ import annotations

import base64
import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import LayoutError
from . import checks

__all__ = ["CARRIED", "as_text", "carried", "is_carried", "not_carried", "restored", "same_values", "shown"]

CARRIED = (
    "None, numbers, text, bytes, enumerations, numpy's scalars and arrays, and lists, tuples, dicts, sets "
    "and counters of such"
)
_PLAIN = (type(None), bool, int, float, str)
_BUILT = {each.__name__: each for each in (bool, int, float, str, bytes, list, tuple, dict, set, Counter)}
_MOST_BYTES = 1 << 20  # of a tensor inside an entry, since every rank gets all of it as text


class _NotCarriedError(Exception):
    pass


def is_carried(value: Any) -> bool:
    """Returns whether an entry that is no tensor travels: CARRIED, and small tensors inside of such."""
    return type(value) in _PLAIN or (not isinstance(value, torch.Tensor) and not not_carried(value))


def not_carried(value: Any) -> str:
    """Returns what keeps an entry from being carried; "" for one that is."""
    try:
        _said(value, _MOST_BYTES)
    except RecursionError:
        return "itself"
    except _NotCarriedError as error:
        return str(error)
    return ""


def carried(value: Any) -> str:
    """An entry as text."""
    return json.dumps(_said(value, _MOST_BYTES), separators=(",", ":"))


def restored(text: str) -> Any:
    """Undoes carried(). Raises LayoutError for a class that this process has not imported."""
    return _value(json.loads(text))


def as_text(value: Any, what: str) -> str:
    """Returns an entry as text, as carried() does, with tensors of any size. Raises LayoutError for what
    cannot be said. what: the name of the entry in that error."""
    try:
        return json.dumps(_said(value, None), separators=(",", ":"))
    except (_NotCarriedError, RecursionError) as error:
        raise LayoutError(f"{what} holds {error or 'itself'}: expected {CARRIED}, or tensors") from None


def shown(text: str) -> str:
    """The value of a text, for a message."""
    try:
        return checks.shown(restored(text))
    except LayoutError:
        return checks.shown(text)


def same_values(a: str, b: str) -> bool:
    """Returns whether two texts say the same values: numbers that are equal, or both NaN, in the same places,
    and dicts and sets in any order."""
    return a == b or _same(json.loads(a), json.loads(b))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        ((kind, first),) = a.items()
        ((other, second),) = b.items()
        if kind != other:
            return False
        if kind == "dict":
            return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
        if kind == "pairs":
            by_key = {_text(key): item for key, item in second}
            return len(first) == len(second) and all(
                _text(key) in by_key and _same(item, by_key[_text(key)]) for key, item in first
            )
        return _same(first, second)
    return bool(a == b or (a != a and b != b))


def _text(said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


def _said(value: Any, most: int | None) -> Any:
    """most: bytes of a tensor."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return _items(value, most)
    if kind is dict:
        if all(type(key) is str for key in value):
            return {"dict": {key: _said(item, most) for key, item in value.items()}}
        return {"pairs": _pairs(value, most)}
    if kind in _CODECS:
        return {kind.__name__: _CODECS[kind][0](value, most)}
    if kind is defaultdict:
        made = value.default_factory
        if made is None or _BUILT.get(getattr(made, "__name__", "")) is made:
            return {"defaultdict": [None if made is None else made.__name__, _pairs(value, most)]}
    if isinstance(value, enum.Enum) and _looked_up(*_names(kind)) is kind:
        return {"enum": [*_names(kind), _said(value.value, most)]}
    if isinstance(value, tuple) and hasattr(value, "_fields") and _looked_up(*_names(kind)) is kind:
        return {"named": [*_names(kind), _items(value, most)]}
    if kind is torch.Tensor and value.layout is torch.strided and not value.requires_grad:
        if most is None or value.nbytes <= most:
            return {"tensor": _tensor(value)}
        raise _NotCarriedError(f"a tensor of {value.nbytes} bytes; give it as an entry of its own")
    found = _numpy(value)
    if found is None:
        raise _NotCarriedError(f"a {kind.__name__}")
    return found


def _items(value: Any, most: int | None) -> list[Any]:
    return [_said(item, most) for item in value]


def _unordered(value: Any, most: int | None) -> list[Any]:
    return sorted(_items(value, most), key=_text)


def _pairs(value: Any, most: int | None) -> list[Any]:
    return [[_said(key, most), _said(item, most)] for key, item in value.items()]


def _tensor(value: torch.Tensor) -> list[Any]:
    local = value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    words = local.view(torch.uint8)
    raw = words.numpy().tobytes() if "numpy" in sys.modules else bytes(words.tolist())
    shape, dtype = list(value.shape), checks.dtype_name(value.dtype)
    return [dtype, shape, value.device.type, base64.b64encode(raw).decode()]


def _numpy(value: Any) -> dict[str, Any] | None:
    """A scalar or an array of numpy, which need not be installed. None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    array = isinstance(value, numpy.ndarray)
    if value.dtype.kind not in "biufcSUMm" or (array and type(value) is not numpy.ndarray):
        return None
    raw = base64.b64encode(value.tobytes()).decode()
    said = [value.dtype.str, list(value.shape), raw]
    return {"array" if array else "scalar": said}


def _names(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _looked_up(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _class(module: str, name: str) -> Any:
    found = _looked_up(module, name)
    fits = isinstance(found, type) and (
        issubclass(found, enum.Enum) or (issubclass(found, tuple) and hasattr(found, "_make"))
    )
    if not fits:
        raise LayoutError(
            f"an entry holds a {name} of the module {module}, which this process has not imported; import it "
            "on every rank that calls"
        )
    return found


def _value(said: Any) -> Any:
    if isinstance(said, list):
        return [_value(item) for item in said]
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    return _MAKERS[kind](content)


def _values(content: Iterable[Any]) -> list[Any]:
    return [_value(item) for item in content]


def _dict(pairs: Iterable[Any]) -> dict[Any, Any]:
    return {_value(key): _value(item) for key, item in pairs}


def _made_tensor(content: Any) -> torch.Tensor:
    dtype, shape, device, raw = content
    flat = torch.frombuffer(bytearray(base64.b64decode(raw)) or bytearray(1), dtype=torch.uint8)
    size = checks.total_bytes(shape, checks.dtype(dtype))
    return flat[:size].clone().view(checks.dtype(dtype)).reshape(shape).to(device)


def _made_numpy(content: Any, *, array: bool) -> Any:
    import numpy

    dtype, shape, raw = content
    found = numpy.frombuffer(base64.b64decode(raw), dtype=numpy.dtype(dtype)).reshape(shape)
    return found.copy() if array else found[()]


_Codec = tuple[Callable[[Any, int | None], Any], Callable[[Any], Any]]
# How the content of a kind is written, and made again, by type.
_CODECS: dict[type, _Codec] = {
    tuple: (_items, lambda content: tuple(_values(content))),
    torch.Size: (_items, torch.Size),
    bytes: (lambda value, _: base64.b64encode(value).decode(), base64.b64decode),
    bytearray: (
        lambda value, _: base64.b64encode(value).decode(),
        lambda content: bytearray(base64.b64decode(content)),
    ),
    set: (_unordered, lambda content: set(_values(content))),
    frozenset: (_unordered, lambda content: frozenset(_values(content))),
    Counter: (_pairs, lambda content: Counter(_dict(content))),
    OrderedDict: (_pairs, lambda content: OrderedDict(_dict(content))),
    deque: (
        lambda value, most: [value.maxlen, _items(value, most)],
        lambda content: deque(_values(content[1]), content[0]),
    ),
    complex: (lambda value, _: [value.real, value.imag], lambda content: complex(*content)),
    range: (lambda value, _: [value.start, value.stop, value.step], lambda content: range(*content)),
    torch.dtype: (lambda value, _: checks.dtype_name(value), checks.dtype),
    torch.device: (lambda value, _: str(value), torch.device),
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: read for kind, (_, read) in _CODECS.items()},
    "dict": lambda content: {key: _value(item) for key, item in content.items()},
    "pairs": _dict,
    "defaultdict": lambda content: defaultdict(
        None if content[0] is None else _BUILT[content[0]], _dict(content[1])
    ),
    "enum": lambda content: _class(*content[:2])(_value(content[2])),
    "named": lambda content: _class(*content[:2])._make(_values(content[2])),
    "tensor": _made_tensor,
    "array": lambda content: _made_numpy(content, array=True),
    "scalar": lambda content: _made_numpy(content, array=False),
}
