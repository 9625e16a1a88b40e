"""MPI programs on the emulated cluster: built once, started on all hosts, ended in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..cluster.cores import cores_of

_BUILD = Path(__file__).resolve().parents[2] / "build" / "peers"
_LIMIT = 90.0  # seconds, of one method of one case

# Called like ssh: options, an address, a command. The address tells the namespace. A host name of its own
# keeps the shared-memory files of emulated hosts apart, which are named after it.
_AGENT = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1##*.}}
shift
cores=({cores})
exec taskset -c ${{cores[host - 1]}} ip netns exec {prefix}$((host - 1)) \\
  unshare --uts /bin/sh -c "hostname emulated$host; $*"
"""


@dataclass(frozen=True)
class Mpi:
    """One of the MPI libraries. libraries: what else a program is linked with."""

    compiler: str
    launcher: str
    package: str
    libraries: tuple[str, ...] = ()

    def missing(self) -> str:
        if shutil.which(self.compiler) and shutil.which(self.launcher):
            return ""
        return f"not installed: apt-get install {self.package}"

    def build(self, source: Path) -> Path:
        return compiled([self.compiler], source, self.libraries)


def compiled(compiler: Sequence[str], source: Path, libraries: Sequence[str] = ()) -> Path:
    """The program of a source in C and of the headers beside it, built where it is older than they. Raises
    RuntimeError with what the compiler says."""
    program = _BUILD / f"{source.stem}.{compiler[0]}"
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if not program.exists() or program.stat().st_mtime < newest:
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = [*compiler, "-O2", "-std=gnu11", "-w", str(source), "-o", str(program), *libraries]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if built.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile: {built.stderr[-600:]}")
    return program


def open_mpi_options(cluster: Cluster, ranks_per_host: int, agent: str) -> list[str]:
    world = str(cluster.hosts * ranks_per_host)
    hosts = ",".join(f"{cluster.address(host)}:{ranks_per_host}" for host in range(cluster.hosts))
    return [
        "--allow-run-as-root", "--host", hosts, "-np", world, "--map-by", "slot", "--bind-to", "none",
        "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self,vader", "--mca", "pml", "ob1",
        "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
        "--mca", "mpi_yield_when_idle", "1",
    ]  # fmt: skip


def mpich_options(cluster: Cluster, ranks_per_host: int, agent: str) -> list[str]:
    world = str(cluster.hosts * ranks_per_host)
    hosts = ",".join(f"{cluster.address(host)}:{ranks_per_host}" for host in range(cluster.hosts))
    return [
        "-hosts", hosts, "-n", world, "-launcher", "ssh", "-launcher-exec", agent, "-iface", "eth0",
        "-bind-to", "none",
    ]  # fmt: skip


def run(
    mpi: Mpi, cluster: Cluster, ranks_per_host: int, options: Sequence[str], program: Path, problem: str,
    arguments: Sequence[str], env: dict[str, str], any_status: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What the program prints as JSON on rank 0. `problem` is the text of its first argument, a file. Raises
    RuntimeError with its output where it fails or does not end. any_status: what it printed counts, however
    it then ended."""
    before = cluster.processes()  # the ranks of the benchmark itself, asleep
    with tempfile.TemporaryDirectory(prefix="mpi-", dir=cluster.folder) as folder:
        agent, path = Path(folder, "agent.sh"), Path(folder, "problem.txt")
        path.write_text(problem)
        cores = " ".join(cores_of(host, cluster.hosts) for host in range(cluster.hosts))
        agent.write_text(_AGENT.format(prefix=cluster.namespace(0)[:-1], cores=cores))
        agent.chmod(0o755)
        launch = mpich_options if "mpich" in mpi.launcher else open_mpi_options
        command = [
            str(agent), cluster.address(0), "exec", mpi.launcher,
            *launch(cluster, ranks_per_host, str(agent)), *options, str(program), str(path), *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": folder, "RES_OPTIONS": "attempts:0", **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{mpi.launcher} did not end within {_LIMIT:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            cluster.kill(cluster.processes() - before)  # whatever it started elsewhere
            process.wait()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if not lines or (process.returncode != 0 and not any_status):
            raise RuntimeError(
                f"{mpi.launcher} ended with status {process.returncode}: {(err or out)[-600:]}"
            )
        found = json.loads(lines[0])
        found["wrong_bytes"] = 4 * found.pop("wrong_elements")
        return found
