"""Messages between two ranks by every call that moves some, beside torch's own, Open MPI's and UCX's."""
