"""The command `doctor`, which also runs as a script."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

# Where the import of meshcast itself fails this file still runs, as a script: it loads its siblings by path
# and meshcast only where that failure is part of the report.
_PACKAGE = Path(__file__).resolve().parent.parent
_VARIABLES = (  # of others; ours are listed in base/settings.py
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
)
_FEW_FILES = 1024
# By the beginning of a problem, the worst first.
_VERDICTS = (
    ("import meshcast", "meshcast cannot be imported here"),
    (
        "everything between ranks",
        "meshcast plans here, but moves nothing: this torch has no torch.distributed",
    ),
    ("transfers on CPU", "meshcast plans here, but cannot move tensors between processes"),
    ("every call: MESHCAST_", "meshcast plans here, but an environment variable makes its calls fail"),
    ("every call", "meshcast plans here, but its calls fail"),
    ("calls between hosts", "meshcast works inside this host, but its calls between hosts fail"),
)
_ON_HOST, _APART = "on one host", "between hosts"  # calls that are tried
_ON_GPU = "on one GPU"  # where there is one
_IMPORT_SECONDS, _CALL_SECONDS = 120, 60  # in which the process of the calls ends itself
_FOLLOWS = ("AbortedError", "PeerLostError")  # raised because another rank raised
_WORKS = "meshcast works here"
_PLANNED_GBPS = 10  # the rate of a host's link in Topology.from_hosts


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print versions, backends, devices, network links, and what will not work here, and why. Two ranks make
    a small call each on one host and as between two, with the environment as it is; where there is a GPU they
    also open each other's memory on it. Exit status 1 where calls fail."""
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0 if report["verdict"].startswith(_WORKS) else 1


def examine() -> dict[str, Any]:
    """All facts by section. `problems` lists what will not work, each with its reason and what to do, and
    `verdict` is one sentence."""
    problems: list[str] = []
    trial = _Trial()
    sections: dict[str, Callable[[list[str]], dict[str, str]]] = {
        "versions": partial(_versions, trial=trial),
        "backends": _backends,
        "between hosts": _between_hosts,
        "devices": _devices,
        "host": _host,
        "links": _links,
        "environment": _environment,
        "calls of two ranks": partial(_calls, trial=trial),
    }
    report: dict[str, Any] = {}
    for name in _base("progress").track(sections, "looking around"):
        report[name] = sections[name](problems)
    return {**report, "problems": problems, "verdict": verdict(problems)}


def verdict(problems: list[str]) -> str:
    """The worst of `problems` in one sentence."""
    for start, sentence in _VERDICTS:
        if any(problem.startswith(start) for problem in problems):
            return sentence
    return f"{_WORKS}, apart from what is listed above" if problems else _WORKS


def _environment(problems: list[str]) -> dict[str, str]:
    settings = _base("settings")
    for setting, problem in settings.problems():
        whose = "what a variable asks for" if setting and setting.is_harmless else "every call"
        problems.append(f"{whose if setting else 'a misspelt variable'}: {problem}")
    names = [each for each in sorted(os.environ) if each.startswith(("MESHCAST_", "UCX_"))]
    return {name: os.environ[name] for name in (*names, *_VARIABLES) if name in os.environ}


def _base(name: str) -> Any:
    """A module of meshcast.base that imports nothing of meshcast, also where meshcast cannot be imported."""
    folder = _PACKAGE / "base"
    alone = "meshcast_doctor_base"
    if alone not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            alone, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[alone] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{alone}.{name}")


def render(report: dict[str, Any]) -> str:
    lines = []
    for section, facts in report.items():
        if section in ("problems", "verdict"):
            continue
        lines.append(f"{section}:")
        lines += [f"  {name:<20} {value}" for name, value in facts.items()] or ["  (nothing set)"]
    lines.append("will not work here:")
    lines += [f"  - {problem}" for problem in report["problems"]] or ["  (nothing found)"]
    lines.append(f"verdict: {report['verdict']}")
    return "\n".join(lines)


def _versions(problems: list[str], trial: _Trial) -> dict[str, str]:
    import torch

    facts = {
        "meshcast": str(runpy.run_path(str(_PACKAGE / "_version.py"))["__version__"]),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} (CUDA: {torch.version.cuda or 'none'})",
    }
    built = _PACKAGE / "_build_info.py"
    if built.exists():
        info = runpy.run_path(str(built))
        cuda = "without CUDA code"
        if info["with_cuda"]:
            cuda = f"with CUDA code for {info.get('cuda_architectures') or 'unknown architectures'}"
        facts["built for"] = f"torch {info['torch_version']}, {cuda}"
        facts["built with"] = f"{info['compiler']}, {info['flags']}"
    else:
        facts["built for"] = "not built"
    if error := trial.import_error():
        problems.append(f"import meshcast: {error}")
    facts["compiler found"] = _compiler()
    return facts


class _Trial:
    """A process that imports meshcast, then forks and makes calls, while this one reads the rest: a module
    built for another torch may crash instead of raising, and calls may hang. It ends itself in time."""

    _PROGRAM = (
        f"import signal; signal.alarm({_IMPORT_SECONDS}); import meshcast; from meshcast import _C; "
        "print(flush=True); from meshcast.cli import doctor; doctor.make_calls()"
    )

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        # A record of these calls would take the place of that of a job.
        environment = {**os.environ, "PYTHONPATH": path, "MESHCAST_FLIGHT_RECORD": "none"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        command = [sys.executable, "-c", self._PROGRAM]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def import_error(self) -> str:
        """Waits for the import. Returns its error, "" where there is none."""
        if self._output.readline():
            return ""
        self._process.communicate()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return said[-1] if said else f"the process ended with status {self._process.returncode}"

    def results(self) -> dict[str, list[tuple[str, str]]]:
        """Waits for the calls. Returns for each that ended the errors of its ranks, type and text."""
        output = "" if self._output.closed else self._process.communicate()[0]
        found: dict[str, list[tuple[str, str]]] = {}
        for call, *error in map(json.loads, output.splitlines()):
            found.setdefault(call, []).extend([(error[0], error[1])] if error else [])
        return found


def _calls(problems: list[str], trial: _Trial) -> dict[str, str]:
    """Reports the calls of two ranks. A known cause is not reported again."""
    results = trial.results()
    if not verdict(problems).startswith(_WORKS):
        return {_ON_HOST: "fails", _APART: "fails"}
    for call, start in ((_ON_HOST, "every call"), (_APART, "calls between hosts")):
        if error := _first_error(results, call, "a call of two ranks"):
            problems.append(f"{start}: {_with_variables(error)}")
            return {_ON_HOST: "works" if call == _APART else "fails", _APART: "fails"}
    facts = {_ON_HOST: "works", _APART: "works"}
    if _has_gpu_code() and _gpus():
        error = _first_error(results, _ON_GPU, "opening each other's GPU memory")
        facts[_ON_GPU] = "fails" if error else "works"
        if error:
            problems.append(
                f"CUDA IPC between ranks of this host: {error}; ranks with a GPU each use NCCL, and those "
                "that share one need NCCL 2.30.3"
            )
    return facts


def _first_error(results: dict[str, list[tuple[str, str]]], call: str, what: str) -> str:
    errors = results.get(call, [("", f"{what} did not end in {_CALL_SECONDS} s")])
    return next((error for error in errors if error[0] not in _FOLLOWS), errors[0])[1] if errors else ""


def _has_gpu_code() -> bool:
    info = _PACKAGE / "_build_info.py"
    return info.exists() and bool(runpy.run_path(str(info))["with_cuda"])


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _with_variables(error: str) -> str:
    """An error with the variables that may be its cause."""
    names = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("UCX_")]
    return f"{error.rstrip('.')}; correct or unset {', '.join(names)}" if names and "UCX" in error else error


def make_calls() -> None:
    """Moves a tensor from one rank to another, which this process forks: on one host, then as between two.
    Where there is a GPU, they then open each other's memory on it. Prints a line of JSON for each call and
    rank: its name, and where it fails type and text of the error. Ends the process."""
    port, written = os.pipe()
    child = os.fork()
    signal.alarm(_CALL_SECONDS)
    rank = int(child == 0)
    call = _ON_HOST
    try:
        store = None
        for call in (_ON_HOST, _APART):
            store = store or _store(rank, port, written)
            _move(rank, call, store)
            _print([call])
        if _has_gpu_code() and _gpus():
            call = _ON_GPU
            _open(rank, store)
            _print([call])
    except Exception as error:
        _print([call, type(error).__name__, " ".join(str(error).split())])
    if child:  # the store is there
        os.waitpid(child, 0)
    os._exit(0)


def _print(row: list[str]) -> None:
    os.write(1, f"{json.dumps(row)}\n".encode())  # at once: both ranks do


def _store(rank: int, port: int, written: int) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=_CALL_SECONDS / 2)
    if rank:
        return dist.TCPStore("127.0.0.1", int(os.read(port, 16)), 2, False, limit)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, limit, wait_for_workers=False)
    os.write(written, str(store.port).encode())
    return store


def _move(rank: int, call: str, store: Any) -> None:
    import torch
    import torch.distributed as dist

    import meshcast

    if call == _APART:
        os.environ[_base("settings").HOST_ID.name] = f"host {rank} of doctor"
    limit = timedelta(seconds=_CALL_SECONDS / 2)
    prefix = dist.PrefixStore(call, store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=2, timeout=limit)
    x, y = torch.arange(1 << 16), torch.zeros(1 << 16, dtype=torch.int64)
    one, other = (meshcast.Layout.parse(f"1@{each}:Replicate()") for each in range(2))
    given = (None, one, y, other) if rank else (x, one, None, other)
    meshcast.reshard_local(*given, shape=x.shape, dtype=x.dtype)
    if rank and not torch.equal(x, y):
        raise meshcast.MeshcastError("another value arrived than was sent")
    dist.destroy_process_group()


def _open(rank: int, store: Any) -> None:
    """Opens GPU memory of the other rank, as ranks do that meet over CUDA IPC."""
    from meshcast.errors import MeshcastError
    from meshcast.transfers.gpu import own_proof

    proof, mine = own_proof(0)
    store.set(f"card of {rank}", mine.card)
    theirs = store.get(f"card of {1 - rank}")
    problem = mine.problem or (theirs and proof.check(theirs, _CALL_SECONDS / 6))
    store.set(f"tried by {rank}", "")
    store.get(f"tried by {1 - rank}")  # the other's proof is kept until then
    if problem:
        raise MeshcastError(problem)


def _compiler() -> str:
    """Only building needs one, so its absence is no problem by itself."""
    path = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])), None)
    if path is None:
        return "none (needed only to build meshcast)"
    done = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=20)
    return (done.stdout.splitlines() or [path])[0]


def _backends(problems: list[str]) -> dict[str, str]:
    import torch.distributed as dist

    if not dist.is_available():
        problems.append("everything between ranks: this torch was built without torch.distributed")
        return {}
    facts = {}
    for name, available in (
        ("gloo", dist.is_gloo_available()),
        ("nccl", dist.is_nccl_available()),
        ("mpi", dist.is_mpi_available()),
    ):
        facts[name] = "available" if available else "not in this torch"
    if not dist.is_gloo_available():
        problems.append("transfers on CPU: they travel over gloo, which this torch lacks")
        return facts
    try:
        # Alone in its group, gloo still looks for an address to listen on, and fails in the same way as in a
        # job.
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
        facts["gloo"] = "available, opens its listening socket"
    except RuntimeError as error:
        facts["gloo"] = "available, but cannot listen"
        reason = str(error).splitlines()[0]
        problems.append(
            f"transfers on CPU: gloo finds no address to listen on ({reason}); set GLOO_SOCKET_IFNAME to one "
            "of the interfaces below"
        )
    return facts


def _between_hosts(problems: list[str]) -> dict[str, str]:
    """Over what tensors on the CPU travel, and by which devices."""
    if any(problem.startswith("import meshcast") for problem in problems):
        return {"ucx": "unknown, since meshcast cannot be imported"}
    from meshcast.groups import network

    settings = _base("settings")
    names, _ = network.interfaces()
    try:
        library = network.library()
        version = network.plane(names, 60).version
    except Exception as error:
        if settings.TRANSPORT.text() == "ucx":
            problems.append(
                f"every call: {_with_variables(str(error))}; {settings.TRANSPORT.name} is ucx, so nothing "
                "takes its place"
            )
        elif settings.TRANSPORT.text() != "gloo":
            problems.append(f"messages over UCX: {_with_variables(str(error))}; they travel over gloo")
        return {"ucx": "cannot be used"}
    named = ", ".join(names) or os.environ.get("UCX_NET_DEVICES")
    return {
        "ucx": f"{version} ({library})",
        "devices": named or network.device_names() or "UCX chooses, RDMA among them",
        "RDMA": ", ".join(network.rdma_devices()) or "none",
    }


def _devices(problems: list[str]) -> dict[str, str]:
    import torch

    facts = {"cpu": f"{len(os.sched_getaffinity(0))} cores for this process, {platform.machine()}"}
    count = _gpus()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        facts[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    facts |= _figures(count, problems)
    if not _has_gpu_code():
        problems.append("transfers of tensors on a GPU: this build of meshcast has no CUDA code")
    elif count == 0:
        problems.append("transfers of tensors on a GPU: torch sees no CUDA device")
    return facts


def _figures(count: int, problems: list[str]) -> dict[str, str]:
    """Measured figures of this machine's GPUs, by which calls between them are planned. count: that torch
    sees."""
    settings = _base("settings")
    machine, folder = settings.gpu_machine(), settings.figures_folder()
    if machine is None:
        return {"measured figures": "none are kept: NVML is missing"} if count else {}
    if folder is None:
        return {"measured figures": f"none are kept: {settings.GPU_FIGURES.name} is {settings.NOWHERE}"}
    if any(problem.startswith("import meshcast") for problem in problems):
        return {"measured figures": "unknown, since meshcast cannot be imported"}
    from meshcast.topology import figures_file, stored_figures

    slots, ignored = stored_figures(machine)
    if ignored:
        problems.append(f"plans that fit the rates of these GPUs: {ignored}")
    if not slots:
        how = 'meshcast.measure_topology(device="cuda") measures them'
        return {"measured figures": f"{'ignored' if ignored else 'none'}: rates are guessed; {how}"}
    found = {f"over {slot}": figures.text(time.time()) for slot, figures in slots.items()}
    return {"measured figures": str(figures_file(machine)), **found}


def _host(problems: list[str]) -> dict[str, str]:
    identity = _base("settings").host_identity()
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except socket.gaierror as error:
        addresses = []
        problems.append(
            f"jobs of several hosts: the name of this host, {name}, does not resolve ({error.strerror}); add "
            "it to /etc/hosts or set GLOO_SOCKET_IFNAME"
        )
    unreachable = all(address.startswith("127.") or address == "::1" for address in addresses)
    if addresses and unreachable and not os.environ.get("GLOO_SOCKET_IFNAME"):
        problems.append(
            f"jobs of several hosts: {name} resolves to {', '.join(addresses)} only, where no other host can "
            "connect; set GLOO_SOCKET_IFNAME to the interface that faces the others"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        problems.append(
            f"large groups: at most {soft} files may be open, and each group opens a connection per peer; "
            f"raise the limit (ulimit -n {min(hard, 65536) if hard > 0 else 65536})"
        )
    return {
        "host id": identity,
        "name": f"{name} ({', '.join(addresses) or 'does not resolve'})",
        "open files": f"{soft} (at most {hard})",
        "system": platform.platform(),
    }


def _links(problems: list[str], sysfs: Path = Path("/sys/class/net")) -> dict[str, str]:
    """Interfaces that are up, with their speed as the operating system knows it; an unknown one stays so."""
    known = _base("settings").links(sysfs)
    facts = {
        name: f"{speed:g} Gbit/s" if speed is not None else "speed unknown to the operating system"
        for name, speed in known.items()
    }
    others = [f"{name}: {speed}" for name, speed in facts.items() if speed != f"{_PLANNED_GBPS} Gbit/s"]
    if others:
        problems.append(
            f"plans that fit this network unasked: without topology= they assume {_PLANNED_GBPS} Gbit/s "
            f"per host ({', '.join(others)}); give a topology (topology=meshcast.Topology.uniform(...), or "
            "what meshcast.measure_topology() returns)"
        )
    return facts


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print(f"meshcast doctor: torch is not installed for {sys.executable}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description=run_doctor.__doc__)
    doctor_arguments(parser)
    return run_doctor(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
