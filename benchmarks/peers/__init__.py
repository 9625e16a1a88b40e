"""Programs outside torch to compare with."""

from .mpi import NOT_MEASURED
from .mpi import PEERS as MPI_PEERS
from .peer import Peer
from .scalapack import PEERS as SCALAPACK_PEERS

__all__ = ["NOT_MEASURED", "PEERS", "Peer"]

PEERS: list[Peer] = [*MPI_PEERS, *SCALAPACK_PEERS]
