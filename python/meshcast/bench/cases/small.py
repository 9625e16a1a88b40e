"""Small messages, 4 KiB to 1 MiB: what a call costs beside its bytes. Their ratios to the bound mean
little: look at the times."""

from __future__ import annotations

from meshcast.layout import Layout

from .case import Case

_SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
_TABLE = [("shards", "4:S0", "4@4:S0"), ("replicas", "1:R", "2x2@4:R")]


def _case(nbytes: int, name: str, source: str, target: str) -> Case:
    size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
    src, dst = Layout.parse(source), Layout.parse(target)
    return Case(
        f"{name} of {size}", "small", (nbytes // 4,), src, dst, f"{source} to {target}", fixed=True,
        least_repeats=20,
    )  # fmt: skip


CASES = [_case(nbytes, *row) for row in _TABLE for nbytes in _SIZES]
