"""An emulated cluster on one Linux machine: a network namespace for each host, and for each of its NICs a
veth pair to the bridge of its network, shaped by token buckets both ways. Needs root and iproute2.

python -m benchmarks cluster up|run|down, by hand:
run  --hosts 4 --ranks-per-host 2 --mbit 250 -- python train.py    every rank with torchrun's environment
up   --hosts 4 --mbit 1000,250,250,250 --nics 2                    stays until Ctrl-C, prints the names
down                                                               removes what killed owners left behind
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshcast.base.progress import Progress

# A cluster is owned by a process, by its id and start time, so that a later process with the same id is not
# taken for it. Names of namespaces and folders begin with that, so that what a killed owner left can be
# found.
PREFIX = "mc"
_OWNER = re.compile(rf"^{PREFIX}(\d+)-(\d+)-")


def owner_name(pid: int | None = None) -> str:
    """`mcPID-START-` of a process that runs (default: this one)."""
    pid = os.getpid() if pid is None else pid
    started = _started(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return f"{PREFIX}{pid}-{started}-"


def is_stale(name: str) -> bool:
    """Whether the name is one of ours and its owner has ended."""
    found = _OWNER.match(name)
    return found is not None and _started(int(found[1])) != int(found[2])


def _started(pid: int) -> int | None:
    """Clock ticks between the machine's start and the process's, or None where it has ended. A zombie has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


# Many ranks on few cores stand for ranks with cores of their own: they must not wait for each other longer
# than they compute.
SLICE = 0.2e-3  # seconds; the kernel's own is 3 ms or so, hundreds of which would show in a chain of messages
_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # sched_setattr
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def short_slices() -> str:
    """This process, and all that it starts from now on, hand the core over after SLICE to who waits for it.
    Returns why the kernel does not do that, or ""; it does from Linux 6.12 on."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return f"no number of sched_setattr is known on {platform.machine()}"
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, 0, 0, int(SLICE * 1e9), 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0):
        return f"sched_setattr: {os.strerror(ctypes.get_errno())}"
    return ""


def cores_of(host: int, hosts: int) -> str:
    """The cores that the ranks of a host run on, as taskset takes them: its part of those of this process, or
    the one that it shares with other hosts."""
    usable = sorted(os.sched_getaffinity(0))
    own = usable[host::hosts] if hosts < len(usable) else [usable[host % len(usable)]]
    return ",".join(map(str, own))


_MOST_NICS = 4
_GONE_LIMIT = 5.0  # seconds that killed processes have to disappear
# Bytes that a socket may have in the queues below it. Linux allows 4 MiB, so that a few sockets overfill
# the queue of a slow link, and what is dropped there is sent again 200 ms later; the driver of a real link
# holds senders back before that.
_SOCKET_QUEUE = 128 * 1024
# The machine's congestion control would show in the figures: with BBR each connection all but rests for
# 200 ms once in ten seconds, to measure its round trip, and now and then a transfer of 300 ms takes 1.5 or 2
# times as long. Reno is in every kernel, and every namespace may choose it, unlike CUBIC.
_TCP = {"tcp_limit_output_bytes": _SOCKET_QUEUE, "tcp_congestion_control": "reno"}


class ClusterError(RuntimeError):
    """The cluster cannot be built here, or what ran on it failed; the text says why and what to do."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """Why no cluster can be built here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed: apt-get install {package}"
    return ""


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _processes(namespace: str) -> set[int]:
    return {int(pid) for pid in _run("ip", "netns", "pids", namespace).split()}


def _kill(pids: set[int]) -> None:
    """Ends processes and waits until they are gone: a namespace lives as long as a process in it."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    end = time.monotonic() + _GONE_LIMIT
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids):
        time.sleep(0.01)


def _remove(namespace: str) -> None:
    """Also where another process removes it at the same time, as two that find the same stale one do."""
    try:
        _kill(_processes(namespace))
        _run("ip", "netns", "delete", namespace)
    except ClusterError:
        if namespace in _namespaces():
            raise


def remove_stale() -> list[str]:
    """Removes what clusters left behind whose owner has ended: processes, namespaces with their links, and
    folders. Returns the names of namespaces and folders."""
    removed = [name for name in _namespaces() if is_stale(name)]
    for name in removed:
        _remove(name)
    for folder in Path(tempfile.gettempdir()).glob("mc*"):
        if is_stale(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


@dataclass
class Cluster:
    """`hosts` namespaces with `nics` links each, of `mbit` Mbit/s each way. Use as a context manager.

    mbit: one rate for all hosts, or one for each. NIC i of every host is on network i. The bridges live in a
    namespace of their own, so that nothing of the machine's own network is touched.
    own_cores: what runs on a host keeps to a core or its part of them, and this process and all that it
    starts from then on take turns on the cores quickly (short_slices); good for ranks that only transfer.
    """

    hosts: int
    mbit: float | Sequence[float]
    nics: int = 1
    own_cores: bool = True
    owner: str = field(default_factory=owner_name)
    folder: Path = field(init=False)  # for whatever files a run needs; removed with the cluster
    variables: dict[str, str] = field(default_factory=dict)  # of what runs on the hosts

    def __post_init__(self) -> None:
        rates = self.rates
        if self.hosts < 1 or len(rates) != self.hosts or min(rates) <= 0:
            raise ClusterError(f"{self.hosts} hosts with rates {rates}: give each a positive rate in Mbit/s")
        if not 1 <= self.nics <= _MOST_NICS:
            raise ClusterError(f"{self.nics} NICs per host: allowed are 1 to {_MOST_NICS}")

    @property
    def rates(self) -> list[float]:
        """Mbit/s of each host's links."""
        return list(self.mbit) if isinstance(self.mbit, Sequence) else [self.mbit] * self.hosts

    def __enter__(self) -> Cluster:
        if why := missing():
            raise ClusterError(why)
        remove_stale()
        if self.own_cores and (why := short_slices()):
            print(f"# {why}: ranks that share a core wait for it longer than they would", file=sys.stderr)
        self.folder = Path(tempfile.mkdtemp(prefix=self.owner))
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, host: int) -> str:
        return f"{self.owner}h{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """Exists only inside the namespaces."""
        return f"10.201.{nic}.{host + 1}"

    def port(self) -> int:
        """A port that is free on host 0, which nobody else uses."""
        return 29511

    def interfaces(self) -> list[str]:
        return [f"eth{nic}" for nic in range(self.nics)]

    def enter(self, host: int) -> list[str]:
        """What a command begins with to run on that host."""
        cores = ["taskset", "-c", cores_of(host, self.hosts)] if self.own_cores else []
        return [*cores, "ip", "netns", "exec", self.namespace(host)]

    def environment(self, host: int) -> dict[str, str]:  # noqa: ARG002  as Loopback's
        return dict(self.variables)

    def processes(self) -> set[int]:
        """Of all hosts."""
        return set().union(*(_processes(self.namespace(host)) for host in range(self.hosts)))

    def kill(self, pids: set[int]) -> None:
        _kill(pids)

    @property
    def switch(self) -> str:
        return f"{self.owner}b"

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        for nic in range(self.nics):
            _run("ip", "-n", self.switch, "link", "add", f"bridge{nic}", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", f"bridge{nic}", "up")
        for host, rate in enumerate(self.rates):
            name = self.namespace(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for key, value in _TCP.items():
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/{key}")
            for nic, device in enumerate(self.interfaces()):
                port = f"port{host}x{nic}"
                _run(
                    *f"ip -n {name} link add {device} type veth peer name {port} netns {self.switch}".split()
                )
                _run("ip", "-n", self.switch, "link", "set", port, "master", f"bridge{nic}", "up")
                _run("ip", "-n", name, "addr", "add", f"{self.address(host, nic)}/24", "dev", device)
                _run("ip", "-n", name, "link", "set", device, "up")
                _shape(name, device, rate)  # what the host sends
                _shape(self.switch, port, rate)  # what it receives

    def close(self) -> None:
        """Ends what still runs on the hosts and removes the namespaces; links and shapers go with them.
        Idempotent."""
        listed = set(_namespaces())
        for name in [self.switch, *(self.namespace(host) for host in range(self.hosts))]:
            if name in listed:
                _remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)


def _shape(namespace: str, device: str, mbit: float) -> None:
    # The bucket holds about 4 ms of traffic: small enough not to show in a transfer of 300 ms.
    burst = max(int(mbit * 1e6 / 8 * 0.004), 64 * 1024)
    shape = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


@dataclass
class Loopback:
    """Stands in for a cluster where none can be built: all ranks on this machine's loopback, each with the
    host that it is to think it is on. No link has a rate, so nothing that is measured there is a figure."""

    hosts: int
    mbit: float | Sequence[float]
    nics: int = 1
    folder: Path = field(init=False)

    @property
    def rates(self) -> list[float]:
        """Mbit/s that plans are made for; nothing enforces them."""
        return list(self.mbit) if isinstance(self.mbit, Sequence) else [self.mbit] * self.hosts

    def __enter__(self) -> Loopback:
        self.folder = Path(tempfile.mkdtemp(prefix=owner_name()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host: int, nic: int = 0) -> str:  # noqa: ARG002  as Cluster's
        return "127.0.0.1"

    def port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def interfaces(self) -> list[str]:
        return ["lo"]

    def enter(self, host: int) -> list[str]:  # noqa: ARG002  as Cluster's
        return []

    def environment(self, host: int) -> dict[str, str]:
        # Ranks of two hosts must not meet in shared memory.
        return {"MESHCAST_HOST_ID": f"emulated host {host}"}


_BURST = 0.001  # seconds of traffic that a token bucket holds: a short transfer must not pass for free
_LEAST_BURST = 8 * 1024  # bytes; a bucket holds a few packets


def set_rate(cluster: Cluster, mbit: float) -> None:
    """Gives every link of a cluster that stands this rate each way and a small token bucket."""
    _small_buffers(cluster, 64 * 1024)
    for name in (*map(cluster.namespace, range(cluster.hosts)), cluster.switch):
        for device in re.findall(r"qdisc tbf \S+ dev (\S+)", _run("tc", "-n", name, "qdisc", "show")):
            _short_bucket("change", name, device, f"{mbit:.3f}", mbit)


def join_neighbours(cluster: Cluster, mbit: float) -> None:
    """Joins each host with the next by a link of `mbit` each way, which all traffic between the two takes;
    the network of the cluster carries the rest. So what a stage sends to the next and what it sends back do
    not share a NIC. The simulator assumes that, and hosts with a NIC for each neighbour have it.

    A link must not fall idle until it hears of what arrived, which takes longer while it also carries data
    the other way: with buffers of 64 KiB, steps without overlap took 5 % longer (100 ms transfers).
    """
    _small_buffers(cluster, 96 * 1024)
    # UCX takes an interface only for peers to which the host's best route begins there. So it chooses.
    cluster.variables = {
        "MESHCAST_IFNAMES": "",
        "UCX_NET_DEVICES": ",".join([*cluster.interfaces(), "next", "last"]),
    }
    for host in range(cluster.hosts - 1):
        here, there = cluster.namespace(host), cluster.namespace(host + 1)
        _run(*f"ip -n {here} link add next type veth peer name last netns {there}".split())
        for name, device, own, other in (
            (here, "next", cluster.address(host), cluster.address(host + 1)),
            (there, "last", cluster.address(host + 1), cluster.address(host)),
        ):
            _run("ip", "-n", name, "link", "set", device, "up")
            # Of the same address as the network's: what is sent to a neighbour goes this way by itself. UCX
            # uses no device without one.
            _run("ip", "-n", name, "addr", "add", f"{own}/32", "dev", device)
            _run(*f"ip -n {name} route add {other}/32 dev {device} src {own}".split())
            _short_bucket("add", name, device, f"{mbit}", mbit)


def _small_buffers(cluster: Cluster, nbytes: int) -> None:
    """Makes the send buffers of all hosts small, so that a send that is waited for ends near its arrival."""
    for host in range(cluster.hosts):
        limits = f"echo '4096 16384 {nbytes}' > /proc/sys/net/ipv4/tcp_wmem"
        _run("ip", "netns", "exec", cluster.namespace(host), "sh", "-c", limits)


def _short_bucket(how: str, namespace: str, device: str, shown: str, mbit: float) -> None:
    burst = max(int(mbit * 1e6 / 8 * _BURST), _LEAST_BURST)
    shape = ["rate", f"{shown}mbit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "-n", namespace, "qdisc", how, "dev", device, "root", "tbf", *shape)


Network = Cluster | Loopback


@dataclass(frozen=True)
class Rank:
    rank: int
    host: int
    local_rank: int


VARIABLE = "BENCHMARK_STEPS"  # of the environment: the path of a file that rank 0 writes, see ranks.Steps


@contextmanager
def _shown(steps: Path) -> Iterator[Callable[[], None]]:
    """Shows how far rank 0 is, at each call of what it yields. Hosts and programs of others need no meshcast:
    where it cannot be imported nothing is shown."""
    if find_spec("meshcast") is None:
        yield lambda: None
        return
    from meshcast.base.progress import Progress

    with Progress("the ranks", ticks=False) as shown:
        yield lambda: follow(shown, steps)


def follow(shown: Progress, file: Path) -> None:
    """Shows what rank 0 has written last."""
    text = file.read_text() if file.exists() else ""
    if not text.endswith("\n"):  # nothing yet, or it is being written
        shown.look()
        return
    count, total, what = text.rstrip("\n").split(" ", 2)
    shown.at(int(count), int(total), what)


def run_ranks(
    cluster: Network,
    ranks_per_host: int,
    command: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> str:
    """Runs `command` on every rank (host by host, ranks_per_host each) and returns rank 0's output.

    `progress` is called a few times a second, and how far rank 0 is (ranks.Steps) is shown. Ends all ranks as
    soon as one fails or `limit` seconds have passed, and raises ClusterError with the output of the first
    rank that failed.
    """
    ranks = [Rank(h * ranks_per_host + i, h, i) for h in range(cluster.hosts) for i in range(ranks_per_host)]
    processes: list[tuple[Rank, subprocess.Popen[bytes]]] = []
    outputs = [cluster.folder / f"rank{rank.rank}.out" for rank in ranks]
    port = cluster.port()
    steps = cluster.folder / "steps"
    steps.unlink(missing_ok=True)  # of ranks before
    try:
        for rank in ranks:
            with outputs[rank.rank].open("wb") as output:
                process = subprocess.Popen(
                    [*cluster.enter(rank.host), *command],
                    env={
                        **os.environ,
                        **(env or {}),
                        **environment(cluster, ranks_per_host, rank, port),
                        VARIABLE: str(steps),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append((rank, process))
        with _shown(steps) as show:

            def look() -> None:
                progress()
                show()

            _wait(processes, outputs, limit, look)
    finally:
        for _, process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outputs[0].read_text(errors="replace")


def environment(cluster: Network, ranks_per_host: int, rank: Rank, port: int) -> dict[str, str]:
    """What torchrun sets, and the interfaces to use."""
    return {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(cluster.hosts * ranks_per_host),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank.host),
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": cluster.interfaces()[0],
        "MESHCAST_IFNAMES": ",".join(cluster.interfaces()),
        "RES_OPTIONS": "attempts:0",  # no name server answers in there, and none is needed
        **cluster.environment(rank.host),
    }


def _wait(
    processes: Sequence[tuple[Rank, subprocess.Popen[bytes]]],
    outputs: Sequence[Path],
    limit: float,
    progress: Callable[[], None],
) -> None:
    end = time.monotonic() + limit
    while True:
        running = any(process.poll() is None for _, process in processes)
        for rank, process in processes:
            if process.poll() not in (None, 0):
                tail = outputs[rank.rank].read_text(errors="replace").splitlines()[-30:]
                raise ClusterError(
                    f"rank {rank.rank} ended with status {process.returncode}:\n" + "\n".join(tail)
                )
        progress()
        if not running:
            return
        if time.monotonic() > end:
            raise ClusterError(f"not complete after {limit:.0f} s; all ranks were ended")
        time.sleep(0.2)


def run_job(
    network: Network,
    ranks_per_host: int,
    program: str,
    job: Mapping[str, Any],
    *,
    limit: float,
    heard: Callable[[str, Any], None] = lambda *_: None,
    look: Callable[[], None] = lambda: None,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs `program` of this package, MODULE:FUNCTION, with the job on every rank (see ranks.py). Calls
    `heard` for each of what rank 0 reports, as soon as it does, and `look` a few times a second; both may
    raise. Returns the last report of each kind. Raises ClusterError as run_ranks does."""
    path, reports = network.folder / "job.pickle", network.folder / "reports.jsonl"
    path.write_bytes(pickle.dumps(dict(job)))
    reports.unlink(missing_ok=True)  # of ranks before
    found: dict[str, Any] = {}
    seen = 0

    def progress() -> None:
        nonlocal seen
        for line in (
            reports.read_text().split("\n")[seen:-1] if reports.exists() else ()
        ):  # the last may be cut
            seen += 1
            ((kind, value),) = json.loads(line).items()
            found[kind] = value
            heard(kind, value)
        look()

    command = [python, "-m", "benchmarks.ranks", program, str(path), str(reports)]
    run_ranks(network, ranks_per_host, command, limit=limit, env=env, progress=progress)
    progress()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cluster",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "run"):
        sub = commands.add_parser(name)
        sub.add_argument("--hosts", type=int, default=2)
        sub.add_argument("--nics", type=int, default=1, help="links per host, 1 to 4")
        sub.add_argument("--mbit", type=_rates, default=[250.0], help="rate of each link, or one per host")
        if name == "run":
            sub.add_argument("--ranks-per-host", type=int, default=1)
            sub.add_argument("--limit", type=float, default=600, help="seconds")
            sub.add_argument("program", nargs="+", help="after --: what every rank runs")
    commands.add_parser("down")
    args = parser.parse_args()
    try:
        if args.command == "down":
            print("\n".join(remove_stale()) or "nothing left behind")
            return 0
        rates = args.mbit[0] if len(args.mbit) == 1 else args.mbit
        with Cluster(args.hosts, rates, args.nics) as cluster:
            if args.command == "run":
                print(run_ranks(cluster, args.ranks_per_host, args.program, limit=args.limit), end="")
                return 0
            for host in range(cluster.hosts):
                addresses = " ".join(cluster.address(host, nic) for nic in range(cluster.nics))
                print(f"host {host}: ip netns exec {cluster.namespace(host)} ...   {addresses}", flush=True)
            ends = {signal.SIGINT, signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
            return 0
    except ClusterError as error:
        print(f"benchmarks cluster: {error}", file=sys.stderr)
        return 2


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError("positive rates in Mbit/s, separated by commas")
    return rates
