"""An emulated cluster on one Linux machine: a network namespace for each host, links of a chosen rate."""

from .launch import Rank, run_ranks
from .network import Cluster, ClusterError, remove_stale

__all__ = ["Cluster", "ClusterError", "Rank", "remove_stale", "run_ranks"]
