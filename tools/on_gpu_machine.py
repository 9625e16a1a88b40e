"""The machine before on_gpu.py builds; torch.utils.collect_env lists it, and does not say what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Machine", "obstacle", "seen"]

# Of GPU memory, free: `benchmarks cuda_ipc` moves 1 GiB between four ranks, each with a context of its own.
NEEDS_GIB = 12.0
PACKAGES = ("pytest", "pytest_timeout", "numpy")
NEEDS = (
    "nvcc of the CUDA release of torch, g++, cmake 3.22, make or ninja; in Python torch with CUDA (its "
    "wheels bring NCCL), pytest, pytest-timeout, numpy; rich and scikit-learn for the examples of pipeline"
)


@dataclass
class Machine:
    """What a step's result depends on. driver_cuda: newest CUDA release of the driver, as (major, minor)."""

    python: str
    cores: int
    torch: str | None = None
    torch_cuda: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpu: str | None = None
    gpus: int = 0
    capability: str | None = None
    free_gib: float = 0.0
    total_gib: float = 0.0
    others: list[str] = field(default_factory=list)
    nvcc: str | None = None
    missing: list[str] = field(default_factory=list)
    arch_list: str | None = None


def seen() -> Machine:
    """What a process of its own sees: a context on the GPU would stay in this one, as if of another user."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], check=True, capture_output=True, text=True
    )
    facts: dict[str, Any] = json.loads(found.stdout)
    return Machine(**facts)


def look() -> Machine:
    machine = Machine(platform.python_version(), len(os.sched_getaffinity(0)))
    machine.missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    machine.arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    machine.nvcc = os.environ.get("CUDACXX") or nvcc
    machine.driver, machine.driver_cuda = _driver()
    machine.others = _others()
    if importlib.util.find_spec("torch") is None:
        return machine
    import torch

    machine.torch, machine.torch_cuda = torch.__version__, torch.version.cuda
    if machine.torch_cuda and machine.driver_cuda and torch.cuda.is_available():
        machine.gpus = torch.cuda.device_count()
        machine.gpu = torch.cuda.get_device_name(0)
        machine.capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
        machine.free_gib, machine.total_gib = (part / 2**30 for part in torch.cuda.mem_get_info(0))
    return machine


def _driver() -> tuple[str | None, tuple[int, int] | None]:
    """Its version, and the newest CUDA that it knows."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None, None
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = _smi("driver_version")
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else None, (number.value // 1000, number.value % 1000 // 10)


def _smi(query: str, *, of: str = "gpu") -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-{of}={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _others() -> list[str]:
    """Processes that have a context on a GPU, as far as nvidia-smi sees them: none of another container."""
    return [line for line in _smi("pid,process_name,used_memory", of="compute-apps").splitlines() if line]


def obstacle(machine: Machine, *, dry: bool, shared: bool = False) -> str | None:
    """Why nothing can be run here, as one sentence that says what to do; None where it can. shared: others
    may be on the GPU."""
    if machine.torch is None:
        return f"{sys.executable} has no torch: set PYTHON to an interpreter that has one with CUDA"
    if machine.missing:
        return f"{sys.executable} lacks {', '.join(machine.missing)}: install them beside torch"
    if dry:
        return None
    if machine.torch_cuda is None:
        return f"torch {machine.torch} is a build for CPUs: set PYTHON to one with CUDA's, or run --dry"
    if machine.driver_cuda is None:
        return "there is no driver of NVIDIA (libcuda.so.1): run this where a GPU is, or --dry"
    if machine.driver_cuda[0] < int(machine.torch_cuda.split(".")[0]):
        return (
            f"the driver {machine.driver} knows CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}, and "
            f"torch {machine.torch} is built with {machine.torch_cuda}: update the driver, or change torch"
        )
    if machine.gpu is None:
        return "torch sees no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi, or run --dry"
    if machine.nvcc is None:
        return f"no nvcc is on PATH or in /usr/local/cuda: install CUDA's compiler {machine.torch_cuda}"
    if machine.arch_list is not None and not _covers(machine.arch_list, machine.capability or ""):
        return (
            f"TORCH_CUDA_ARCH_LIST={machine.arch_list} has no code for the {machine.gpu}, which is "
            f"{machine.capability}: unset it"
        )
    if machine.others and not shared:
        return (
            f"others use the GPU ({'; '.join(machine.others)}), which spoils figures: wait for their end, or "
            "give --shared"
        )
    if machine.free_gib < NEEDS_GIB:
        return (
            f"{machine.free_gib:.1f} of {machine.total_gib:.1f} GiB of GPU memory are free, {NEEDS_GIB:.0f} "
            "are needed: end what uses it, or take a larger GPU"
        )
    return None


def _covers(arch_list: str, capability: str) -> bool:
    """Whether code for one of the architectures runs on a GPU of that capability: the same major number and
    no later minor one, or PTX of any earlier one."""
    major, minor = (int(part) for part in capability.split("."))
    for name in re.split(r"[ ;,]+", arch_list.strip()):
        found = re.fullmatch(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", name)
        if found is None:
            continue
        theirs = int(found[1]), int(found[2])
        if (theirs[0] == major and theirs[1] <= minor) or (found[3] and theirs <= (major, minor)):
            return True
    return False


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
