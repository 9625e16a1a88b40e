"""Which errors of an attempt may come of a rank that died: the others are raised at once."""

from __future__ import annotations

import pytest
import torch
from meshcast.elastic.job import _may_be_loss
from meshcast.errors import LayoutError, PeerLostError


def caused(by: Exception | None) -> Exception:
    """As clip_grad_norm_ raises what ended its collectives."""
    try:
        raise LayoutError("cannot work with its arguments") from by
    except LayoutError as error:
        return error


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (PeerLostError("rank 1 is lost"), True),
        (RuntimeError("Connection closed by peer"), True),
        (caused(RuntimeError("Connection reset by peer")), True),
        (caused(None), False),
        (caused(TypeError("no tensor")), False),
        (LayoutError("lives on no rank", gone=(("w", ((0, 1),), (1,)),)), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("a batch of 0"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_may_be_a_loss(error: Exception, may: bool) -> None:
    assert _may_be_loss(error) is may
