"""The error classes, and C++ errors that become them."""

import pickle

import meshcast
import pytest
import torch.distributed as dist
from meshcast import _C, Layout, errors

FIELDS = {
    "rank": 3,
    "peer": 5,
    "op": "reshard",
    "sequence": 7,
    "phase": "transfer",
    "elapsed": 1.5,
    "limit": 2.0,
}
CLASSES = [each for each in map(errors.__dict__.get, errors.__all__) if isinstance(each, type)]


@pytest.mark.parametrize("cls", CLASSES)
def test_fields_survive_pickling(cls: type[errors.MeshcastError]) -> None:
    error = pickle.loads(pickle.dumps(cls("rank 3: lost rank 5", **FIELDS)))
    assert type(error) is cls
    assert str(error) == "rank 3: lost rank 5"
    assert {name: getattr(error, name) for name in FIELDS} == FIELDS
    assert all(getattr(cls("x"), name) is None for name in FIELDS)


def test_standard_handlers_catch_them() -> None:
    assert all(issubclass(cls, (errors.MeshcastError, RuntimeError)) for cls in CLASSES)
    assert all(issubclass(cls, dist.DistError) for cls in CLASSES)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.PeerLostError, ConnectionError)


def test_lost_peers_say_how_far_they_came() -> None:
    error = errors.PeerLostError("x", rank=1, bytes_done=10, bytes_expected=20, address="10.0.0.7:41000")
    error = pickle.loads(pickle.dumps(error))
    assert (error.rank, error.bytes_done, error.bytes_expected, error.address) == (
        1,
        10,
        20,
        "10.0.0.7:41000",
    )


def test_errors_of_cpp_are_typed() -> None:
    with pytest.raises(meshcast.LayoutError, match="rank 0 twice") as caught:
        _C.Layout([2], b"\0" * 8, [("replicate", 0, 1, "")]).shards([4])
    assert caught.value.rank is None
    core = Layout.parse("2:R")._core((4,))
    with pytest.raises(meshcast.LayoutError, match="strategy"):
        _C.Plan([([4], 4, core, core)], _C.Topology.uniform(1, 1, 1, 1, 1, 0), "fast", "greedy", 0, 0)


def test_cpp_checks_what_python_did_not() -> None:
    """The C++ side is safe on its own: it refuses what only a broken caller would pass."""
    core = Layout.parse("2:R")._core((4,))
    uniform = _C.Topology.uniform(1, 1, 1, 1, 1, 0)
    for shape, element_bytes in (([-4], 4), ([4, 4], 0), ([1 << 62, 4], 4), ([4], -1), ([1] * 9, 4)):
        with pytest.raises(meshcast.LayoutError):
            _C.Plan([(shape, element_bytes, core, core)], uniform, "auto", "greedy", 0, 0)
    with pytest.raises(meshcast.LayoutError):
        _C.Layout([2], b"\0" * 9, [("replicate", 0, 1, "")])
    with pytest.raises(meshcast.LayoutError):
        _C.Topology.uniform(1 << 40, 1, 1, 1, 1, 0)
    plan = _C.Plan([([4], 4, core, core)], uniform, "auto", "greedy", 0, 0)
    for index in (-1, 1 << 40):
        with pytest.raises(IndexError):
            plan.hop(index)
    with pytest.raises(KeyError):
        plan.column("nothing")
