"""The error classes, and C++ errors that become them."""

import pickle

import meshcast
import pytest
import torch
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
CLASSES = [
    each
    for each in map(errors.__dict__.get, errors.__all__)
    if isinstance(each, type) and issubclass(each, errors.MeshcastError)
]


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


def test_a_caller_names_the_errors_of_its_call() -> None:
    caller = errors.Caller("reshard", 2, "agree")
    error = caller.error(errors.PeerLostError, "lost rank 5", peer=5)
    assert str(error) == "reshard on rank 2: lost rank 5"
    assert (error.rank, error.op, error.phase, error.peer) == (2, "reshard", "agree", 5)
    with pytest.raises(meshcast.LayoutError, match=r"^reshard on rank 2: no mesh$") as caught, caller:
        raise errors.LayoutError("reshard: no mesh")
    assert (caught.value.rank, caught.value.op) == (2, "reshard")
    # One of an inner call stays what it is, and no text is named twice.
    outer = errors.Caller("step", 2)
    with pytest.raises(meshcast.LayoutError, match=r"^reshard on rank 2: no mesh$"), outer, caller, caller:
        raise errors.LayoutError("no mesh")
    # What begins with a rank has its call only where its field says so.
    with pytest.raises(meshcast.LayoutError, match=r"^reshard on rank 2: rank 1 has none$"), caller:
        raise errors.LayoutError("rank 1 has none")
    with pytest.raises(meshcast.LayoutError, match=r"^rank 2: reshard has none$"), caller:
        raise errors.LayoutError("rank 2: reshard has none", op="reshard")
    with pytest.raises(ZeroDivisionError), caller:
        raise ZeroDivisionError


def test_a_caller_types_the_errors_of_its_arguments() -> None:
    caller = errors.Caller("plan")
    found = caller.typed(KeyError("x"))
    assert isinstance(found, meshcast.LayoutError)
    assert str(found) == "plan: these arguments cannot be used: KeyError: 'x'"
    assert str(caller.typed(MemoryError("of 3 GiB"))) == "plan: there is not enough memory: of 3 GiB"
    full = torch.OutOfMemoryError("no")
    assert caller.typed(full) is full
    named = errors.LayoutError("bad")
    assert caller.typed(named) is named
    assert (str(named), named.op) == ("plan: bad", "plan")


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
