"""Which releases of torch have pipelines of their own that programs can be compared with."""

from __future__ import annotations

import pytest
import torch

NEEDS_ORACLE = pytest.mark.skipif(
    torch.__version__.startswith(("2.11", "2.12")),
    reason=f"pipelines of torch {torch.__version__} itself, the oracle, hang in some of these programs",
)
