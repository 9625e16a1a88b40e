"""Processes for the ranks of harness.run_world, forked from one that has imported torch once.

The process of the tests starts the server when it first needs one, and the server ends with it. Each fork is
a worker.py of its own, with its own arguments, environment and output. Variables that are read while an
interpreter or a library starts come too late for a fork: with other values of such, a worker is started as a
new process.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Start", "start"]

WORKER = Path(__file__).with_name("worker.py")
_EARLY = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "TORCH_")  # how such variables begin
# Each rank would otherwise spend most of its start on these, and all ranks at once.
_PRELOAD = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._subclasses.fake_tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)


class Start(Protocol):
    """The process that forks the ranks of a world and waits for them, as subprocess.Popen shows it."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def start(
    arguments: Sequence[str], output: int, env: Mapping[str, str], usual: Mapping[str, str] | None
) -> Start:
    """Starts worker.py. output: descriptor of a file. env: all variables of the worker. usual: those of a
    worker for which nothing is asked, which a server gets; None: no server is to fork it."""
    server = None if usual is None else _Server.of_process(usual)
    if server is None or server.comes_late(env):
        return subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    return server.fork(arguments, output, env)


class _Fork:
    """A worker that is no child of this process. Nobody learns its exit status, which says nothing that its
    files do not."""

    def __init__(self, pid: int, alive: int) -> None:
        self._pid, self._alive = pid, alive  # alive: a pipe that ends with the worker

    def poll(self) -> int | None:
        return 0 if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(str(WORKER), timeout or 0.0)
        return 0

    def kill(self) -> None:
        if not self._ended(0):
            os.kill(self._pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        if self._alive >= 0:
            if not select.select([self._alive], [], [], timeout)[0]:
                return False
            os.close(self._alive)
            self._alive = -1
        return True


class _Server:
    """The server's side in the process of the tests."""

    _one: _Server | None = None

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env,
            )

    @classmethod
    def of_process(cls, env: Mapping[str, str]) -> _Server:
        if cls._one is None:
            cls._one = cls(env)
        return cls._one

    def comes_late(self, env: Mapping[str, str]) -> bool:
        """Returns whether some of these variables would be read in vain."""
        names = {name for name in {*env, *self.env} if name.startswith(_EARLY)}
        return any(env.get(name) != self.env.get(name) for name in names)

    def fork(self, arguments: Sequence[str], output: int, env: Mapping[str, str]) -> _Fork:
        alive, theirs = os.pipe()
        try:
            request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()})
            socket.send_fds(self._socket, [request.encode()], [output, theirs])
            answer = self._socket.recv(64)
        finally:
            os.close(theirs)
        assert answer, "the server of forks has ended: see what it printed"
        return _Fork(int(answer), alive)


def _serve(descriptor: int) -> int:
    """Forks until the process of the tests has ended. Returns the status of a fork, in the fork."""
    for name in _PRELOAD:
        importlib.import_module(name)
    from multiproc import worker

    asked = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        request, descriptors, *_ = socket.recv_fds(asked, 1 << 20, 2)
        if not request:
            return 0
        pid = os.fork()
        if pid == 0:
            break
        for each in descriptors:
            os.close(each)
        asked.send(str(pid).encode())
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, (output, alive) = json.loads(request), descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(said["env"])
    os.chdir(said["cwd"])
    sys.argv[:] = [str(WORKER), *said["arguments"]]
    return worker.main(alive)


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1])))
