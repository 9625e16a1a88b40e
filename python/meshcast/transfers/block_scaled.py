"""Values of 8 and 4 bits that share a scale by blocks: the schemes by name and those of the user, what
``quantize=`` asks for, and how a rank quantises a part of a tensor, on the CPU or a GPU with the same bits.

The largest magnitude of each block comes first. Parts that share a block agree on it, and each of them is
then quantised by itself, with the bits that the whole tensor would get (csrc/core/memory/block_quantize.h).
All arithmetic is in float32, of the values of the source as they are:

- ``fp8_e4m3:RxC``: scale = max(amax, 1e-12) / 448; value = x / scale, at most 448, as float8_e4m3fn. torchao
  0.18, quantization/quant_primitives.py: `_choose_scale_float8` with ``hp_value_lb=1e-12``, and
  `_quantize_affine_float8`. Blocks at the end of a tensor may be smaller, as in the checkpoints of
  DeepSeek-V3.
- ``mxfp8``: blocks of 32 along the last dimension. scale = 2^(floor(log2(amax)) - 8), at least 2^-127, as
  float8_e8m0fnu; value = x / max(scale, 2^-126), at most 448, as float8_e4m3fn. torchao 0.18,
  prototype/mx_formats/mx_tensor.py: `to_mx` with ``ScaleCalculationMode.FLOOR``.
- ``nvfp4``: blocks of 16 along the last dimension. tensor_scale = max(largest magnitude of the tensor, 1e-12)
  / 2688, float32; scale = amax / 6 / tensor_scale, from 2^-6 to 448, as float8_e4m3fn; value = x * (1 /
  tensor_scale / scale), at most 6, as float4_e2m1, two in a byte, the first one in its low half. torchao
  0.18, prototype/mx_formats/nvfp4_tensor.py: `nvfp4_quantize` with `per_tensor_amax_to_scale`.

A `BlockScaled` is a type of the user's own: a function makes values and scales of whole blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from .. import _C
from ..base import checks
from ..base.checks import dtype_name
from ..base.wire import once
from ..errors import LayoutError

__all__ = [
    "BlockScaled",
    "SOURCES",
    "Quantize",
    "Quantizing",
    "Scheme",
    "amax_of",
    "scales_of",
    "scheme_of",
    "tensor_scale_of",
    "values_of",
]

_SCHEMES = 'allowed are "fp8_e4m3:RxC", as "fp8_e4m3:128x128", "mxfp8", "nvfp4" and a meshcast.BlockScaled'
SOURCES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = re.compile(r"fp8_e4m3:([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


_OWN = "own"


@once
class Scheme(NamedTuple):
    """A block-scaled type. block: sizes along the last dimensions. values: their dtype; packed: elements in
    one of them, along the last dimension. scales: a dtype for each tensor of scales; suffixes: of the names
    of these. The second scale of nvfp4 is that of the tensor."""

    text: str
    kind: str
    block: tuple[int, int]
    values: torch.dtype
    scales: tuple[torch.dtype, ...]
    packed: int
    suffixes: tuple[str, ...]

    @property
    def own(self) -> bool:
        """True where a function of the user makes it."""
        return self.kind == _OWN

    def blocks(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of a block along each dimension of a tensor. Raises LayoutError where the scheme
        does not fit its shape."""
        sizes, (rows, columns) = tuple(shape), self.block
        least = 1 if rows == 1 else 2
        if len(sizes) < least:
            raise self._unfit(name, sizes, f"its blocks have {least} dimension{'s' if least > 1 else ''}")
        if 0 in sizes:
            raise self._unfit(name, sizes, "there is nothing to make scales of")
        multiple = columns if self.kind in ("mxfp8", "nvfp4") else self.packed
        if sizes[-1] % multiple:
            raise self._unfit(name, sizes, f"the last dimension must be a multiple of {multiple}")
        return (*(1,) * (len(sizes) - 2), *((rows, columns) if len(sizes) > 1 else (columns,)))

    def cell(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of what one rank makes as a whole: a block of a type of the user's own, else the
        elements of a value."""
        blocks = self.blocks(name, shape)
        return blocks if self.own else (*(1,) * (len(blocks) - 1), self.packed)

    def scales_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        return tuple(-(-size // by) for size, by in zip(shape, self.blocks(name, shape), strict=True))

    def scale_shapes(self, name: str, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape of each tensor of scales."""
        of_blocks = self.scales_shape(name, shape)
        return [of_blocks, ()] if self.kind == "nvfp4" else [of_blocks] * len(self.scales)

    def values_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.packed)

    def _unfit(self, name: str, shape: Sequence[int], why: str) -> LayoutError:
        return LayoutError(f"quantize={self.text!r} does not fit {name!r} of shape {tuple(shape)}: {why}")


@cache
def scheme_of(text: str) -> Scheme:
    """Raises LayoutError for a text that names none."""
    e4m3, float32 = torch.float8_e4m3fn, torch.float32
    if text == "mxfp8":
        return Scheme(text, text, (1, 32), e4m3, (torch.float8_e8m0fnu,), 1, ("_scale",))
    if text == "nvfp4":
        return Scheme(text, text, (1, 16), torch.uint8, (e4m3, float32), 2, ("_scale", "_scale_2"))
    found = _FP8.fullmatch(text)
    if found is None:
        raise LayoutError(f"quantize={checks.shown(text)} is no block-scaled type; {_SCHEMES}")
    rows, columns = int(found[1]), int(found[2])
    suffix = "_scale" if rows == 1 else "_scale_inv"  # as in the checkpoints of DeepSeek-V3
    return Scheme(text, "fp8_e4m3", (rows, columns), e4m3, (float32,), 1, (suffix,))


class BlockScaled:
    """A block-scaled type of your own, for ``quantize=`` of reshard_state_dict and WeightSync.

    Args:
        quantize: called with a part of a tensor that has whole blocks; returns its values and its scales, a
            tensor for each of `scales`, on its device. The part is contiguous, in the dtype of the source (of
            several, that of their concatenation); it needs no gradient, and is not to be written to. A
            block gets the same bits whatever else is in the part, for ranks cut a tensor as its layout does.
        block: sizes (rows, columns) along the last two dimensions. Blocks at the end of a tensor may be
            smaller.
        dtype: of the values, whose shape is that of the part, except for `packed`.
        scales: dtype of the scales, one for each block, which are called NAME_scale. Or {suffix: dtype} for
            several tensors, as scales and zero points, in the order in which `quantize` returns them.
        packed: so many elements along the last dimension make one value.
        name: of the type, in messages; ranks that name different ones disagree. None: that of `quantize`.

    The ranks that hold a part of the tensor call `quantize`, once, before values and scales move; all ranks
    that name the destination give the same type. Raises LayoutError for arguments that are wrong.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        def by_absmax(part):
            groups = part.float().unflatten(-1, (-1, 64))
            scale = groups.abs().amax(-1) / 127
            values = (groups / scale.clamp(min=1e-12)[..., None]).round().to(torch.int8)
            return values.flatten(-2), scale

        int8 = meshcast.BlockScaled(by_absmax, block=(1, 64), dtype=torch.int8)
        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        weights = {"w": distribute_tensor(torch.ones(4, 128), training, [Shard(0)])}
        held = weights if dist.get_rank() in (0, 1) else None
        where = {"w": (serving, [Shard(0)])}
        received = meshcast.reshard_state_dict(held, where, quantize={"w": int8})
        assert received["w"].dtype == torch.int8 and received["w_scale"].shape == (4, 2)
    """

    def __init__(
        self,
        quantize: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        *,
        block: tuple[int, int],
        dtype: torch.dtype,
        scales: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
        packed: int = 1,
        name: str | None = None,
    ) -> None:
        if not callable(quantize):
            raise LayoutError(f"BlockScaled: quantize {checks.shown(quantize)} is no function")
        sizes = checks.listed("BlockScaled: block", block)
        if len(sizes) != 2:
            raise LayoutError(f"BlockScaled: block {checks.shown(block)}: expected (rows, columns)")
        rows, columns = (checks.integer("BlockScaled: size of a block", by, 1, 10**9) for by in sizes)
        each = checks.integer("BlockScaled: packed", packed, 1, columns)
        if columns % each:
            raise LayoutError(f"BlockScaled: packed {each} does not divide {columns}, the columns of a block")
        named = {"_scale": scales} if not isinstance(scales, Mapping) else dict(scales)
        if not named or not all(isinstance(suffix, str) and suffix for suffix in named):
            raise LayoutError(
                f"BlockScaled: scales {checks.shown(scales)}: expected a dtype, or a mapping of the suffixes "
                "of names to dtypes"
            )
        if name is None:
            name = getattr(quantize, "__name__", type(quantize).__name__)
        if not isinstance(name, str):
            raise LayoutError(f"BlockScaled: name {checks.shown(name)} is no text")
        of_values, of_scales = _stored(dtype), tuple(map(_stored, named.values()))
        packs = f", {each} in a value" if each > 1 else ""
        each_scale = ", ".join(
            f"{suffix} {dtype_name(of)}" for suffix, of in zip(named, of_scales, strict=True)
        )
        text = f"{name} ({dtype_name(of_values)} by blocks of {rows}x{columns}{packs}, {each_scale})"
        self.quantize = quantize
        self.scheme = Scheme(text, _OWN, (rows, columns), of_values, of_scales, each, tuple(named))

    def __repr__(self) -> str:
        return f"<BlockScaled {self.scheme.text}>"

    def made(self, name: str, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns values and scales of a part of a tensor, checked."""
        scheme = self.scheme
        what = f"the function of quantize={scheme.text!r}, given {tuple(part.shape)} of {name!r},"
        before = None if part.is_inference() else part._version
        try:
            with torch.autocast(part.device.type, enabled=False):  # of the caller's thread alone
                found = self.quantize(part)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise LayoutError(f"{what} raised {type(error).__name__}: {first}") from error
        if before is not None and part._version != before:
            raise LayoutError(
                f"{what} wrote to its argument, which may be the tensor that is held, or another thread did; "
                "write to a clone of it"
            )
        count = 1 + len(scheme.scales)
        results = tuple(found) if isinstance(found, tuple | list) else (found,)
        if len(results) != count or not all(isinstance(x, torch.Tensor) for x in results):
            raise LayoutError(f"{what} returned {checks.shown(found)}; expected a tuple of {count} tensors")
        shapes = [scheme.values_shape(part.shape), *scheme.scale_shapes(name, part.shape)]
        roles = ["the values", *(f"what is called {name + suffix!r}" for suffix in scheme.suffixes)]
        dtypes = (scheme.values, *scheme.scales)
        for x, role, dtype, shape in zip(results, roles, dtypes, shapes, strict=True):
            if (x.dtype, tuple(x.shape), x.device) != (dtype, shape, part.device):
                raise LayoutError(
                    f"{what} returned {dtype_name(x.dtype)} of shape {tuple(x.shape)} on {x.device} for "
                    f"{role}; expected {dtype_name(dtype)} of shape {shape} on {part.device}"
                )
        return results


def _stored(given: Any) -> torch.dtype:
    """A dtype whose elements a tensor on the CPU can hold and copy."""
    found = checks.dtype(given)
    try:
        torch.empty(1, dtype=found, device="cpu").copy_(torch.empty(1, dtype=found, device="cpu"))
    except Exception as error:
        raise LayoutError(f"BlockScaled: tensors of {dtype_name(found)} cannot be copied by torch") from error
    return found


@once
class Quantize(NamedTuple):
    """The block-scaled type that a destination gets, and the names of its scales. matrices: it is asked for
    all destinations, for those of floating-point tensors of two dimensions or more alone."""

    scheme: Scheme
    scales: tuple[str, ...]
    matrices: bool


class Quantizing:
    """The argument ``quantize=`` of a rank."""

    def __init__(self, given: Any) -> None:
        whole = isinstance(given, str | BlockScaled | None)
        if not whole and not isinstance(given, Mapping) and not callable(given):
            raise LayoutError(
                f"quantize={checks.shown(given)}: expected a block-scaled type, or a mapping by name or a "
                f"function of the name that gives one; {_SCHEMES}"
            )
        self._given, self._whole = given, whole

    def _asked(self, name: str) -> Any:
        """The type and, where they are named, its scales."""
        if self._whole:
            return self._given
        return self._given.get(name) if isinstance(self._given, Mapping) else self._given(name)

    def of(self, name: str) -> Quantize | None:
        """Returns the block-scaled type that is asked for by the name of a destination."""
        found = self._asked(name)
        if found is None:
            return None
        kind, scales = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
        if not isinstance(kind, str | BlockScaled):
            raise LayoutError(f"quantize of {name!r} is {checks.shown(found)}; {_SCHEMES}")
        scheme = scheme_of(kind) if isinstance(kind, str) else kind.scheme
        suffixes = scheme.suffixes
        names = tuple(name + suffix for suffix in suffixes)
        if scales is not None:
            names = (scales,) if isinstance(scales, str) else checks.listed(f"scales of {name!r}", scales)
            if len(names) != len(suffixes) or not all(isinstance(each, str) for each in names):
                raise LayoutError(
                    f"quantize names {checks.shown(scales)} for the scales of {name!r}: {scheme.text} has "
                    f"{len(suffixes)}, called {', '.join(name + each for each in suffixes)} by default"
                )
        if len({name, *names}) <= len(suffixes):
            raise LayoutError(f"quantize gives {name!r} and its scales {names} one name")
        return Quantize(scheme, names, self._whole)

    def own(self, name: str, scheme: Scheme) -> BlockScaled:
        """Returns the type of the user that the ranks have agreed on, where this rank quantises. Raises
        LayoutError where it was not given that one."""
        found = self._asked(name)
        kind = found[0] if isinstance(found, tuple | list) and found else found
        if not isinstance(kind, BlockScaled) or kind.scheme != scheme:
            given = "no type" if kind is None else checks.shown(kind, 200)
            raise LayoutError(
                f"{name!r} is to become {scheme.text}, and this rank, which holds a part of it, was given "
                f"{given} for it; give all ranks that hold it the same BlockScaled: quantize={{{name!r}: "
                "...}"
            )
        return kind


def amax_of(part: torch.Tensor, low: Sequence[int], block: Sequence[int], out: torch.Tensor) -> None:
    """Fills out, float32 on the CPU, with the largest magnitude of each block that a part touches, row-major.
    low: where the part begins in its tensor. NaN where one of a block is."""
    if not part.is_cuda:
        _C.block_amax(part, low, block, out)
    elif part.numel():
        found = torch.empty(out.shape, dtype=torch.float32, device=part.device)
        _C.cuda.block_amax(*_on_gpu(part), low, block, found.data_ptr(), *_stream_of(part))
        out.copy_(found)  # once it is there


def scales_of(scheme: Scheme, amax: torch.Tensor, tensor_amax: float, out: torch.Tensor) -> None:
    """Fills out with the scales of blocks, all on the CPU. tensor_amax: the largest magnitude of the tensor,
    for nvfp4."""
    _C.block_scales(scheme.kind, amax, tensor_amax, out)


def values_of(
    scheme: Scheme,
    part: torch.Tensor,
    low: Sequence[int],
    block: Sequence[int],
    amax: torch.Tensor,
    tensor_amax: float,
    out: torch.Tensor,
) -> None:
    """Fills out, where the part is, with the values of a part, row-major. amax: of the blocks that it
    touches, over the whole tensor, on the CPU. A part of nvfp4 begins and ends between bytes. On a GPU
    the current stream does the work."""
    if not math.prod(part.shape):
        return
    if not part.is_cuda:
        _C.block_values(scheme.kind, part, low, block, amax, tensor_amax, out)
        return
    there = amax.to(part.device)
    kind = _C.cuda.BlockFormat.__members__[scheme.kind]
    view, element = _on_gpu(part)
    numbers = (there.data_ptr(), tensor_amax, out.data_ptr())
    _C.cuda.block_values(kind, view, element, low, block, *numbers, *_stream_of(part))


def _on_gpu(part: torch.Tensor) -> tuple[Any, Any]:
    """The address, sizes and strides in bytes of a tensor, and its type."""
    size = part.element_size()
    view = part.data_ptr(), size, list(part.shape), [stride * size for stride in part.stride()]
    return view, _C.cuda.ElementType.__members__[dtype_name(part.dtype)]


def _stream_of(part: torch.Tensor) -> tuple[int, int]:
    device = part.get_device()
    return device, torch.cuda.current_stream(device).cuda_stream


def tensor_scale_of(tensor_amax: float) -> float:
    """The scale of all blocks of a tensor, for nvfp4."""
    return _C.nvfp4_tensor_scale(tensor_amax)
