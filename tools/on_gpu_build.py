"""Copies the package, its tests and its benchmarks to build/on_gpu/tree, and builds the module there.

Incremental: a second run compiles what has changed. The flavour is that of MESHCAST_CUDA; its architecture
is that of the GPU, or TORCH_CUDA_ARCH_LIST's.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time

from on_gpu_steps import BUILD, ROOT, TREE

FOLDERS = ("python", "tests", "benchmarks", "examples", "tools", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
OURS = ("_C.*.so", "_build_info.py")


def copy_tree() -> None:
    """The module that was built stays."""
    os.chdir(ROOT)  # this may run in the folder that is replaced
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "out", *OURS)
    package = TREE / "python" / "meshcast"
    kept = [(path.name, path) for pattern in OURS for path in package.glob(pattern)]
    beside = BUILD / "tree.new"
    shutil.rmtree(beside, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, beside / folder, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, beside / name)
    for name, path in kept:
        shutil.move(path, beside / "python" / "meshcast" / name)
    shutil.rmtree(TREE, ignore_errors=True)
    beside.rename(TREE)


def cmake() -> None:
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DMESHCAST_BUILD_TESTS=OFF"]
    options.append(f"-DMESHCAST_MODULE_DIR={TREE / 'python' / 'meshcast'}")
    options.append(f"-DMESHCAST_WERROR={os.environ.get('WERROR', 'OFF')}")
    options.append(f"-DMESHCAST_CUDA={os.environ.get('MESHCAST_CUDA', 'AUTO')}")
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    folder = str(BUILD / "cmake")
    subprocess.run(["cmake", "-S", str(ROOT), "-B", folder, "-G", generator, *options], check=True)
    jobs = os.environ.get("JOBS") or str(len(os.sched_getaffinity(0)))
    subprocess.run(["cmake", "--build", folder, "-j", jobs, "--target", "_C"], check=True)


def main() -> None:
    begin = time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    copy_tree()
    try:
        cmake()
    except subprocess.CalledProcessError as error:
        sys.exit(f"on_gpu_build: {error.cmd[0]} ended with status {error.returncode}; its output is above")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"on_gpu_build: {time.monotonic() - begin:.0f} s, {cpu:.0f} s of CPU")


if __name__ == "__main__":
    main()
