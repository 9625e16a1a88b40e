"""Which addresses tensors occupy, against every element's own address."""

from __future__ import annotations

import itertools

import torch
from meshcast.memory import overlaps


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    places = [
        sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    ]
    size = tensor.element_size()
    return tensor.data_ptr() + min(places) * size, tensor.data_ptr() + (max(places) + 1) * size


def test_tensors_overlap_where_their_address_ranges_meet() -> None:
    base = torch.zeros(6, 8)
    views = [
        base,
        base[:3],
        base[3:],
        base[2:4],
        base[:, 2:5],
        base[1:3, 6:],
        base[::2],
        base.t(),
        base[5, 7],  # no dimension
        base[:1].expand(4, 8),
        base.view(torch.uint8)[3:5],
        torch.zeros(6, 8),
    ]
    for a, b in itertools.product(views, repeat=2):
        (a_first, a_end), (b_first, b_end) = _range(a), _range(b)
        assert overlaps(a, b) == (a_first < b_end and b_first < a_end), (a.shape, b.shape)


def test_an_empty_tensor_overlaps_nothing() -> None:
    base = torch.zeros(4, 4)
    assert not overlaps(base[2:2], base)
    assert not overlaps(base, base[:, 1:1])
