"""Loading UCX leaves the process as it was; which library and which devices are chosen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import meshcast
import pytest
from meshcast.errors import MeshcastError
from meshcast.groups import network

_PROGRAM = """
import ctypes, os, re
from pathlib import Path

libc = ctypes.CDLL(None)

def process():
    status = Path("/proc/self/status").read_text()
    signals = re.findall(r"Sig(?:Cgt|Ign|Blk):\\s*(\\w+)", status)
    code = [
        ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 32)
        for name in ("mmap", "munmap", "mremap", "madvise", "shmat", "brk")
    ]
    return signals, code, dict(os.environ)

import torch, meshcast
from meshcast.groups import network
assert "libucp" not in Path("/proc/self/maps").read_text(), "the import must not load it"
before = process()
plane = network.plane((), 60)
assert "libucp" in Path("/proc/self/maps").read_text()
assert process() == before
del plane
assert process() == before
"""


def test_loading_changes_nothing_else() -> None:
    """Signals, libc's code, the environment, stderr."""
    if network.rdma_devices():
        pytest.skip("with RDMA devices UCX watches mmap for its cache of registered memory")
    package = Path(meshcast.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCAST_UCX", "/there/is/none")
    with pytest.raises(MeshcastError, match=r"MESHCAST_UCX is '/there/is/none'.*MESHCAST_TRANSPORT=gloo"):
        network.library()


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCAST_UCX", __file__)
    with pytest.raises(MeshcastError, match=r"test_ucx\.py"):
        network.plane((), 60)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loopback unless it is all there is; a name in the environment counts more."""
    monkeypatch.setattr(network, "rdma_devices", list)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "off")])
    flags = {"lo": 1 | 8, "eth0": 1, "eth1": 1, "off": 0}
    monkeypatch.setattr(network.settings, "interface_flags", flags.__getitem__)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.device_names() == "eth0,eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert network.device_names() == "eth1"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert network.device_names() == ""
    monkeypatch.delenv("UCX_NET_DEVICES")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    flags |= {"eth0": 0, "eth1": 0}
    assert network.device_names() == "lo"
    monkeypatch.setattr(network, "rdma_devices", lambda: ["mlx5_0"])
    assert network.device_names() == ""


def test_variables_are_set_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_DEBUG_SIGNO", raising=False)
    before = dict(os.environ)
    wrong: list[str] = []

    def load() -> None:
        try:
            for _ in range(50):
                with network._quiet():
                    time.sleep(0.0001)
                    if os.environ.get("UCX_DEBUG_SIGNO") != "0":
                        wrong.append("another thread took it away")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert dict(os.environ) == before
