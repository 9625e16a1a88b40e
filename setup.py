"""Builds the extension module with CMake against the torch that is installed.

Environment: MESHCAST_CUDA (AUTO, ON or OFF), CMAKE_ARGS (extra arguments for cmake), CXX (the compiler),
MAX_JOBS (parallel compiler processes).
"""

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = "2.11"
# Elsewhere the system's UCX serves, or gloo.
UCX = "libucx-cu12>=1.14,<2; platform_system == 'Linux' and platform_machine in 'x86_64 aarch64'"


def stop(sentence: str) -> None:
    """End the build with one sentence that says what to do; a traceback would bury it."""
    sys.exit(f"meshcast: {sentence}")


def torch_version() -> str | None:
    """Version of the torch that this interpreter would import, without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def require_torch() -> str:
    version = torch_version()
    if version is None:
        stop(
            f"torch is not installed for {sys.executable}, and the extension must be built against the torch "
            "it will run with: install torch, then run `pip install --no-build-isolation .` (plain "
            "`pip install .` builds in an empty environment that hides your torch)."
        )
    return version  # type: ignore[return-value]


def require_tools() -> str:
    """The path of cmake, once it is sure that a compiler is there too."""
    cmake = shutil.which("cmake")
    if cmake is None:
        stop("cmake is not on PATH: install cmake 3.22 or newer (`pip install cmake`, or a system package).")
    # CMake looks for these names itself; its own complaint is a page long.
    asked = os.environ.get("CXX")
    names = [shlex.split(asked)[0]] if asked else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        stop(
            f"no C++ compiler found (looked for {', '.join(names)} on PATH): install GCC 11 or newer or "
            "Clang 14 or newer, or set CXX to a compiler."
        )
    return cmake  # type: ignore[return-value]


def requirements() -> list[str]:
    """A wheel works with the torch minor release it was built for, a source archive with any new enough."""
    version = torch_version()
    if version is None or "sdist" in sys.argv:
        return [f"torch>={OLDEST_TORCH}", UCX]
    major, minor = version.split(".")[:2]
    return [f"torch=={major}.{minor}.*", UCX]


class CheckedDistInfo(dist_info):
    """Metadata comes first in `pip install`: stop here, before pip fetches a torch to satisfy it, and
    before the reason drowns in the output of a build."""

    def run(self) -> None:
        require_torch()
        require_tools()
        super().run()


class CMakeBuild(build_ext):
    """Configures and builds the target _C. In place, the build folder is the one of `make build`."""

    def run(self) -> None:
        require_torch()
        cmake = require_tools()
        in_place = self.inplace or self.editable_mode
        build_dir = ROOT / "build" / "release" if in_place else Path(self.build_temp).resolve()
        module_dir = ROOT / "python" / "meshcast" if in_place else Path(self.build_lib).resolve() / "meshcast"
        build_dir.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir)]
        if not (build_dir / "CMakeCache.txt").exists() and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        configure += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DMESHCAST_MODULE_DIR={module_dir}",
        ]
        if not in_place:
            configure.append("-DMESHCAST_BUILD_TESTS=OFF")
        if cuda := os.environ.get("MESHCAST_CUDA"):
            configure.append(f"-DMESHCAST_CUDA={cuda}")
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        # The same lock as the Makefile's: two builds in one folder would spoil each other.
        (ROOT / "build").mkdir(exist_ok=True)
        with open(ROOT / "build" / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.call(configure, "configuring")
            self.call([cmake, "--build", str(build_dir), "--target", "_C", "-j", jobs], "compiling")

    @staticmethod
    def call(command: list[str], what: str) -> None:
        print("+", shlex.join(command), flush=True)
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            stop(f"{what} failed with status {status}; the reason is in the lines above.")


if int(setuptools.__version__.split(".")[0]) < 77:
    stop(
        f"setuptools {setuptools.__version__} is too old: run `pip install 'setuptools>=77'` and build again."
    )

setup(
    install_requires=requirements(),
    ext_modules=[Extension("meshcast._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "dist_info": CheckedDistInfo},
)
