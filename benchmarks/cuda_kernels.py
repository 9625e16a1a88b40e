"""Rates of the pack and unpack kernels beside a plain device-to-device copy and torch's copy_.

python -m benchmarks.cuda_kernels [--out FILE.json]

For every box of tests/kernel_shapes.py with at least 1 MiB, and for boxes of 4 KiB in one call: bytes read
and written per second, median of repeats, timed by CUDA events around a CUDA graph of calls that follow each
other, after the bytes were compared. Without a graph the host would be measured: a GPU copies these boxes
faster than Python starts the next call. Ratios are to a copy of as many contiguous bytes in the same run.
Needs a GPU and a build with CUDA.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from meshcast.base.progress import track
from meshcast.bench import kernels

from benchmarks import on_gpu

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from kernel_shapes import ALL

REPEATS = 15
CALLS = 20
SMALLEST = 1 << 20


def rate(call: Callable[[], Any], nbytes: int) -> float:
    """Bytes read plus bytes written per second, median of the repeats."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    seconds = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return 2 * nbytes / statistics.median(seconds)


def plain_rate(nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), nbytes)


def measure(name: str, pairs: list[kernels.Pair], direction: str) -> dict[str, Any]:
    def by_torch() -> None:
        for source, target in pairs:
            target.copy_(source)

    kernels.copy(pairs)
    if not all(torch.equal(source, target) for source, target in pairs):
        sys.exit(f"benchmarks.cuda_kernels: {name}, {direction}: wrong bytes")
    nbytes = sum(source.nbytes for source, _ in pairs)
    plain = plain_rate(nbytes)
    ours, theirs = rate(lambda: kernels.copy(pairs), nbytes), rate(by_torch, nbytes)
    row = {
        "box": name,
        "direction": direction,
        "bytes": nbytes,
        "gb_per_s": ours / 1e9,
        "of_plain_copy": ours / plain,
        "torch_of_plain_copy": theirs / plain,
    }
    ratios = f"{ours / plain:6.2f} torch {theirs / plain:6.2f}"
    print(f"{name:<24} {direction:<7} {nbytes:>11} B {ours / 1e9:8.0f} GB/s {ratios}")
    return row


def main() -> None:
    out = on_gpu.begin("cuda_kernels", __doc__)
    rows = []
    for box in track(ALL, "boxes", ticks=False):
        tensor = torch.randint(0, 1 << 30, box.full, dtype=torch.int32, device="cuda")
        view = box.of(tensor)
        if view.nbytes < SMALLEST:
            continue
        packed = torch.empty(view.shape, dtype=view.dtype, device="cuda")
        rows.append(measure(box.name, [(view, packed)], "pack"))
        rows.append(measure(box.name, [(packed, view)], "unpack"))
    tensor = torch.randint(0, 1 << 30, (112, 64, 32), dtype=torch.int32, device="cuda")
    pairs = [(part[:, :16], torch.empty(64, 16, dtype=torch.int32, device="cuda")) for part in tensor]
    rows.append(measure("112 boxes of 4 KiB", pairs, "pack"))
    on_gpu.write_figures(out, rows)


if __name__ == "__main__":
    main()
