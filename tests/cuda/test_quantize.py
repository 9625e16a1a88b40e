"""Block-scaled types made on GPUs: the kernels against the CPU's bits, and calls, one rank for each GPU and
three that share one; see cases_quantize.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from meshcast.transfers.block_scaled import amax_of, scheme_of, values_of
from multiproc.devices import GPU, gpus
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(300)]

MODULE = Path(__file__).with_name("cases_quantize.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
SCHEMES = ["fp8_e4m3:128x128", "fp8_e4m3:1x128", "fp8_e4m3:3x5", "fp8_e4m3:9999x9999", "mxfp8", "nvfp4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All magnitudes that float16 has room for, subnormals, zeros, ties."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=draw) * torch.exp2(torch.randint(-24, 14, shape, generator=draw))
    x = torch.where(torch.rand(shape, generator=draw) < 0.1, torch.zeros(()), x)
    x[..., :3] = torch.tensor([1.0, 1.5, -448.0])
    return x.to(dtype)


def made_of(
    text: str, x: torch.Tensor, low: tuple[int, ...], tensor_amax: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes and values of a part that begins at `low`."""
    scheme = scheme_of(text)
    block = scheme.blocks("x", x.shape)
    counts = [-(-(at + size) // by) - at // by for at, size, by in zip(low, x.shape, block, strict=True)]
    amax = torch.empty(counts)
    amax_of(x, low, block, amax)
    values = torch.empty(scheme.values_shape(x.shape), dtype=scheme.values, device=x.device)
    values_of(scheme, x, low, block, amax, tensor_amax, values)
    return amax, values.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_those_of_the_cpu(scheme: str, dtype: torch.dtype) -> None:
    """Whole tensors and parts that begin in a block; turned, with gaps, of three dimensions."""
    column = {"mxfp8": 32, "nvfp4": 16}.get(scheme, 1)
    full = numbers((3, 67, 13 * column if column > 1 else 259), dtype)
    turned = numbers((13 * column if column > 1 else 259, 67), dtype).t()
    for whole in (full, turned, full[1]):
        there = whole.to(GPU)  # keeps the strides
        for top, left in ((0, 0), (5, 0), (1, 2), (66, 6)):
            for part, on_gpu in (
                (whole[..., top:, left * column :], there[..., top:, left * column :]),
                (
                    whole[..., top : top + 7, left * column :: 1],
                    there[..., top : top + 7, left * column :: 1],
                ),
            ):
                low = (*(0,) * (part.ndim - 2), top, left * column)
                expected = made_of(scheme, part, low, 3.0)
                found = made_of(scheme, on_gpu, low, 3.0)
                for mine, theirs in zip(found, expected, strict=True):
                    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), (whole.shape, low)


@pytest.fixture(
    scope="module", params=["a GPU for each", "one GPU for three"] if GPU == "cuda" else ["a GPU for each"]
)
def world(request: pytest.FixtureRequest) -> WorldResult:
    if request.param == "a GPU for each":
        return run_world(MODULE, gpus())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    shared = {"CUDA_VISIBLE_DEVICES": visible, "MESHCAST_CUDA_TRANSPORT": "auto"}
    return run_world(MODULE, 3, limit=280.0, env=shared)


@pytest.mark.parametrize("case", CASES)
def test_quantize(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
