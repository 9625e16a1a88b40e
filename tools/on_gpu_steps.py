"""The steps of on_gpu.py, in the order that brings the most first."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUILD", "TREE", "Command", "Step", "steps"]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "on_gpu"
# What is run is a copy: the tree's own package may hold the module of another torch.
TREE = BUILD / "tree"


@dataclass(frozen=True)
class Command:
    """words: run in TREE. needs_gpu: left out by --dry. refusal: a text in its output that says that the
    machine refuses this, which is a result and no failure."""

    words: tuple[str, ...]
    needs_gpu: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class Step:
    """limit_s: of all commands together; what runs then is killed, and costs no other step."""

    name: str
    what: str
    limit_s: float
    commands: tuple[Command, ...]


def python(*words: str, needs_gpu: bool = False) -> Command:
    return Command((sys.executable, "-W", "ignore", *words), needs_gpu)


def pytest(*paths: str, needs_gpu: bool = False) -> Command:
    """JUNIT stands for the file that the results go to."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=JUNIT", *paths)
    return python(*words, needs_gpu=needs_gpu)


def torchrun(ranks: int, *words: str) -> Command:
    return python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words, needs_gpu=True
    )


def sanitizer(tool: str) -> Command:
    """Some of the kernels' tests: under a sanitizer each launch takes a hundred times as long."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    chosen = "many_boxes or graph or refused or (reductions and (float32 or int8)) or (casts and bfloat16)"
    words = (program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *pytest("-x").words)
    return Command((*words, "-k", chosen, "tests/cuda/test_kernels.py"), True, "Device not supported")


def build() -> Command:
    return Command((sys.executable, str(ROOT / "tools" / "on_gpu_build.py")))


def steps() -> list[Step]:
    figures = str(BUILD / "figures")
    kernels = pytest("tests/cuda/test_kernels.py", "tests/cuda/test_kernel_limits.py", needs_gpu=True)
    return [
        Step("build", "the flavour for this torch", 600, (build(),)),
        Step(
            "import",
            "import, doctor, kernels, a reshard between CPU ranks",
            120,
            (python("tools/cuda_check.py"), python("-m", "meshcast", "doctor")),
        ),
        Step("kernels", "kernels against torch", 120, (kernels,)),
        Step(
            "ipc",
            "ranks on one GPU over CUDA IPC, and one for each",
            300,
            (pytest(*(f"tests/cuda/test_{name}.py" for name in ("ipc", "reshard", "review"))),),
        ),
        Step("mixed", "between CPUs and GPUs", 120, (pytest("tests/cuda/test_mixed.py"),)),
        Step("casts", "to another dtype", 120, (pytest("tests/cuda/test_casts.py"),)),
        Step("pipeline", "pipelines, GPT and U-Transformer", 300, (pytest("tests/cuda/test_pipeline.py"),)),
        Step(
            "backend",
            "backend, state dicts, compiled functions",
            240,
            (pytest("tests/cuda/test_backend.py", "tests/cuda/test_wiring.py"),),
        ),
        Step(
            "sanitizer",
            "memcheck, racecheck, initcheck on the kernels",
            300,
            tuple(sanitizer(tool) for tool in ("memcheck", "racecheck", "initcheck")),
        ),
        Step(
            "figures",
            "rates of kernels and of CUDA IPC, a matrix product beside a reshard",
            300,
            (
                python("-m", "benchmarks.cuda_kernels", "--out", f"{figures}/kernels.json", needs_gpu=True),
                torchrun(2, "-m", "benchmarks.cuda_ipc", "--out", f"{figures}/ipc_2.json"),
                torchrun(4, "-m", "benchmarks.cuda_ipc", "--out", f"{figures}/ipc_4.json"),
                torchrun(2, "-m", "benchmarks.cuda_beside", "--out", f"{figures}/beside.json"),
            ),
        ),
    ]


def environment(dry: bool, step: Step) -> dict[str, str]:
    """DEVICE=cpu puts the cases on the CPU, where they show that they are right themselves."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{TREE / 'python'}:{TREE}",
        "MESHCAST_WORLD_LIMIT": str(step.limit_s * 0.6),
    }
    env |= {"DEVICE": "cpu"} if dry else {"MESHCAST_REQUIRE_CUDA": "1"}
    if dry:
        env.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    return env
