"""Training that continues with other ranks than it had: what they hold moves to those that are there now."""

from __future__ import annotations

from meshcast.elastic.job import Job, Training
from meshcast.elastic.rebalance import Rebalanced, rebalance
from meshcast.elastic.remesh import remesh
from meshcast.elastic.replicas import Replicas

__all__ = ["Job", "Rebalanced", "Replicas", "Training", "rebalance", "remesh"]
