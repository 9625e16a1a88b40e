"""Tests that need a CUDA device: where none is they say so, or fail under MESHCAST_REQUIRE_CUDA=1. DEVICE=cpu
runs those that are marked gpu(on_cpu=True) on the CPU, which shows that they are right themselves."""

from __future__ import annotations

import os

import cuda_kernels as kernels
import pytest
import torch


def obstacle() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not kernels.available():
        return "this build of meshcast has no CUDA code"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None or (marker.kwargs.get("on_cpu") and os.environ.get("DEVICE") == "cpu"):
        return
    reason = obstacle()
    if reason is None:
        return
    if os.environ.get("MESHCAST_REQUIRE_CUDA") == "1":
        pytest.fail(f"MESHCAST_REQUIRE_CUDA=1, but {reason}", pytrace=False)
    pytest.skip(f"needs a GPU: {reason}")
