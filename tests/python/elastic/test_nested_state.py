"""The names of the entries of a nested state, and what is refused before a rank dies."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from meshcast import LayoutError
from meshcast.elastic.job import _held
from meshcast.elastic.places import Nest, check_entries
from torch.distributed.checkpoint._nested_dict import flatten_state_dict


def state(step: int = 0) -> dict[str, Any]:
    model = OrderedDict({"a.weight": torch.full((2,), float(step)), "a.bias": torch.zeros(1)})
    optimizer = {
        "state": {0: {"step": torch.tensor(step), "name": "a"}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    pairs = ({"w": torch.ones(1)}, 7)
    return {
        "model": model,
        "optim": optimizer,
        "pairs": pairs,
        "seen": Counter(a=step),
        "x": torch.tensor(1),
    }


def test_names_are_those_of_torch() -> None:
    found = Nest(state()).flat(state(3))
    names = {name for name, x in flatten_state_dict(state(3))[0].items() if isinstance(x, torch.Tensor)}
    # torch takes a tuple for one value
    assert {name for name, x in found.items() if isinstance(x, torch.Tensor)} == names | {"pairs.0.w"}
    assert found["optim.param_groups"] == state()["optim"]["param_groups"]
    assert found["seen"] == Counter(a=3)


def test_a_state_is_nested_again_with_its_types() -> None:
    nest = Nest(state())
    made = nest.nested(dict(reversed(nest.flat(state(5)).items())))
    expected = state(5)
    assert made.keys() == expected.keys()
    assert type(made["model"]) is OrderedDict and type(made["pairs"]) is tuple
    assert made["model"]["a.weight"].tolist() == [5, 5]
    assert made["optim"]["state"][0]["step"] == 5 and list(made["optim"]["state"]) == [0]
    assert made["pairs"] == expected["pairs"] and made["seen"] == expected["seen"]


def test_a_flat_state_stays_as_it_is() -> None:
    flat = {"a.b": torch.ones(1), "a": 3, "rng": {"x": [1]}}
    nest = Nest(flat)
    assert nest.flat(flat) == flat == nest.nested(flat)


def test_entries_of_other_ranks_go_where_their_names_say() -> None:
    made = Nest(state()).nested({"model.b.weight": 1, "other.x": 2, "optim.extra": 3})
    assert (made["model"]["b.weight"], made["other.x"], made["optim"]["extra"]) == (1, 2, 3)


def test_what_is_opened_follows_from_the_state_that_was_made() -> None:
    """So that a rank which joins, and has taken no step, has the same names."""
    fresh = {"optim": {"state": {}, "lr": torch.tensor(0.1)}}
    stepped = {"optim": {"state": {0: torch.ones(2)}, "lr": torch.tensor(0.1)}}
    assert list(Nest(fresh).flat(stepped)) == ["optim.state", "optim.lr"]


def test_the_name_of_a_dict_stands_for_all_in_it() -> None:
    nest = Nest(state())
    assert nest.above("optim.state.0.step") == ["optim", "optim.state", "optim.state.0", "optim.state.0.step"]
    assert nest.above("model.a.weight") == ["model", "model.a.weight"]
    assert nest.above("unknown.x") == ["unknown.x"]


def test_bytes_of_nested_tensors_count() -> None:
    class Training:
        def state_dict(self) -> dict[str, Any]:
            return {"model": {"w": torch.zeros(4)}, "more": [torch.zeros(2)]}

    assert _held(Training()) == 24


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], "state_dict() returned a list"),
        ({"a.b": 1, "a": {"b": torch.ones(1)}}, "two entries with the name 'a.b'"),
    ],
)
def test_states_without_names_are_refused(given: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words.replace("(", r"\(").replace(")", r"\)")):
        Nest(given)


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(LayoutError, match="holds itself"):
        Nest(loop)


def test_an_entry_that_cannot_travel_is_named() -> None:
    given = {"model": {"w": torch.ones(1), "odd": object()}}
    with pytest.raises(LayoutError, match=r"'model.odd' of state_dict\(\) holds"):
        check_entries(Nest(given).flat(given))
