"""The surroundings of a process: the environment variables that meshcast reads, with one row for each, and
the host that it runs on, as far as the network is concerned.

docs/environment.md has the table of `markdown()`; `python -m meshcast doctor` shows those that are set.
This file is also loaded where the rest of meshcast cannot be: it imports nothing of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import tempfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_MOST_INTERFACES = 16
_PREFIX = "MESHCAST_"
_SYSFS = Path("/sys/class/net")
_SIOCGIFFLAGS, _SIOCGIFADDR, IFF_UP, IFF_LOOPBACK = 0x8913, 0x8915, 1, 8  # of linux/sockios.h and linux/if.h
_AT_IMPORT = "`import meshcast`"
NOWHERE = "none"  # value of MESHCAST_FLIGHT_RECORD and MESHCAST_GPU_FIGURES
# Variables of builds and of the project's own tests.
_OTHERS = ("MESHCAST_CUDA", "MESHCAST_FAULT", "MESHCAST_FAULT_SECONDS")
_OTHER_PREFIX = "MESHCAST_TEST_"


@dataclass(frozen=True)
class Setting:
    """One variable. expected: its values, as errors name them; read: when; meaning: one or two sentences.

    choices: the values that it may have; limits: the least and the largest number; empty where any text, or
    what `problem` looks for, will do. fraction: a number may have one, as 0.5.
    """

    name: str
    default: str
    expected: str
    read: str
    meaning: str
    choices: tuple[str, ...] = ()
    limits: tuple[int, ...] = ()
    fraction: bool = False

    @property
    def is_harmless(self) -> bool:
        """True where a wrong value costs a warning of the import, and no call."""
        return self.read == _AT_IMPORT

    def text(self) -> str:
        """The value, stripped; the default where it is unset or empty."""
        return os.environ.get(self.name, "").strip() or self.default

    def choice(self, op: str | None = None) -> str:
        """Returns the value if it is one of `choices`. Raises MeshcastError, which names `op`."""
        self._check(op)
        return self.text()

    def integer(self, op: str | None = None) -> int:
        """Returns the value as a number within `limits`. Raises MeshcastError, which names `op`."""
        self._check(op)
        return int(self.text())

    def names(self) -> tuple[str, ...]:
        """The parts of the value between commas."""
        return tuple(name.strip() for name in self.text().split(",")) if self.text() else ()

    def problem(self) -> str:
        """Returns a sentence on what is wrong with the value; empty where it is allowed."""
        value, expected = self.text(), self.expected
        word = value.lower() if self is LOG else value
        wrong = bool(self.choices and value) and word not in self.choices
        if self.limits:
            digits = value.replace(".", "", 1) if self.fraction else value
            number = digits.isascii() and digits.isdecimal()
            read = float if self.fraction else int
            wrong = not number or not self.limits[0] <= read(value) <= self.limits[1]
        if self is IFNAMES and value:
            names, unfit = self.names(), {name: unfit_for_messages(name) for _, name in socket.if_nameindex()}
            known = [name for name, why in unfit.items() if not why]
            wrong = not set(names) <= set(known) or not len(set(names)) == len(names) <= _MOST_INTERFACES
            expected += f", at most {_MOST_INTERFACES} out of {', '.join(known)}"
            expected += "".join(f" ({name} {unfit[name]})" for name in names if unfit.get(name))
        if self is FLIGHT_RECORD and value not in ("", NOWHERE) and (why := _unwritable(Path(value).parent)):
            return f"{self.name}={value}: no flight record can be written there: {why}"
        return f"{self.name} is {value!r}; expected {expected}" if wrong else ""

    def _check(self, op: str | None) -> None:
        from ..errors import MeshcastError

        if problem := self.problem():
            raise MeshcastError(problem, op=op)


BROADCAST_BYTES = Setting(
    "MESHCAST_BROADCAST_BYTES",
    str(1 << 20),
    "the number of bytes, 1 or more, from which a broadcast is a multicast, the same on all ranks",
    "a group of backend meshcast is made",
    "Broadcasts of so many bytes and more are multicasts, smaller ones gloo's (backend.md).",
    limits=(1, (1 << 63) - 1),
)
CUDA_STAGING_MB = Setting(
    "MESHCAST_CUDA_STAGING_MB",
    "0",
    f"a number of MiB up to {1 << 20}; 0 stands for a quarter of what is free on the GPU",
    "a group first moves tensors on GPUs",
    "The most GPU memory that one process has as staging for CUDA IPC, in MiB; ranks that share a GPU share "
    "that quarter (cuda.md).",
    limits=(0, 1 << 20),
)
CUDA_TRANSPORT = Setting(
    "MESHCAST_CUDA_TRANSPORT",
    "auto",
    "auto, nccl or cuda_ipc, the same on all ranks",
    "a group first moves tensors on GPUs",
    "How ranks exchange tensors on GPUs (cuda.md).",
    choices=("auto", "nccl", "cuda_ipc"),
)
FLIGHT_RECORD = Setting(
    "MESHCAST_FLIGHT_RECORD",
    "",
    "a path, or none",
    _AT_IMPORT,
    "Each rank writes its last 2,000 calls to PATH.rankN when a call fails, when the program ends, and when "
    "`python -m meshcast dump` or SIGUSR1 asks for them; none: on request alone (observing.md).",
)
GPU_FIGURES = Setting(
    "MESHCAST_GPU_FIGURES",
    "",
    "a folder, or none",
    "a group is made",
    'Where `measure_topology(device="cuda")` keeps what it found, and groups look for it; none: nowhere. By '
    "default that is the folder meshcast in `XDG_CACHE_HOME`, or in ~/.cache (cuda.md).",
)
HOST_ID = Setting(
    "MESHCAST_HOST_ID",
    "",
    "any text, the same on the ranks that share a host",
    "a group is made",
    "Takes the place of what is found out: ranks with equal texts are taken to share memory and NICs.",
)
HUGE_PAGES = Setting(
    "MESHCAST_HUGE_PAGES",
    "1",
    "0, which leaves the memory of results to torch, or 1",
    "a group is made",
    "Lets results on the CPU of 2 MiB and more take memory that an earlier one has freed, or ask for huge "
    "pages (resharding.md).",
    choices=("0", "1"),
)
IFNAMES = Setting(
    "MESHCAST_IFNAMES",
    "",
    "different interfaces of this host, separated by commas",
    "a group is made",
    "The interfaces whose NICs share the traffic, equally many on every rank; else those "
    "that transports.md says.",
)
LOG = Setting(
    "MESHCAST_LOG",
    "",
    "debug, info, warning or error",
    _AT_IMPORT,
    "Shows the log on stderr from this level on; else `meshcast` is an ordinary logger.",
    choices=("debug", "info", "warning", "error"),
)
SHM = Setting(
    "MESHCAST_SHM",
    "1",
    "0, which turns shared memory off, or 1, which leaves it on",
    "a group is made",
    "Whether the ranks of a host exchange data through shared memory.",
    choices=("0", "1"),
)
SHM_MB = Setting(
    "MESHCAST_SHM_MB",
    "64",
    f"a number of MiB from 1 to {1 << 20}",
    "a group is made",
    "The most that one process maps for all its groups, in MiB.",
    limits=(1, 1 << 20),
)
TRANSPORT = Setting(
    "MESHCAST_TRANSPORT",
    "auto",
    "auto, ucx or gloo, the same on all ranks",
    "a group is made",
    "How hosts exchange messages, and send and recv of backend meshcast; auto is UCX where it can be loaded, "
    "else gloo (transports.md, backend.md).",
    choices=("auto", "ucx", "gloo"),
)
UCX = Setting(
    "MESHCAST_UCX",
    "auto",
    "auto, wheel, system or the path of a libucp.so.0",
    "the first group is made",
    "Which UCX is loaded; auto is the system's where the machine has RDMA devices and it can use them, else "
    "the wheel's (transports.md).",
)
WAIT_NOTICE = Setting(
    "MESHCAST_WAIT_NOTICE",
    "30",
    "a number of seconds up to 31536000, such as 30 or 0.5; 0 turns it off",
    _AT_IMPORT,
    "A rank that has waited in a call for so long says so in one line on stderr, or in the program's log, "
    "with the ranks that it waits for (observing.md).",
    limits=(0, 31536000),
    fraction=True,
)

ALL = (
    BROADCAST_BYTES, CUDA_STAGING_MB, CUDA_TRANSPORT, FLIGHT_RECORD, GPU_FIGURES, HOST_ID, HUGE_PAGES,
    IFNAMES, LOG, SHM, SHM_MB, TRANSPORT, UCX, WAIT_NOTICE,
)  # fmt: skip


def problems() -> list[tuple[Setting | None, str]]:
    """Returns a sentence for each variable that is set wrongly, and for each misspelt name, which has no
    Setting."""
    found: list[tuple[Setting | None, str]] = [(each, text) for each in ALL if (text := each.problem())]
    known = [each.name.removeprefix(_PREFIX) for each in ALL]
    for name in sorted(os.environ):
        ours = name.upper().startswith(_PREFIX) and name not in _OTHERS and not name.startswith(_OTHER_PREFIX)
        if ours and name not in (each.name for each in ALL):
            # Without their common prefix, which would make any name similar.
            meant = get_close_matches(name[len(_PREFIX) :].upper(), known, 1)
            remedy = f"is {_PREFIX}{meant[0]} meant?" if meant else "docs/environment.md lists all of them"
            found.append((None, f"{name} is no variable of meshcast: {remedy}"))
    return found


def markdown() -> str:
    """The table of docs/environment.md: `python -m meshcast.base.settings` prints it."""
    head = ["| variable | values | default | read when | meaning |", "|---|---|---|---|---|"]
    rows = [
        (f"`{each.name}`", each.expected, each.default or "unset", each.read, each.meaning) for each in ALL
    ]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def host_identity() -> str:
    """Text that is equal for processes of one host and different for others.

    It is the boot id of the kernel and the inode of the network namespace: containers and emulated hosts of
    one machine share the boot id, the host name and /dev/shm, but not the network. `MESHCAST_HOST_ID`
    overrides it.
    """
    return HOST_ID.text() or _host_of_kernel()


def memory_identity() -> str:
    """Text that is equal for processes that can share memory: those of one host, as host_identity() has it,
    where the kernel and the user agree. Else one of them would only find out as they connect."""
    try:
        user = os.stat("/proc/self/ns/user").st_ino
    except OSError:
        user = 0
    return f"{host_identity()}/{_host_of_kernel()}/{user}/{os.geteuid()}"


def _host_of_kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # no Linux /proc: one kernel is one host, and its name the best there is
        return socket.gethostname()
    return f"{boot}/{namespace}"


def interface_flags(name: str) -> int:
    """The flags IFF_... of an interface."""
    return int(struct.unpack_from("H", _asked(_SIOCGIFFLAGS, name), 16)[0])


def unfit_for_messages(name: str) -> str:
    """Reason why nothing can be sent from an interface of this host, "" where something can."""
    try:
        if not interface_flags(name) & IFF_UP:
            return "is down"
        _asked(_SIOCGIFADDR, name)
    except OSError:
        lines = _read(Path("/proc/net/if_inet6")).splitlines()  # the last word of each is an interface
        return "" if name in [line.split()[-1] for line in lines] else "has no address"
    return ""


def _asked(what: int, name: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, what, struct.pack("256s", name.encode()[:15]))


def _unwritable(folder: Path) -> str:
    """Reason why no file can be made in a folder, "" where one can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"[Errno {error.errno}] {error.strerror}: {str(folder)!r}"


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


def figures_folder() -> Path | None:
    """Folder of the measured figures of GPUs; None where MESHCAST_GPU_FIGURES forbids one, or where there is
    no home folder."""
    named = GPU_FIGURES.text()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):  # the standard of XDG has relative paths ignored
        cache = "~/.cache"
    found = os.path.expanduser(named or f"{cache}/meshcast")
    return None if named == NOWHERE or found.startswith("~") else Path(found)


@dataclass(frozen=True)
class GpuMachine:
    """GPUs of this machine, whichever of them a process sees.

    gpus: uuid and name of each. links: pairs of uuids that reach each other by NVLink. fabrics: by uuid, the
    part of an NVLink network of several machines that a GPU belongs to.
    """

    driver: str
    gpus: tuple[tuple[str, str], ...]
    links: frozenset[tuple[str, str]]
    fabrics: dict[str, str]

    def linked(self, uuid: str) -> tuple[str, ...]:
        """The GPUs of this machine that a GPU reaches by NVLink."""
        return tuple(sorted(other for one, other in self.links if one == uuid))


def visible_gpus(machine: GpuMachine) -> tuple[str, ...]:
    """The GPUs of a machine that this process sees, as many different texts, equal in processes that see the
    same ones: by uuid. CUDA may number GPUs in another order than NVML, so which is which is not known."""
    uuids = [uuid for uuid, _ in machine.gpus]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(uuids)
    found: list[str] = []
    for name in map(str.strip, named.split(",")):
        if name in ("", "-1"):  # CUDA reads no further
            break
        # A number is that of a GPU that this process is shown: for another process it may be another one.
        number = int(name) if name.isdecimal() else len(uuids)
        found.append(uuids[number] if number < len(uuids) else name)
    return tuple(found)


_NVML_TEXT = 96
_P2P_NVLINK, _P2P_OK = 2, 0  # of nvml.h
_FABRIC_COMPLETED = 3


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def gpu_machine() -> GpuMachine | None:
    """The GPUs of this machine by NVML; None where that is missing or finds none. Makes no CUDA context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            return _gpu_machine(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one that lacks a function
        return None


def _gpu_machine(nvml: ctypes.CDLL) -> GpuMachine | None:
    count, driver = ctypes.c_uint(), ctypes.create_string_buffer(_NVML_TEXT)
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value
    if failed or nvml.nvmlSystemGetDriverVersion(driver, _NVML_TEXT):
        return None
    gpus, handles = [], []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        uuid, name = (ctypes.create_string_buffer(_NVML_TEXT) for _ in range(2))
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            or nvml.nvmlDeviceGetUUID(handle, uuid, _NVML_TEXT)
            or nvml.nvmlDeviceGetName(handle, name, _NVML_TEXT)
        ):
            return None
        gpus.append((uuid.value.decode(), name.value.decode()))
        handles.append(handle)
    links, fabrics = set(), {}
    for (one, _), handle in zip(gpus, handles, strict=True):
        for (other, _), peer in zip(gpus, handles, strict=True):
            state = ctypes.c_uint(1)
            asked = nvml.nvmlDeviceGetP2PStatus(handle, peer, _P2P_NVLINK, ctypes.byref(state))
            if one != other and asked == 0 and state.value == _P2P_OK:
                links.add((one, other))
        if fabric := _fabric_of(nvml, handle):
            fabrics[one] = fabric
    return GpuMachine(driver.value.decode(), tuple(gpus), frozenset(links), fabrics)


def _fabric_of(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    """Cluster and clique of a GPU; empty where it is in no NVLink network of several machines. A machine that
    is a network of its own has a cluster of zeros."""
    info = _FabricInfo()
    try:
        asked = nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except AttributeError:  # drivers before 535
        return ""
    cluster = bytes(info.cluster)
    if asked or info.state != _FABRIC_COMPLETED or info.status or not any(cluster):
        return ""
    return f"{cluster.hex()}/{info.clique}"


def version() -> str:
    """The version of meshcast, also where it cannot be imported."""
    text = (Path(__file__).parent.parent / "_version.py").read_text(encoding="utf-8")
    return text.partition("__version__ = ")[2].split("\n")[0].strip("\"'")


def _read(path: Path) -> str:
    """A file of sysfs, or "": links that are down answer with an error."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(markdown())
