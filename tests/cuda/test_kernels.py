"""The kernels on hardware against torch's copy_, .to and arithmetic."""

from __future__ import annotations

import cuda_kernels as kernels
import pytest
import torch
from kernel_shapes import ALL, Box
from meshcast.errors import LayoutError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def unique(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes that differ from place to place as far as the width of the type allows."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.arange(0, count, 4, dtype=torch.int64, device="cuda") * 2654435761 & 0x7FFFFFFF
    return bits.to(torch.int32).view(torch.uint8)[:count].clone().view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("box", ALL, ids=lambda box: box.name)
def test_pack_and_unpack_as_torch_copies(box: Box, dtype: torch.dtype) -> None:
    tensor = unique(box.full, dtype)
    view = box.of(tensor)
    packed = torch.empty(view.shape, dtype=dtype, device="cuda")
    kernels.copy([(view, packed)])
    assert torch.equal(bits(packed), bits(view))

    found = unique(box.full, dtype).neg() if dtype is not torch.uint8 else 255 - tensor
    expected = found.clone()
    box.of(expected).copy_(packed)
    kernels.copy([(packed, box.of(found))])
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("most_blocks", [0, 3])
def test_many_boxes_share_launches(most_blocks: int) -> None:
    tensors = [unique(box.full, torch.int32) for box in ALL]
    views = [box.of(tensor) for _ in range(8) for box, tensor in zip(ALL, tensors, strict=True)]
    packed = [torch.empty(view.shape, dtype=torch.int32, device="cuda") for view in views]
    kernels.copy(list(zip(views, packed, strict=True)), most_blocks=most_blocks)
    for view, found in zip(views, packed, strict=True):
        assert torch.equal(found, view)


def same_numbers(found: torch.Tensor, expected: torch.Tensor) -> bool:
    both_nan = found.float().isnan() & expected.float().isnan()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    return bool((both_nan | (found.view(width) == expected.view(width))).all())


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_casts_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        with pytest.raises(Exception, match="equal types"):
            kernels.cast(
                [(torch.zeros(4, dtype=source, device="cuda"), torch.zeros(4, dtype=target, device="cuda"))]
            )
        return
    high = torch.arange(65536, dtype=torch.int64, device="cuda")
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device="cuda")
    numbers = ((high[:, None] << 16) | low).to(torch.int32).view(source)
    for view in (numbers, numbers[:, 1:-1], numbers.t()):
        found = torch.empty(view.shape, dtype=target, device="cuda")
        kernels.cast([(view, found)])
        assert same_numbers(found, view.to(target).contiguous())


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8],
    ids=str,
)
def test_reductions_as_torch_computes(dtype: torch.dtype, op: str) -> None:
    torch.manual_seed(5)
    own = (torch.randn(257, 130, device="cuda") * 9).to(dtype)[:, 1:]
    carried = (torch.randn(257, 129, device="cuda") * 9).to(dtype)
    compute = {
        "sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul,
    }[op]  # fmt: skip
    expected = compute(own, carried)
    kernels.reduce([(own, carried)], op)
    assert torch.equal(carried, expected)
    if op == "avg":
        kernels.divide([carried], 3)
        mean = expected / 3 if dtype.is_floating_point else torch.div(expected, 3, rounding_mode="trunc")
        torch.testing.assert_close(carried, mean.to(dtype))


def test_a_graph_captures_a_copy() -> None:
    source = unique((512, 1024), torch.float32)
    found = torch.zeros(512, 100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.copy([(source[:, 7:107], found)])
    assert not found.any()
    graph.replay()
    assert torch.equal(bits(found), bits(source[:, 7:107]))


def test_calls_follow_the_current_stream() -> None:
    source = torch.zeros(4096, 1024, device="cuda")
    found = torch.empty(4096, 1000, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a copy on another stream would run now, before the fill
        source.fill_(3)
        kernels.copy([(source[:, :1000], found)])
    stream.synchronize()
    assert torch.equal(found, torch.full_like(found, 3))


def test_wrong_devices_and_types_are_refused() -> None:
    here = torch.zeros(4, device="cuda")
    with pytest.raises(LayoutError, match="one device"):
        kernels.copy([(torch.zeros(4), here)])
    with pytest.raises(LayoutError, match="different sizes"):
        kernels.copy([(here.double(), here)])
    with pytest.raises(LayoutError, match="reduce: one of"):
        kernels.reduce([(here, here.to(torch.float8_e5m2))], "sum")
