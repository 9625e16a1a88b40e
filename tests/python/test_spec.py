"""TensorSpec: what is refused as it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshcast import LayoutError, TensorSpec
from torch.distributed.tensor import Replicate

CPU: Any = SimpleNamespace(device_type="cpu")
GPU: Any = SimpleNamespace(device_type="cuda")


def spec(mesh: Any = CPU, shape: Any = (2, 3), dtype: Any = torch.float32, **more: Any) -> TensorSpec:
    return TensorSpec(shape, dtype, mesh, [Replicate()], **more)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_device_of_the_mesh_may_be_named(device: Any) -> None:
    assert spec(device=device).shape == torch.Size((2, 3))


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="device is cuda:0, but the mesh is on cpu"):
        spec(device="cuda:0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    spec(GPU, device="cuda")
    spec(GPU, device="cuda:1")
    with pytest.raises(LayoutError, match="device is cuda:0, but results are made on the current"):
        spec(GPU, device="cuda:0")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shape": (2, -1)}, "sizes must not be negative"),
        ({"shape": "ab"}, "shape must be a sequence of integers"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype"),
    ],
)
def test_bad_shapes_and_dtypes_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        spec(**more)
