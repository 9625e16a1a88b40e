"""Builds the extension module with CMake against the torch that is installed.

Environment: MESHCAST_CUDA (AUTO, ON or OFF), CMAKE_ARGS (extra arguments for cmake), CXX (the compiler),
MAX_JOBS (parallel compiler processes).
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from build_tools import require_python, require_tools, require_torch, require_writable, stop  # noqa: E402


def long_description() -> str:
    """The README without what points into the tree: elsewhere such links and pictures lead nowhere."""
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", (ROOT / "README.md").read_text())
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


class CMakeBuild(build_ext):
    """Configures and builds the target _C. In place, the build folder is the one of `make build`."""

    def run(self) -> None:
        require_python(Path(sysconfig.get_path("include")))
        site = require_torch()
        cmake = require_tools()
        in_place = self.inplace or self.editable_mode
        build_dir = ROOT / "build" / "release" if in_place else Path(self.build_temp).resolve()
        module_dir = ROOT / "python" / "meshcast" if in_place else Path(self.build_lib).resolve() / "meshcast"
        for folder in (build_dir, module_dir):
            require_writable(folder)
        build_dir.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir)]
        if not (build_dir / "CMakeCache.txt").exists() and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        configure += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DMESHCAST_MODULE_DIR={module_dir}",
            f"-DMESHCAST_TORCH_SITE={site}",
        ]
        if not in_place:
            configure.append("-DMESHCAST_BUILD_TESTS=OFF")
        if cuda := os.environ.get("MESHCAST_CUDA"):
            configure.append(f"-DMESHCAST_CUDA={cuda}")
        env = dict(os.environ)
        ccache = shutil.which("ccache")
        if "CMAKE_CXX_COMPILER_LAUNCHER" not in env:
            # Empty: CMake's cache may name a ccache that is no longer there.
            configure.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={'ccache' if ccache else ''}")
        if ccache:
            # pip and `build` compile in a folder of a new name each time.
            env.setdefault("CCACHE_BASEDIR", str(ROOT))
            env.setdefault("CCACHE_NOHASHDIR", "1")
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        # The same lock as the Makefile's: two builds in one folder would spoil each other.
        (ROOT / "build").mkdir(exist_ok=True)
        with open(ROOT / "build" / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.call(configure, "configuring", env)
            self.call([cmake, "--build", str(build_dir), "--target", "_C", "-j", jobs], "compiling", env)

    @staticmethod
    def call(command: list[str], what: str, env: dict[str, str]) -> None:
        print("+", shlex.join(command), flush=True)
        status = subprocess.run(command, check=False, env=env).returncode
        if status != 0:
            stop(f"{what} failed with status {status}; the reason is in the lines above.")


if int(setuptools.__version__.split(".")[0]) < 77:
    stop(
        f"setuptools {setuptools.__version__} is too old: run `pip install 'setuptools>=77'` and build again."
    )

setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("meshcast._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
