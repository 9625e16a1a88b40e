"""What messages show of what users hand in."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from meshcast.base.checks import shown


def test_values_of_tensors_are_left_out() -> None:
    secret = torch.full((2, 3), 12345.0)
    given = [
        secret,
        torch.nn.Parameter(secret),
        {"w": secret},
        OrderedDict(w=[secret]),
        secret.numpy(),
        (secret,),
    ]
    for each in given:
        assert "12345" not in shown(each, limit=1000), each
    assert shown(secret) == "a Tensor of torch.float32 and shape (2, 3)"
    assert shown({"w": secret}) == "{'w': tensor(...)"
    assert shown(np.ones(2)) == "array(...)"
    assert shown(torch.tensor(12345)) == "a Tensor of torch.int64 and shape ()"


def test_other_values_are_shown_in_one_short_line() -> None:
    assert shown({"w": (1, "two")}) == "{'w': (1, 'two')}"
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert shown("a\nb") == "'a\\nb'"
