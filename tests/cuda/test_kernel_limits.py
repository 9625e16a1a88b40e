"""The kernels and plain copies on hardware where CUDA has limits: pitches, offsets, graphs, errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import cuda_kernels as kernels
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
LONGEST_PITCH = 2**31 - 1
GIB = 1 << 30


def require_memory(nbytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes:
        pytest.skip(f"{nbytes / GIB:.1f} GiB of GPU memory are needed, {free / GIB:.1f} GiB are free")


def noise(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 256)


def same(found: torch.Tensor, expected: torch.Tensor, step: int) -> bool:
    """By parts of their first dimension, since what compares them takes memory too."""
    parts = zip(found.split(step), expected.split(step), strict=True)
    return all(torch.equal(one, other) for one, other in parts)


@pytest.mark.parametrize(
    ("width", "from_pitch", "to_pitch"),
    [(4096, 4097, 4096), (4099, 5003, 4999), (65537, 65537 + 16, 131071), (4096, 8192, 4098)],
)
def test_wide_rows_at_odd_pitches(width: int, from_pitch: int, to_pitch: int) -> None:
    """cudaMemcpy2DAsync inside a GPU: the driver's own "may fail" for pitches that it did not give."""
    source, target = noise(65 * from_pitch), noise(65 * to_pitch)
    expected = target.clone()
    for first in (0, 1, 5):
        moved = source.as_strided((64, width), (from_pitch, 1), first)
        kernels.copy([(moved, target.as_strided((64, width), (to_pitch, 1), first))])
        expected.as_strided((64, width), (to_pitch, 1), first).copy_(moved)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("pitch", [LONGEST_PITCH, LONGEST_PITCH + 1])
def test_rows_as_far_apart_as_a_pitch_may_be(pitch: int) -> None:
    require_memory(pitch + GIB)
    source = torch.zeros(pitch + 8192, dtype=torch.uint8, device="cuda")
    rows = source.as_strided((2, 8192), (pitch, 1))
    rows.copy_(noise(2 * 8192).view(2, 8192))
    found = torch.empty_like(rows)
    kernels.copy([(rows, found)])
    assert torch.equal(found, rows)


def test_offsets_beyond_four_gibibytes() -> None:
    require_memory(12 * GIB)
    source = noise(5 * GIB).view(-1, 1024)
    view = source[:, 3:1020]
    found = torch.empty(view.shape, dtype=torch.uint8, device="cuda")
    kernels.copy([(view, found)])
    assert same(found, view, 1 << 19)
    source.zero_()
    kernels.copy([(found, view)])
    assert same(view, found, 1 << 19)


def test_more_pieces_than_one_entry_can_have() -> None:
    """Bytes that lie alone are a piece each: 2^31 of them and more."""
    require_memory(8 * GIB)
    source = noise((1 << 32) + 64)
    view = source[::2]
    found = torch.empty(view.shape, dtype=torch.uint8, device="cuda")
    kernels.copy([(view, found)])
    assert same(found, view, 1 << 28)


def flat(source: torch.Tensor, found: torch.Tensor) -> None:
    kernels.copy([(source, found)])


def rows(source: torch.Tensor, found: torch.Tensor) -> None:
    kernels.copy([(source[:, :2000], found[:, :2000])])


def many(source: torch.Tensor, found: torch.Tensor) -> None:
    pairs = zip(source[:, 1:77].split(2), found[:, 1:77].split(2), strict=True)
    kernels.copy(list(pairs))


def cast(source: torch.Tensor, found: torch.Tensor) -> None:
    kernels.cast([(source[:, 1:], found[:, 1:])])


def reduced(source: torch.Tensor, found: torch.Tensor) -> None:
    kernels.reduce([(source, found)], "max")


@pytest.mark.parametrize("way", [flat, rows, many, cast, reduced], ids=lambda way: way.__name__)
def test_a_graph_captures(way: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Also where CUDA loads the kernel in the capture, since nothing has launched it before."""
    source = torch.randn(512, 2048, device="cuda")
    dtype = torch.bfloat16 if way is cast else torch.float32
    expected, found = (torch.zeros(512, 2048, dtype=dtype, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(source, found)
    assert not found.any()
    for _ in range(2):
        source.neg_()
        found.zero_()
        expected.zero_()
        graph.replay()
        way(source, expected)
        assert torch.equal(found, expected) and found.any()


def test_an_error_of_others_is_not_the_kernels() -> None:
    source, found = torch.arange(4096.0, device="cuda").view(64, 64), torch.zeros(64, 50, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(64)  # refused, and left for whoever asks next
    try:
        kernels.copy([(source[:, 7:57], found)])
    finally:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes it away
    assert torch.equal(found, source[:, 7:57])
