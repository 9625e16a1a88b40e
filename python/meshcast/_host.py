"""Which host a process runs on, as far as the network is concerned."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """Text that is equal for processes of one host and unlike for others.

    It is the boot id of the kernel and the inode of the network namespace: containers and emulated hosts of
    one machine share the boot id, the host name and /dev/shm, but not the network. `MESHCAST_HOST_ID`
    overrides it.
    """
    override = os.environ.get("MESHCAST_HOST_ID")
    if override:
        return override
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # no Linux /proc: one kernel is one host, and its name the best there is
        return socket.gethostname()
    return f"{boot}/{namespace}"
