"""Print what CMake must know of the interpreter and of the torch installed for it, one KEY=VALUE per line.

CMake runs this file with the interpreter it builds for. The argument is a folder of packages, or empty:
a build environment of pip hides those of its interpreter. A problem: one sentence on stderr, exit status 1.
"""

import importlib.util
import os
import sys
import sysconfig
from types import ModuleType

REINSTALL = "install it first (`pip install torch`), then meshcast"


def fail(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(1)


def e4m3_saturates(torch: ModuleType) -> bool:
    """Whether too large numbers become the largest of that format; in other releases they become NaN."""
    return not torch.tensor(1e9).to(torch.float8_e4m3fn).isnan()


def main() -> None:
    sys.path.extend(filter(None, sys.argv[1:]))
    if importlib.util.find_spec("torch") is None:
        fail(f"torch is not installed for {sys.executable}: {REINSTALL}.")
    try:
        import torch
    except Exception as error:  # a broken torch fails in many ways, and all of them stop the build
        fail(f"torch cannot be imported by {sys.executable} ({error}): {REINSTALL}.")
    root = os.path.dirname(torch.__file__)
    include = os.path.join(root, "include")
    python_include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "pybind11", "pybind11.h")):
        fail(
            f"torch {torch.__version__} at {root} has no pybind11 headers in include/pybind11: install a "
            "torch wheel that has them (2.11 or newer); another pybind11 cannot exchange types with torch."
        )
    if not os.path.exists(os.path.join(python_include, "Python.h")):
        fail(
            f"Python.h is not in {python_include}: install the development headers of Python "
            f"{sysconfig.get_python_version()} (on Debian: apt-get install python3-dev)."
        )
    facts = {
        "TORCH_VERSION": torch.__version__,
        "TORCH_ROOT": root,
        "TORCH_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
        "TORCH_CUDA": torch.version.cuda or "",
        "TORCH_CUDA_ARCHITECTURES": torch._C._cuda_getArchFlags() or "" if torch.version.cuda else "",
        "TORCH_E4M3_SATURATES": int(e4m3_saturates(torch)) if torch.version.cuda else "",
        "TORCH_DISTRIBUTED": int(torch.distributed.is_available()),
        "PYTHON_INCLUDE": python_include,
        "PYTHON_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }
    for key, value in facts.items():
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
