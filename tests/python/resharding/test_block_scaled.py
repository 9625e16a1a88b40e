"""BlockScaled: what is refused, and what is made of it. Calls: multiproc/test_quantize_own.py."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from meshcast import BlockScaled, LayoutError
from meshcast.base.wire import pack, unpack
from meshcast.resharding.state_quantize import Blocks, Part, quantized
from meshcast.transfers import block_scaled as module
from meshcast.transfers.block_scaled import Quantize, Quantizing, amax_of, scheme_of, values_of


def by_something(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return part, part


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"quantize": 3}, "is no function"),
        ({"block": 64}, "expected a sequence"),
        ({"block": (64,)}, "expected \\(rows, columns\\)"),
        ({"block": (1, 2, 3)}, "expected \\(rows, columns\\)"),
        ({"block": (0, 64)}, "allowed are 1 to"),
        ({"block": (1, 64.0)}, "expected an integer"),
        ({"dtype": "weights"}, "expected a torch dtype"),
        ({"dtype": torch.uint4}, "uint4 cannot be copied"),
        ({"packed": 3}, "does not divide 64"),
        ({"packed": 128}, "allowed are 1 to 64"),
        ({"packed": True}, "expected an integer"),
        ({"scales": {}}, "a mapping of the suffixes"),
        ({"scales": {"": torch.float32}}, "a mapping of the suffixes"),
        ({"scales": {3: torch.float32}}, "a mapping of the suffixes"),
        ({"scales": {"_s": 4}}, "expected a torch dtype"),
        ({"scales": None}, "expected a torch dtype"),
        ({"name": 3}, "is no text"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], text: str) -> None:
    right = {"quantize": by_something, "block": (1, 64), "dtype": torch.int8}
    assert BlockScaled(**right).scheme.own
    with pytest.raises(LayoutError, match=text):
        BlockScaled(**(right | wrong))


def test_names_of_types() -> None:
    made = partial(BlockScaled, block=(2, 8), dtype=torch.uint8)
    text = "by_something (uint8 by blocks of 2x8, _scale float32)"
    assert repr(made(by_something)) == f"<BlockScaled {text}>"
    text = "by_something (uint8 by blocks of 2x8, 2 in a value, _a bfloat16, _b uint8)"
    scales = {"_a": torch.bfloat16, "_b": torch.uint8}
    assert made(by_something, packed=2, scales=scales).scheme.text == text
    assert made(partial(by_something), name="mine").scheme.text.startswith("mine (")
    assert made(partial(by_something)).scheme.text.startswith("partial (")


def test_types_that_differ_are_no_equals() -> None:
    """As ranks compare them, in the text that they exchange."""
    made = partial(BlockScaled, by_something, block=(2, 8), dtype=torch.uint8)
    all_ = [
        made(),
        made(name="other"),
        made(block=(8, 2)),
        made(dtype=torch.int8),
        made(packed=2),
        made(scales=torch.bfloat16),
        made(scales={"_scale": torch.float32, "_zero": torch.float32}),
        made(scales={"_scales": torch.float32}),
    ]
    schemes = [each.scheme for each in all_] + [
        scheme_of(text) for text in ("mxfp8", "nvfp4", "fp8_e4m3:2x8")
    ]
    assert len({*schemes}) == len(schemes)
    assert len({each.text for each in schemes}) == len(schemes)  # else messages would not show what differs
    for scheme in schemes:
        asked = Quantize(scheme, ("a",), False)
        assert unpack(Quantize, pack(asked)) == asked


def test_what_a_rank_asks_for() -> None:
    kind = BlockScaled(
        by_something, block=(1, 8), dtype=torch.int8, scales={"_s": torch.half, "_z": torch.int8}
    )
    for given in (kind, {"w": kind}, lambda name: kind if name == "w" else None):
        asked = Quantizing(given)
        assert asked.of("w") == Quantize(kind.scheme, ("w_s", "w_z"), given is kind)
        assert asked.own("w", kind.scheme) is kind
        assert given is kind or asked.of("v") is None
    named = Quantizing({"w": (kind, ("a", "b"))})
    assert named.of("w") == Quantize(kind.scheme, ("a", "b"), False)
    assert named.own("w", kind.scheme) is kind
    with pytest.raises(LayoutError, match="give all ranks that hold it the same BlockScaled"):
        named.own("w", BlockScaled(by_something, block=(1, 4), dtype=torch.int8).scheme)
    for given in (None, "mxfp8", {}, {"w": "mxfp8"}):
        with pytest.raises(LayoutError, match="this rank, which holds a part of it, was given"):
            Quantizing(given).own("w", kind.scheme)
    with pytest.raises(LayoutError, match="expected a block-scaled type"):
        Quantizing(3)
    with pytest.raises(LayoutError, match=r"and a meshcast\.BlockScaled"):
        Quantizing({"w": by_something}).of("w")


def test_memory_that_is_short_stays_what_it_is() -> None:
    def short(_: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        BlockScaled(short, block=(1, 8), dtype=torch.int8).made("w", torch.zeros(2, 8))


def test_functions_do_not_write_to_their_argument() -> None:
    """Which may be the weights themselves."""

    def scaled(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return part.mul_(2).to(torch.int8), part[:, ::8].clone()

    kind = BlockScaled(scaled, block=(1, 8), dtype=torch.int8)
    with pytest.raises(LayoutError, match=r"given \(2, 8\) of 'w', wrote to its argument"):
        kind.made("w", torch.zeros(2, 8))
    with torch.inference_mode():  # no versions are counted
        assert len(kind.made("w", torch.zeros(2, 8))) == 2


def test_functions_have_the_same_bits_under_autocast() -> None:
    """Which is of one thread: a call that runs beside its caller would make other values."""
    turn = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def turned(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return part @ turn, part[:, :1].clone()

    kind, part = BlockScaled(turned, block=(1, 64), dtype=torch.float32), turn.t().contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, _ = kind.made("w", part)
    assert torch.equal(values, part @ turn)


def test_a_tensor_is_made_on_one_device() -> None:
    box = ((0, 2), (0, 32))
    parts = [Part(name, (box, (0, 0), (), ())) for name in "ab"]
    for text in ("mxfp8", "nvfp4"):
        made = quantized("w", scheme_of(text), (2, 32), torch.float32, {0: parts})
        sources = {"a": torch.zeros(2, 32), "b": torch.zeros(2, 32, device="meta")}
        with pytest.raises(LayoutError, match="'w' is made of tensors on cpu and meta"):
            Blocks(0, [made], sources, Quantizing(text))


@pytest.mark.parametrize("text", ["fp8_e4m3:4x8", "mxfp8", "nvfp4"])
def test_all_of_float16_counts_where_float32_is_flushed(text: str) -> None:
    """Its numbers below 2^-14 are none of those that torch.set_flush_denormal is for."""
    scheme, x = scheme_of(text), torch.arange(1 << 15).to(torch.int16).view(torch.float16)[: 31 << 10]
    x = x.reshape(-1, 64)
    block, low = scheme.blocks("x", x.shape), [0, 0]

    def made(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amax = torch.empty(scheme.scales_shape("x", x.shape))
        amax_of(x, low, block, amax)
        values = torch.empty(scheme.values_shape(x.shape), dtype=scheme.values)
        values_of(scheme, x, low, block, amax, float(x.max()), values)
        return amax, values.view(torch.uint8)

    expected = made(x.float())
    for flushed in (False, True):
        torch.set_flush_denormal(flushed)
        try:
            found = made(x)
        finally:
            torch.set_flush_denormal(False)
        assert all(map(torch.equal, found, expected)), flushed


class OnGpu(torch.Tensor):
    """A tensor on the CPU that takes the way of those on GPUs."""

    is_cuda = True  # type: ignore[assignment]


class Kernels:
    """The CPU's code behind the calls of csrc/binding/cuda, which are given addresses."""

    BlockFormat = SimpleNamespace(__members__={name: name for name in ("fp8_e4m3", "mxfp8", "nvfp4")})
    ElementType = SimpleNamespace(__members__={name: name for name in ("float32", "bfloat16", "float16")})

    def __init__(self) -> None:
        self.streams: list[tuple[int, int]] = []

    def _tensor(self, view: tuple[int, int, list[int], list[int]], name: str) -> torch.Tensor:
        address, size, shape, strides = view
        dtype = getattr(torch, name)
        assert dtype.itemsize == size
        count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) // size
        flat = torch.frombuffer((ctypes.c_uint8 * (count * size)).from_address(address), dtype=dtype)
        return flat.as_strided(shape, [stride // size for stride in strides])

    def block_amax(self, view: Any, name: str, low: Any, block: Any, amax: int, *stream: int) -> None:
        x = self._tensor(view, name)
        counts = [-(-(at + n) // by) - at // by for at, n, by in zip(low, x.shape, block, strict=True)]
        out = self._tensor((amax, 4, [math.prod(counts)], [4]), "float32")
        module._C.block_amax(x, low, block, out)
        self.streams.append((stream[0], stream[1]))

    def block_values(
        self, kind: str, view: Any, name: str, low: Any, block: Any, amax: int, most: float, out: int,
        *stream: int,
    ) -> None:  # fmt: skip
        x = self._tensor(view, name)
        counts = [-(-(at + n) // by) - at // by for at, n, by in zip(low, x.shape, block, strict=True)]
        magnitudes = self._tensor((amax, 4, [math.prod(counts)], [4]), "float32")
        size = x.numel() // (2 if kind == "nvfp4" else 1)
        values = self._tensor((out, 1, [size], [1]), "uint8")
        module._C.block_values(kind, x, low, block, magnitudes, most, values)
        self.streams.append((stream[0], stream[1]))


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def by_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """The dtype that torch gives new tensors."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("text", ["fp8_e4m3:4x6", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_given_the_boxes_of_tensors_on_gpus(text: str, dtype: torch.dtype) -> None:
    scheme = scheme_of(text)
    full = torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).to(dtype).t()
    part, low = full[3:20, 32:], (3, 32)
    block = scheme.blocks("x", full.new_empty(33, 64).shape)
    counts = [-(-(at + n) // by) - at // by for at, n, by in zip(low, part.shape, block, strict=True)]
    expected = torch.empty(counts, dtype=torch.float32)
    amax_of(part, low, block, expected)
    values = torch.empty(scheme.values_shape(part.shape), dtype=scheme.values)
    values_of(scheme, part, low, block, expected, 3.0, values)
    kernels, stream = Kernels(), SimpleNamespace(cuda_stream=77)
    with (
        mock.patch.object(module._C, "cuda", kernels, create=True),
        mock.patch.object(torch.cuda, "current_stream", lambda device: stream if device == -1 else None),
    ):
        there = part.as_subclass(OnGpu)
        amax = torch.full(counts, 9.0, dtype=torch.float32)
        amax_of(there, low, block, amax)
        assert torch.equal(amax, expected)
        found = torch.zeros_like(values)
        values_of(scheme, there, low, block, amax, 3.0, found)
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
        amax_of(there[:0], low, block, torch.empty(0))  # nothing to start a kernel for
    assert kernels.streams == [(-1, 77)] * 2
