"""Python programs that are forked from a process which has imported torch, instead of importing it each.

    Forked([sys.executable, "-m", "torch.distributed.run", ...], env=..., stdout=...)

The process of the tests starts the server when it first needs one, and the server ends with it. A forked
program is a child of the process that asked for it, with its own arguments, environment and output:
subprocess.Popen waits for it, signals reach it, and its exit status is real. Agents of torchrun and of
meshcast.elastic.run have a server of their own, from which they fork their workers.

A fork differs from a new process in what an interpreter or a library reads as it starts: with other values of
such variables (_EARLY), Forked starts a new process. All forks have one seed of Python's hashes. /proc
shows the command and the variables of the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Forked", "children", "environment", "run"]

ROOT = Path(__file__).resolve().parents[2]
_EARLY = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "TORCH_")  # how such variables begin
_LATE = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL_")  # those of them that a fork can follow
# Each rank would otherwise spend most of its start on these, and all ranks at once.
_PRELOAD = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._subclasses.fake_tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
_AGENTS = ("torch.distributed.run", "meshcast.elastic.run")  # modules that start workers
_NAME = "fork server"  # of a server's process, as ps shows it
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # of prctl(2)
_PARENT_LIMIT = (
    20.0  # seconds until a fork is a child of the process that asked for it; it takes milliseconds
)
_libc = ctypes.CDLL(None, use_errno=True)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables of a program of the tests."""
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", **(extra or {})}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # the ranks of a world share few cores
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "python"), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    )
    return env


class Forked(subprocess.Popen[Any]):
    """subprocess.Popen of [sys.executable, ["-u"], SCRIPT | "-m", MODULE | "-c", CODE, ARGUMENT...]."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell = rest[:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *groups = rest[6:]
        server = _Server.of_process()
        variables = dict(os.environ if env is None else env)
        start_new_session = groups[4]
        if preexec_fn or pass_fds or shell or args[0] != sys.executable or server.comes_late(variables):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        request = {
            "arguments": list(map(str, args[1:])),
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": bool(start_new_session),
        }
        standard = [
            given if given >= 0 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self.pid = server.fork(request, standard)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of Forked to its end, at most `limit` seconds; stdout and stderr are kept apart."""
    pipe = subprocess.PIPE
    with Forked(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def children(process: int) -> list[int]:
    """Numbers of the processes that it has started and that have not ended, without a server of forks."""
    found = []
    for pid in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
            if name != _NAME and rest[0] != "Z":
                found.append(pid)
    return found


class _Server:
    """The server, as seen by the process that asks it."""

    _one: _Server | None = None

    def __init__(self, asked: socket.socket, env: Mapping[str, str]) -> None:
        self._asked, self._env, self._lock = asked, env, threading.Lock()

    @classmethod
    def of_process(cls) -> _Server:
        if cls._one is None:
            env = environment()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=env,
                )
            cls._one = cls(ours, env)
        return cls._one

    @classmethod
    def of_agent(cls) -> None:
        """Forks the server of this process. Returns in the agent, and does not return in the server."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            for descriptor in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            _serve(theirs)
        theirs.close()
        cls._one = cls(ours, dict(os.environ))

    def comes_late(self, env: Mapping[str, str]) -> bool:
        """Returns whether some of these variables would be read in vain."""
        names = {
            name for name in {*env, *self._env} if name.startswith(_EARLY) and not name.startswith(_LATE)
        }
        return any(env.get(name) != self._env.get(name) for name in names)

    def fork(self, request: dict[str, Any], standard: list[int]) -> int:
        """Returns the number of the process, a child of this one."""
        answers, theirs = os.pipe()
        with self._lock, os.fdopen(answers, "rb") as answer:
            # The server forks twice, and the first fork ends: the second becomes a child of the nearest
            # ancestor that takes orphans. This process takes them for that moment alone.
            _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                said = json.dumps({**request, "parent": os.getpid()}).encode()
                socket.send_fds(self._asked, [said], [*standard, theirs])
                os.close(theirs)
                number = answer.read()
            finally:
                _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert number, "the server of forks has ended, or the fork has: see what it printed"
        return int(number)


def _serve(asked: socket.socket) -> None:
    """Forks what is asked for until the process that asks has ended. Does not return."""
    _libc.prctl(_SET_NAME, _NAME.encode(), 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the first fork
    while True:
        request, descriptors, *_ = socket.recv_fds(asked, 1 << 20, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            if os.fork():
                os._exit(0)
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(json.loads(request), descriptors)
        for each in descriptors:
            os.close(each)


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes this process the program that was asked for. Does not return."""
    limit = time.monotonic() + _PARENT_LIMIT
    while os.getppid() != request["parent"]:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(0.0002)
    if request["session"]:
        os.setsid()
    *standard, answer = descriptors
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    _libc.prctl(_SET_NAME, Path(sys.executable).name.encode(), 0, 0, 0)
    before = _search_path()
    rest = [path for path in sys.path[1:] if path not in before]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = [*_search_path(), *rest]
    tempfile.tempdir = None  # as TMPDIR is now
    if "PYTHONFAULTHANDLER" not in os.environ:
        faulthandler.disable()
    if "triton" in sys.modules:  # it reports its objects that are frozen, and so left at the end, on stderr
        atexit.register(gc.unfreeze)
    _program(request["arguments"])
    sys.exit()


def _search_path() -> list[str]:
    """Returns what PYTHONPATH adds to sys.path, as site writes it."""
    found = os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(path) for path in found.split(os.pathsep)] if found else []


def _program(arguments: list[str]) -> None:
    """Runs it as the interpreter would."""
    if arguments[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
        del arguments[0]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        if rest[0] in _AGENTS:
            _Server.of_agent()
            handler = importlib.import_module(
                "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
            )
            handler.Popen = Forked  # type: ignore[attr-defined]
        sys.modules.pop(rest[0], None)  # else runpy warns that it was imported before
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _main(descriptor: int) -> None:
    for name in _PRELOAD:
        importlib.import_module(name)
    # What is there already is no garbage: without this each fork would look through all of torch as it exits,
    # which takes longer than its import.
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run here, of which a fork copies only one"
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
