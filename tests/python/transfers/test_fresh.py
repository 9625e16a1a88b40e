"""Memory of results on the CPU: what a freed one leaves for the next, and that they are tensors as any."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import pytest
import torch
from meshcast import _C
from meshcast.transfers.medium import fresh

LARGE = (1 << 20, 3)  # 12 MiB of float32
SHAPES = ((), (0, 3), (5,), (3, 1, 2), LARGE)


@pytest.fixture(autouse=True)
def large_blocks() -> Iterator[None]:
    _C.use_large_blocks(True)
    yield
    _C.use_large_blocks(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_what_torch_makes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found, expected = fresh(shape, dtype), torch.empty(shape, dtype=dtype)
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(found, what) == getattr(expected, what)
    assert found.stride() == expected.stride()
    assert found.untyped_storage().nbytes() == math.prod(shape) * dtype.itemsize


def test_a_large_one_takes_the_memory_of_the_last() -> None:
    first = fresh(LARGE, torch.float32)
    address = first.data_ptr()
    other = fresh(LARGE, torch.float32)
    assert other.data_ptr() != address
    del first
    assert _C.kept_large_bytes() >= math.prod(LARGE) * 4
    assert fresh(LARGE, torch.float32).data_ptr() == address


def test_memory_that_a_view_holds_serves_nobody_else() -> None:
    first = fresh(LARGE, torch.float32)
    view = first[1:].fill_(3.0)
    del first
    fresh(LARGE, torch.float32).fill_(5.0)
    assert bool((view == 3.0).all())


def test_can_be_resized_saved_and_shared() -> None:
    found = fresh(LARGE, torch.float32).fill_(2.0)
    buffer = io.BytesIO()
    torch.save(found, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), found)
    found.resize_(2 * LARGE[0], 3)
    assert bool((found[: LARGE[0]] == 2.0).all())
    found.fill_(4.0)
    found.share_memory_()
    assert found.is_shared()
    assert bool((found == 4.0).all())


def test_what_torch_cannot_have_is_refused_in_its_words() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        fresh((1 << 46,), torch.float32)


def test_the_profiler_sees_it() -> None:
    with torch.profiler.profile(profile_memory=True) as profiled:
        found = fresh(LARGE, torch.float32)
        del found
    sizes = [event.cpu_memory_usage for event in profiled.events() if event.name == "[memory]"]
    assert math.prod(LARGE) * 4 in sizes


def test_is_left_to_torch_where_it_is_turned_off() -> None:
    kept = _C.kept_large_bytes()
    _C.use_large_blocks(False)
    found = fresh((1 << 23,), torch.float32)
    del found
    assert _C.kept_large_bytes() == kept
