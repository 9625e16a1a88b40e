"""An emulated cluster on one Linux machine: a network namespace for each host, links of a chosen rate."""

from .launch import Network, Rank, run_ranks
from .loopback import Loopback
from .network import Cluster, ClusterError, missing, remove_stale

__all__ = ["Cluster", "ClusterError", "Loopback", "Network", "Rank", "missing", "remove_stale", "run_ranks"]
