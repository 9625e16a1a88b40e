"""UCX in this process: which library it is, and how loading it leaves the rest of the process alone."""

from __future__ import annotations

import ctypes.util
import fcntl
import importlib.util
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import _C
from ..base import settings
from ..errors import MeshcastError

__all__ = ["device_names", "library", "plane", "rdma_devices"]

_RDMA = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_SONAME = "libucp.so.0"
_environment = threading.Lock()  # private groups load the library in threads of their own
_SIOCGIFFLAGS, _IFF_UP, _IFF_LOOPBACK = 0x8913, 1, 8  # of linux/sockios.h and linux/if.h


def _wheel() -> str | None:
    """Path of the library that the package libucx brings."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return str(path)
    return None


def _system() -> str | None:
    return _SONAME if ctypes.util.find_library("ucp") else None


def rdma_devices() -> list[str]:
    """The RDMA devices of this host, as the operating system names them."""
    return sorted(entry.name for entry in _RDMA.iterdir()) if _RDMA.is_dir() else []


def library() -> str:
    """Path or name of the UCX to load, by `MESHCAST_UCX`. Raises MeshcastError where there is none.

    The wheel has no InfiniBand transport; a distribution's UCX has. So a machine with RDMA devices takes that
    of the system, and any other the wheel, which is newer.
    """
    choice = settings.UCX.text()
    if choice == "wheel":
        found = _wheel()
    elif choice == "system":
        found = _system()
    elif choice != "auto":
        found = choice if Path(choice).is_file() else None
    elif rdma_devices():
        found = _system() or _wheel()
    else:
        found = _wheel() or _system()
    if found is None:
        raise MeshcastError(
            f"{settings.UCX.name} is {choice!r}, but there is no such UCX; install libucx-cu12 or the "
            f"system's libucx0, or set {settings.TRANSPORT.name}=gloo",
            op="connect",
            phase="connect",
        )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """UCX reads these while it is loaded: it would catch signals of the program, patch libc's mmap (which
    nothing but RDMA needs), and write to stderr what the errors say anyway. What the user has set stays."""
    wanted = {"UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
    if not rdma_devices():
        wanted["UCX_MEM_EVENTS"] = "n"
    with _environment:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _flags(name: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    return int(struct.unpack_from("H", answer, 16)[0])


def _may_reach_hosts(name: str) -> bool:
    """Returns whether an interface is up and neither a loopback nor a bridge, as containers have: UCX takes
    bridges of two hosts that have the same addresses for one network."""
    flags = _flags(name)
    return bool(flags & _IFF_UP) and not flags & _IFF_LOOPBACK and not (_NET / name / "bridge").exists()


def device_names() -> str:
    """The devices among which UCX chooses, "" for all; `UCX_NET_DEVICES` says otherwise."""
    if rdma_devices() or "UCX_NET_DEVICES" in os.environ:
        return ""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return named
    return ",".join(name for _, name in socket.if_nameindex() if _may_reach_hosts(name)) or "lo"


def plane(devices: Sequence[str], timeout: float) -> _C.UcxPlane:
    """The plane of this process; the first call makes it. devices: one for each rail, () for UCX's choice.
    timeout: seconds within which a peer that the network has lost is noticed. Raises MeshcastError."""
    if not hasattr(_C, "UcxPlane"):
        raise MeshcastError(
            "this copy of meshcast was built without the headers of UCX", op="connect", phase="connect"
        )
    with _quiet():
        return _C.UcxPlane(library(), list(devices) or [device_names()], timeout, bool(rdma_devices()))
