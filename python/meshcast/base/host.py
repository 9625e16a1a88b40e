"""The host that a process runs on, as far as the network is concerned, and the links of that host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from . import settings

_SYSFS = Path("/sys/class/net")


def host_identity() -> str:
    """Text that is equal for processes of one host and different for others.

    It is the boot id of the kernel and the inode of the network namespace: containers and emulated hosts of
    one machine share the boot id, the host name and /dev/shm, but not the network. `MESHCAST_HOST_ID`
    overrides it.
    """
    override = settings.HOST_ID.text()
    if override:
        return override
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # no Linux /proc: one kernel is one host, and its name the best there is
        return socket.gethostname()
    return f"{boot}/{namespace}"


def links(sysfs: Path = _SYSFS) -> dict[str, float | None]:
    """Interfaces that are up, loopback apart, with their speed in Gbit/s; None where the operating system
    does not know it, as on virtual links."""
    found: dict[str, float | None] = {}
    for link in sorted(sysfs.iterdir()) if sysfs.is_dir() else []:
        if link.name == "lo" or _read(link / "operstate") not in ("up", "unknown"):
            continue
        speed = _read(link / "speed")
        found[link.name] = int(speed) / 1000 if speed.isdigit() and int(speed) > 0 else None
    return found


def network_links(sysfs: Path = _SYSFS) -> dict[str, float | None]:
    """The links that carry a job's traffic: those that `GLOO_SOCKET_IFNAME` names, else the devices of the
    machine (bridges and tunnels go through one of them), else whatever is up."""
    found = links(sysfs)
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name in found]
    devices = [name for name in found if (sysfs / name / "device").exists()]
    return {name: found[name] for name in named or devices or found}


def _read(path: Path) -> str:
    """A file of sysfs, or "": links that are down answer with an error."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
