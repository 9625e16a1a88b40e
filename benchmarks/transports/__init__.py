"""Messages between hosts over each transport, beside torch's own, Open MPI's and commux's."""
