"""tests/golden/casts.txt holds what torch's conversions give; the C++ tests hold the kernels' against it."""

from __future__ import annotations

from pathlib import Path

import torch

GOLDEN = Path(__file__).parents[2] / "golden" / "casts.txt"
# Name, type, type of its bits, bits of infinity (what has more is a NaN).
FORMATS = {
    "float32": (torch.float32, torch.int32, 0x7F800000),
    "bfloat16": (torch.bfloat16, torch.int16, 0x7F80),
    "float16": (torch.float16, torch.int16, 0x7C00),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8, 0x7E),  # no infinity: the largest number
    "float8_e5m2": (torch.float8_e5m2, torch.uint8, 0x7C),
}
# Lower halves of float32 numbers: exact ones, ties of every narrower format, and their neighbours.
LOW_HALVES = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def inputs(name: str) -> torch.Tensor:
    """Every number of a narrow format; of float32, every upper half with each of LOW_HALVES."""
    dtype, bits, _ = FORMATS[name]
    if bits is torch.uint8:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    high = torch.arange(65536, dtype=torch.int64)
    if bits is torch.int16:
        return high.to(torch.int16).view(dtype)
    both = (high[:, None] << 16) | torch.tensor(LOW_HALVES, dtype=torch.int64)
    return both.to(torch.int32).view(dtype).flatten()


def digest(values: torch.Tensor, name: str) -> int:
    """Sum of (bits + 1) * (2654435761 i + 12345) modulo 2^64; all NaNs count as one."""
    _, bits_type, infinity = FORMATS[name]
    width = bits_type.itemsize * 8
    bits = values.view(bits_type).to(torch.int64) & ((1 << width) - 1)
    magnitude = bits & ((1 << (width - 1)) - 1)
    bits = torch.where(magnitude > infinity, torch.tensor(infinity + 1), bits)
    index = torch.arange(len(bits), dtype=torch.int64)
    return int(((bits + 1) * (2654435761 * index + 12345)).sum()) % 2**64


def lines() -> list[str]:
    """What this torch gives. Its release decides whether too large numbers for e4m3fn become NaN."""
    saturates = not torch.tensor(1e9).to(torch.float8_e4m3fn).isnan()
    out = []
    for source in FORMATS:
        values = inputs(source)
        for target, (dtype, _, _) in FORMATS.items():
            if target == source:
                continue
            rule = "_nan" if target == "float8_e4m3fn" and not saturates else ""
            out.append(f"{source} {target}{rule} {len(values)} {digest(values.to(dtype), target):016x}")
    return out


def merged(known: list[str]) -> list[str]:
    """The known lines with those of this torch in their places: releases differ in the e4m3fn ones only."""
    found = {" ".join(line.split()[:2]): line for line in lines()}
    both = {" ".join(line.split()[:2]): line for line in known} | found
    order = list(FORMATS)
    return sorted(both.values(), key=lambda line: (order.index(line.split()[0]), _place(line.split()[1])))


def _place(target: str) -> tuple[int, bool]:
    return list(FORMATS).index(target.removesuffix("_nan")), target.endswith("_nan")


def test_torch_converts_as_the_golden_file_says() -> None:
    # Another release of torch may round differently: then `python tests/python/transfers/test_cast_golden.py`
    # writes its lines anew, and the C++ test shows what the kernels have to follow.
    known = GOLDEN.read_text().splitlines()
    assert merged(known) == known
    assert len(known) == 24


if __name__ == "__main__":
    known = GOLDEN.read_text().splitlines() if GOLDEN.exists() else []
    GOLDEN.write_text("\n".join(merged(known)) + "\n")
