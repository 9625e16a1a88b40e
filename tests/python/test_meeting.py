"""Buckets of meshcast.resharding.meeting: all items, in order, of about so many bytes together."""

from __future__ import annotations

import pytest
from meshcast.resharding.meeting import buckets


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [[5]]),
        ([50, 1], [[50], [1]]),  # one that is larger than a bucket travels alone
        ([4, 4, 4, 2, 8, 1, 1], [[4, 4], [4, 2], [8, 1, 1]]),
        ([10, 10], [[10], [10]]),
    ],
    ids=str,
)
def test_buckets(sizes: list[int], expected: list[list[int]]) -> None:
    assert list(buckets(iter(sizes), lambda size: size, 10)) == expected


def test_buckets_are_made_as_items_come() -> None:
    """The weights of a step need not all be there at once."""
    taken: list[int] = []

    def items():
        for each in range(6):
            taken.append(each)
            yield each

    found = buckets(items(), lambda _: 4, 8)
    assert next(found) == [0, 1]
    assert taken == [0, 1, 2]
