"""Programs outside torch to compare with."""

from .mpi import PEERS as MPI_PEERS
from .peer import Peer
from .scalapack import PEERS as SCALAPACK_PEERS

__all__ = ["PEERS", "Peer"]

PEERS: list[Peer] = [*MPI_PEERS, *SCALAPACK_PEERS]
