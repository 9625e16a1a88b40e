"""The digest of C++ and the one of torch: what they find, and that they are one."""

from __future__ import annotations

import random

import pytest
import torch
from meshcast import _C, Layout
from meshcast.transfers.digest import (
    _digest_by_torch,
    _weights,
    added,
    nans_of,
    pieces_digest,
    shard_digest,
)
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.timeout(120)

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip
NAN_BITS = {  # two NaNs of different payload and sign
    torch.float16: (torch.int16, 0x7E00, 0x7C01), torch.bfloat16: (torch.int16, 0x7FC0, 0x7F81),
    torch.float32: (torch.int32, 0x7FC00000, 0x7F800001),
    torch.float64: (torch.int64, 0x7FF8 << 48, (0x7FF0 << 48) + 1),
    torch.float8_e5m2: (torch.uint8, 0x7D, 0x7E), torch.float8_e4m3fn: (torch.uint8, 0x7F, 0xFF),
}  # fmt: skip
WHOLE = [Replicate()]


def drawn(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, so NaNs too; of truth values, 0 and 1."""
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=made).bool()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=made)
    return bits.view(dtype).reshape(shape)


def whole(x: torch.Tensor, **options: object) -> int:
    return shard_digest(x, Layout([0], WHOLE), x.shape, 0, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_and_gpu_agree_whatever_the_strides(dtype: torch.dtype) -> None:
    """The function for GPUs runs on the CPU as well."""
    rng = random.Random(str(dtype))
    for _ in range(40):
        ndim = rng.randrange(5)
        shape = tuple(rng.choice([1, 2, 3, 7, 130]) for _ in range(ndim))
        low = [rng.randrange(1 << 12) for _ in shape]
        of = [begin + size + rng.randrange(5) for begin, size in zip(low, shape, strict=True)]
        order = rng.sample(range(ndim), ndim)
        x = drawn(rng, tuple(size + rng.randrange(2) for size in shape), dtype)
        x = x.permute(order).contiguous().permute([order.index(d) for d in range(ndim)])
        x = x[tuple(slice(size) for size in shape)]
        expected = _digest_by_torch(x, low, of, *nans_of(dtype))
        assert _C.digest(x, low, of, *nans_of(dtype)) == expected, (shape, low, of, order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_anywhere_shows(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    x = drawn(rng, (3, 4099), dtype)
    if dtype in NAN_BITS or dtype.is_complex:
        x = torch.randint(-100, 100, x.shape).to(
            dtype
        )  # a bit that makes another NaN of a NaN may stay unseen
    before = whole(x)
    memory = x.view(torch.uint8).reshape(-1).numpy()
    for _ in range(300):
        place, bit = rng.randrange(memory.size), 1 if dtype == torch.bool else 1 << rng.randrange(8)
        memory[place] ^= bit
        assert whole(x) != before, (place, bit)
        memory[place] ^= bit
    assert whole(x) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_elements_that_change_places_show(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    x = torch.arange(3 * 4099).remainder(251).to(dtype).reshape(3, -1)
    before, flat = whole(x), x.view(-1)
    for _ in range(300):
        a, b = rng.randrange(flat.numel()), rng.randrange(flat.numel())
        if flat[a] != flat[b]:
            flat[[a, b]] = flat[[b, a]]
            assert whole(x) != before, (a, b)
            flat[[a, b]] = flat[[b, a]]
    for shift in (1, 4096, 4099):
        assert whole(flat.roll(shift).view_as(x)) != before, shift


def test_weights_are_odd_and_differ() -> None:
    lower, upper = _weights()
    for each in (lower, upper):
        assert bool((each % 2 == 1).all())
        assert -(1 << 15) < int(each.min()) < int(each.max()) < 1 << 15
    assert len(set(zip(lower.tolist(), upper.tolist(), strict=True))) == 4096


@pytest.mark.parametrize("dtype", NAN_BITS, ids=str)
def test_all_nans_are_one_value_and_no_other_is(dtype: torch.dtype) -> None:
    ints, first, second = NAN_BITS[dtype]
    x = torch.ones(4, 5).to(dtype)
    found = []
    for bits in (first, second):
        x.view(ints)[1, 2] = bits
        assert bool(x.to(torch.float64)[1, 2].isnan())
        found.append(whole(x))
    assert found[0] == found[1]
    largest = torch.finfo(dtype).max if dtype == torch.float8_e4m3fn else float("inf")
    x[1, 2] = largest
    assert whole(x) != found[0]
    if dtype in (torch.float32, torch.float64):
        pairs = torch.view_as_complex(x.view(-1, 2))
        x.view(ints)[1, 2] = first
        one = whole(pairs)
        x.view(ints)[1, 2] = second
        assert whole(pairs) == one


def test_a_cast_is_the_one_of_torch_and_makes_no_copy_of_the_whole() -> None:
    x = torch.randn(3000, 1000)
    assert whole(x, dtype=torch.bfloat16) == whole(x.to(torch.bfloat16))
    with torch.profiler.profile(profile_memory=True) as seen:
        whole(x, dtype=torch.bfloat16)
        whole(x)
        whole(x.T)
    made = max((event.cpu_memory_usage for event in seen.events()), default=0)
    assert made < x.nbytes / 4, made


def test_conjugates_and_negatives_are_read_as_values() -> None:
    x = torch.randn(40, 2, dtype=torch.complex64)
    assert whole(x.conj()) == whole(x.conj().resolve_conj()) != whole(x)
    assert whole(x.conj().imag) == whole(x.conj().imag.resolve_neg())


def test_boxes_and_shards_add_up_to_the_whole() -> None:
    x = torch.randn(7, 5, 6)
    boxes = Layout.from_boxes({0: [((0, 7), (0, 2), (0, 6)), ((0, 7), (4, 5), (0, 6))],
                               1: [((0, 7), (2, 4), (0, 6))]})  # fmt: skip
    parts = [
        pieces_digest(torch.cat([x[:, :2], x[:, 4:]], 1), boxes.pieces(x.shape)[0][1], x.shape),
        pieces_digest(x[:, 2:4], boxes.pieces(x.shape)[1][1], x.shape),
    ]
    assert added(parts) == added([whole(x)])
    rows = [
        shard_digest(part, Layout([0, 1, 2], [Shard(0)]), x.shape, r) for r, part in enumerate(x.chunk(3))
    ]
    assert added(rows) == added([whole(x)])


def test_a_part_of_other_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="dimensions of the whole"):
        _C.digest(torch.ones(2, 2), [0], [2], 0, 0, 0)
