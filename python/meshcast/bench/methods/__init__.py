"""Ways to move the tensors of a case: meshcast's strategies, plans of others on its transport, and what is
written today without it. One file for each kind."""

from __future__ import annotations

from . import dtensor, gloo, ours, published
from .method import Method

__all__ = ["METHODS", "Method"]

METHODS: dict[str, Method] = {
    method.name: method for kind in (ours, published, gloo, dtensor) for method in kind.METHODS
}
