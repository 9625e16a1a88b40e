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
import socket
import subprocess
import sys
from datetime import timedelta
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
# By what a problem begins with, the worst first.
_VERDICTS = (
    ("import meshcast", "meshcast cannot be imported here"),
    (
        "everything between ranks",
        "meshcast plans here, but moves nothing: this torch has no torch.distributed",
    ),
    ("transfers on CPU", "meshcast plans here, but cannot move tensors between processes"),
    ("every call", "meshcast plans here, but an environment variable makes its calls fail"),
)
_WORKS = "meshcast works here"
_PLANNED_GBPS = 10  # what Topology.from_hosts assumes of a host's link


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print versions, backends, devices, network links, and what will not work here, and why."""
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0 if report["verdict"].startswith(_WORKS) else 1


def examine() -> dict[str, Any]:
    """All facts by section. `problems` lists what will not work, each with its reason and what to do, and
    `verdict` is one sentence."""
    problems: list[str] = []
    sections = {
        "versions": _versions,
        "backends": _backends,
        "between hosts": _between_hosts,
        "devices": _devices,
        "host": _host,
        "links": _links,
    }
    report: dict[str, Any] = {}
    for name in _base("progress").track(sections, "looking around"):
        report[name] = sections[name](problems)
    report["environment"] = {name: os.environ[name] for name in _variables() if name in os.environ}
    for problem in _base("settings").problems():
        start = "a misspelt variable" if "no variable of" in problem else "every call"
        problems.append(f"{start}: {problem}")
    return {**report, "problems": problems, "verdict": verdict(problems)}


def verdict(problems: list[str]) -> str:
    """The worst of `problems` in one sentence."""
    for start, sentence in _VERDICTS:
        if any(problem.startswith(start) for problem in problems):
            return sentence
    return f"{_WORKS}, apart from what is listed above" if problems else _WORKS


def _variables() -> list[str]:
    return [*(each for each in sorted(os.environ) if each.startswith("MESHCAST_")), *_VARIABLES]


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


def _versions(problems: list[str]) -> dict[str, str]:
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
    try:
        # In a process of its own: a module built for another torch may crash instead of raising.
        _try_import()
    except RuntimeError as error:
        problems.append(f"import meshcast: {error}")
    facts["compiler found"] = _compiler()
    return facts


def _try_import() -> None:
    path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "import meshcast; from meshcast import _C"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with status {done.returncode}"]
        raise RuntimeError(last[0])


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
        # Alone in its group, gloo still looks for an address to listen on, and fails as it would in a job.
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
                f"every call: {error}; {settings.TRANSPORT.name} is ucx, so nothing takes its place"
            )
        elif settings.TRANSPORT.text() != "gloo":
            problems.append(f"messages over UCX: {error}; they travel over gloo")
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
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        facts[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    info = _PACKAGE / "_build_info.py"
    if not info.exists() or not runpy.run_path(str(info))["with_cuda"]:
        problems.append("transfers of tensors on a GPU: this build of meshcast has no CUDA code")
    elif count == 0:
        problems.append("transfers of tensors on a GPU: torch sees no CUDA device")
    return facts


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
