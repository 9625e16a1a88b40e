"""Which addresses tensors occupy, against every element's own address."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshcast import LayoutError
from meshcast.resharding import memory as strides
from meshcast.resharding.memory import check_outs, check_storage, near, overlaps


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


def test_outputs_that_overlap_themselves_are_refused() -> None:
    zeros = torch.zeros
    for right in (
        zeros(3, 4),
        zeros(3, 4).t(),
        zeros(9, 8)[::2, 1::3],
        zeros(1).expand(1),
        zeros(0, 4).as_strided((0, 4), (1, 1)),
        zeros(18).as_strided((3, 4), (4, 3)),  # neither stride is beyond the reach of the other
        zeros(40).as_strided((3, 1, 4), (4, 0, 3)),
    ):
        check_storage(right)
    for wrong in (
        zeros(32).as_strided((6, 3), (2, 1)),
        zeros(1).expand(4),
        zeros(3, 1).expand(3, 2),
        zeros(20).unfold(0, 4, 3),
        zeros(40).as_strided((4, 5), (4, 3)),
        zeros(5, 5).to_sparse(),
    ):
        with pytest.raises(LayoutError, match=r"one address|torch\.strided"):
            check_storage(wrong)


def test_an_output_that_is_too_hard_to_judge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strides, "_MOST_SUMS", 0)
    memory = torch.zeros(999)
    with pytest.raises(LayoutError, match=r"strides \(50, 34, 21\).*too long.*contiguous"):
        check_storage(memory.as_strided((4, 4, 4), (50, 34, 21)))
    outs = {"a": memory.as_strided((4, 4), (50, 34)), "b": memory[1:].as_strided((4, 2), (47, 21))}
    with pytest.raises(LayoutError, match=r"'a' \(shape .*'b' \(.*too long"):
        check_outs(outs)


def test_outputs_that_share_memory_are_refused_and_interleaved_ones_are_not() -> None:
    base = torch.zeros(6, 8)
    names = "abcdefgh"
    interleaved = {
        "columns": base.unbind(1),
        "blocks": base.split([3, 1, 4], 1),
        "alternating": (base[::2, ::2], base[::2, 1::2], base[1::2, ::2], base[1::2, 1::2]),
        "real and imaginary": tuple(torch.zeros(4, dtype=torch.complex64).view(torch.float32).view(4, 2).t()),
        "empty ones": (base, base[:0], base[6:], base[:, 8:]),
        "different widths": (base[:, :4], base[:, 4:].view(torch.uint8)),
    }
    for outs in interleaved.values():
        for order in (outs, outs[::-1]):
            check_outs(dict(zip(names, order, strict=False)))
    shared = {
        "itself": (base, base),
        "a row and a column": (base[3], base[:, 5]),
        "neighbours by one": (base[:, :4], base[:, 3:]),
        "third of three": (base[0], base[5], base.view(-1)[7:9]),
        "a byte": (base[:, ::2], base.view(torch.uint8)[:, 19:20]),
        "a long one over short ones": (base, torch.zeros(3), base[1], torch.ones(2)),
    }
    for outs in shared.values():
        for order in (outs, outs[::-1]):
            with pytest.raises(LayoutError, match=r"'[a-d]' and '[a-d]' share memory"):
                check_outs(dict(zip(names, order, strict=False)))


def test_sources_near_outputs() -> None:
    base = torch.zeros(20)
    sources = {str(i): base[i : i + 2] for i in range(19)} | {"none": base[3:3], "far": torch.zeros(2)}
    for outs in ([], [base[4:6]], [base[12:], base[4:6], base[5:9]], [base[::9], base[11:13]], [base[2:2]]):
        expected = {name for name, source in sources.items() if any(overlaps(source, out) for out in outs)}
        assert near(sources, outs) == expected
