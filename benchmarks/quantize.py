"""Quantising by blocks on one core, as bytes of the source a second over those of a plain copy of it, by
turns. CPU time of this thread; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from meshcast.transfers.block_scaled import SOURCES, amax_of, scales_of, scheme_of, values_of

from .harness import parser, positive

_ROUNDS = 9
_COLUMNS = 8192


def main() -> None:
    options = parser("quantize", __doc__)
    options.add_argument("--mib", type=positive(int), default=128, help="of the source (default 128)")
    nbytes = options.parse_args().mib << 20
    torch.set_num_threads(1)
    print("| type | source | copy, GB/s | magnitudes | scales | values | together |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for text in ("fp8_e4m3:128x128", "fp8_e4m3:1x128", "mxfp8", "nvfp4"):
        for dtype in SOURCES:
            x = torch.randn(nbytes // dtype.itemsize // _COLUMNS, _COLUMNS).mul_(0.02).to(dtype)
            seconds = _seconds(text, x)
            copy, *steps = (statistics.median(each) for each in seconds)
            ratios = " | ".join(f"{copy / each:.2f}" for each in (*steps, sum(steps)))
            print(f"| {text} | {str(dtype)[6:]} | {x.nbytes / copy / 1e9:.1f} | {ratios} |", flush=True)


def _seconds(text: str, x: torch.Tensor) -> list[list[float]]:
    """Of a copy, and of the three steps, by round."""
    scheme = scheme_of(text)
    block, low = scheme.blocks("x", x.shape), [0, 0]
    amax = torch.empty(scheme.scales_shape("x", x.shape))
    scales = torch.empty(amax.shape, dtype=scheme.scales[0])
    values, copied = torch.empty(scheme.values_shape(x.shape), dtype=scheme.values), torch.empty_like(x)
    steps: list[Callable[[], object]] = [
        lambda: copied.copy_(x),
        lambda: amax_of(x, low, block, amax),
        lambda: scales_of(scheme, amax, 1.0, scales),
        lambda: values_of(scheme, x, low, block, amax, 1.0, values),
    ]
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS + 1):  # the first touches the memory
        for each, step in zip(found, steps, strict=True):
            begin = time.thread_time()
            step()
            each.append(time.thread_time() - begin)
    return [each[1:] for each in found]
