"""Whatever the build lacks, it stops with one sentence that says what to do, and never with a traceback."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import meshcast
import pytest
import torch


def last_line(text: str) -> str:
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


def build(python: Path, tree: Path, **env: str) -> str:
    """What a build that must fail says last. A shell calls it, since a caller's own torch is found."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" setup.py build_ext; exit $?', str(python)],
        cwd=tree,
        env={"PATH": os.environ["PATH"], **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return last_line(done.stderr)


METADATA = """
import sys
sys.path.insert(0, "tools")
import build_backend
print(build_backend.prepare_metadata_for_build_wheel(sys.argv[1]))
"""


def test_metadata_need_neither_torch_nor_cmake_nor_a_compiler(
    interpreter: Callable, source_tree: Path, tmp_path: Path
) -> None:
    done = interpreter(with_torch=False).run(
        "-c", METADATA, str(tmp_path), cwd=source_tree, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / done.stdout.split()[-1] / "METADATA").read_text().splitlines()
    assert f"Version: {meshcast.__version__}" in lines
    assert "Author: The meshcast developers" in lines
    assert "Requires-Dist: torch>=2.11" in lines
    assert "Classifier: Typing :: Typed" in lines
    text = "\n".join(lines)
    assert "# meshcast" in text
    relative = re.findall(r"\]\((?!https?:)[^)]*\)", text.partition("\n\n")[2])
    assert relative == [], "links of the long description that lead nowhere outside the tree"


def test_missing_torch(interpreter: Callable, source_tree: Path) -> None:
    line = build(interpreter(with_torch=False).python, source_tree)
    assert line.startswith("meshcast: torch is not installed for ")
    assert line.endswith("install torch first, then meshcast.")


def test_missing_cmake(interpreter: Callable, source_tree: Path, tmp_path: Path) -> None:
    line = build(interpreter(with_torch=True).python, source_tree, PATH=str(tmp_path))
    assert line.startswith("meshcast: cmake is not on PATH: install cmake")


def test_missing_compiler(interpreter: Callable, source_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "cmake").symlink_to(str(shutil.which("cmake")))
    line = build(interpreter(with_torch=True).python, source_tree, PATH=str(tmp_path))
    assert line.startswith("meshcast: no C++ compiler found")


def test_a_named_compiler_that_is_absent(interpreter: Callable, source_tree: Path) -> None:
    line = build(interpreter(with_torch=True).python, source_tree, CXX="no-such-compiler -O2")
    assert "looked for no-such-compiler on PATH" in line


def fake_torch(prefix: Path, version: str = "2.99.1") -> Path:
    """Packages of a virtual environment at `prefix`, with what looks like a torch."""
    site = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return site


@pytest.mark.parametrize("version", ["2.10.2+cpu", "1.13.1"])
def test_torch_that_is_too_old_stops_before_cmake(
    interpreter: Callable, source_tree: Path, version: str
) -> None:
    python = interpreter(with_torch=False).python
    site = fake_torch(python.parents[1], version)
    line = build(python, source_tree)
    assert line == (
        f"meshcast: torch {version} at {site / 'torch'} is too old: install torch 2.11 or newer, "
        "then meshcast."
    )


PYTHON = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build_tools
build_tools.OLDEST_PYTHON = eval(sys.argv[2])
build_tools.require_python(Path(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("oldest", "expected"),
    [((3, 10), "Python.h is not in "), ((3, 99), r".* is Python 3\.\d+\.\d+\S*, which is")],
)
def test_a_python_without_headers_or_too_old(
    source_tree: Path, tmp_path: Path, oldest: tuple[int, int], expected: str
) -> None:
    command = [sys.executable, "-c", PYTHON, str(source_tree / "tools"), str(oldest), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.match(f"meshcast: {expected}", last_line(done.stderr)), done.stderr


def test_make_checks_the_machine_before_it_downloads_anything(source_tree: Path, tmp_path: Path) -> None:
    def said(python: object, **env: str) -> str:
        command = ["make", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", f"{tmp_path / 'venv'}/bin/python"]
        done = subprocess.run(
            command,
            cwd=source_tree,
            env={**os.environ, **env},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0
        assert not (tmp_path / "venv").exists()
        return done.stderr

    assert "meshcast: no-such-python is not there or too old: install Python 3.10 or newer" in said(
        "no-such-python"
    )
    assert "looked for no-such-compiler on PATH" in said(sys.executable, CXX="no-such-compiler")


ASK = """
import sys
sys.path.insert(0, sys.argv[1])
import build_tools
print(build_tools.torch_site(), build_tools.torch_version())
"""


def test_torch_is_found_where_a_build_environment_hides_it(
    interpreter: Callable, source_tree: Path, tmp_path: Path
) -> None:
    python = interpreter(with_torch=False).python
    site = fake_torch(python.parents[1])
    # As pip does it: what is installed is taken off the path as the interpreter starts.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.remove({str(site)!r})\n")
    program = f"import sys\nassert {str(site)!r} not in sys.path\n{ASK}"
    command = ["/bin/sh", "-c", '"$0" "$@"; exit $?', str(python), "-c", program, str(source_tree / "tools")]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split() == [str(site), "2.99.1"]


def test_torch_of_the_interpreter_that_runs_the_front_end_is_found(
    interpreter: Callable, source_tree: Path, tmp_path: Path
) -> None:
    build_environment = interpreter(with_torch=False).python
    caller = tmp_path / "caller"
    venv.create(caller, with_pip=False, symlinks=True)
    site = fake_torch(caller)
    program = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    command = [str(caller / "bin" / "python"), "-c", program]
    command += [str(build_environment), "-c", ASK, str(source_tree / "tools")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={}, timeout=60)
    assert done.stdout.split() == [str(site), "2.99.1"]


UNWRITABLE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build_tools
if os.geteuid() == 0:
    os.setuid(65534)  # nobody: root may write anywhere
build_tools.require_writable(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("mode", [0o555, 0o777])
def test_a_target_that_cannot_be_written(source_tree: Path, mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "build")
        target.mkdir()
        Path(folder).chmod(0o755)
        target.chmod(mode)
        command = [sys.executable, "-c", UNWRITABLE, str(source_tree / "tools"), str(target / "release")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if mode == 0o777:
        assert done.returncode == 0, done.stderr
    else:
        assert f"{target} cannot be written by this user" in last_line(done.stderr)


def configure(source_tree: Path, build: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "cmake",
            "-S",
            str(source_tree),
            "-B",
            str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


def one_line(text: str) -> str:
    """CMake wraps its messages."""
    return " ".join(text.split())


@pytest.fixture
def other_torch(tmp_path: Path) -> Callable[..., str]:
    """other_torch(version, pybind11=..., cuda=...): a PYTHONPATH whose first package looks like that torch.
    cuda: the release that it was built with; its libraries are those of the real one."""

    def make(version: str, *, pybind11: bool = True, cuda: str | None = None) -> str:
        package = tmp_path / "other" / "torch"
        (package / "include" / "pybind11").mkdir(parents=True)
        if pybind11:
            (package / "include" / "pybind11" / "pybind11.h").touch()
        (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = {cuda!r}\n")
        (package / "distributed.py").write_text("def is_available(): return True\n")
        (package / "_C.py").write_text(
            "_GLIBCXX_USE_CXX11_ABI = True\n"
            "def _cuda_getArchFlags(): return 'sm_80 sm_90a sm_100 compute_100'\n"
        )
        (package / "__init__.py").write_text(
            "from . import _C, distributed, version\nfrom .version import __version__\n"
            "class tensor:\n"
            "    def __init__(self, value): pass\n"
            "    def to(self, dtype): return self\n"
            "    def isnan(self): return True\n"
            "float8_e4m3fn = None\n"
        )
        (package / "lib").symlink_to(Path(torch.__file__).with_name("lib"))
        (package / "include" / "fmt").symlink_to(Path(torch.__file__).with_name("include") / "fmt")
        return str(package.parent)

    return make


def test_too_old_torch(other_torch: Callable, source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=other_torch("2.3.1"))
    assert done.returncode != 0
    assert "torch 2.3.1" in one_line(done.stderr)
    assert "is too old: install torch 2.11 or newer" in one_line(done.stderr)


def test_torch_without_pybind11_headers(other_torch: Callable, source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=other_torch("2.13.0", pybind11=False))
    assert done.returncode != 0
    assert "has no pybind11 headers" in one_line(done.stderr)


def test_torch_that_cannot_be_imported(source_tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "other" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')\n")
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=str(broken.parent))
    assert done.returncode != 0
    assert "torch cannot be imported" in one_line(done.stderr)
    assert "libtorch_cpu.so: cannot open" in one_line(done.stderr)


def test_cuda_option_is_checked_against_torch(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", "-DMESHCAST_CUDA=ON")
    if torch.version.cuda is None:
        assert done.returncode != 0
        assert "MESHCAST_CUDA=ON, but torch" in one_line(done.stderr)
        assert "has no CUDA: install a CUDA build of torch" in one_line(done.stderr)
    else:
        assert done.returncode == 0, done.stderr
        assert f"CUDA of torch: {torch.version.cuda}" in done.stdout


@pytest.mark.parametrize("deleted", [True, False])
def test_ucx_of_a_build_environment_that_is_deleted_is_looked_for_again(
    source_tree: Path, tmp_path: Path, deleted: bool
) -> None:
    """pip builds twice in one folder, each time in a new environment that has UCX's headers."""
    for name in ("first", "second"):
        root = tmp_path / name
        (root / "include" / "ucp" / "api").mkdir(parents=True)
        (root / "include" / "ucp" / "api" / "ucp.h").touch()
        (root / "lib").mkdir()
        (root / "lib" / "libucp.so.0").touch()
        done = configure(source_tree, tmp_path / "build", UCX_ROOT=str(root))
        assert f"meshcast with UCX ({root / 'include'})" in done.stdout, done.stdout + done.stderr
        cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
        assert f"={root / 'lib' / 'libucp.so.0'}\n" in cache
        if deleted:
            shutil.rmtree(root)


def test_catch2_is_found_again_where_it_was_downloaded_once(source_tree: Path, tmp_path: Path) -> None:
    """Without it everything else is built, and the target of the C++ tests says what to do."""
    hidden = [
        "-DCMAKE_DISABLE_FIND_PACKAGE_Catch2=ON",
        "-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include",
        "-DMESHCAST_APT_GET=false",
    ]
    mirror = source_tree / "build" / "mirror.hpp"
    mirror.parent.mkdir(exist_ok=True)
    mirror.write_text("// another file\n")
    fetch = ["-DMESHCAST_FETCH_CATCH2=ON", f"-DMESHCAST_CATCH2_URL=file://{mirror}"]

    def known(name: str, *options: str) -> bool:
        done = configure(source_tree, tmp_path / name, *hidden, *options)
        assert done.returncode == 0, done.stderr
        return "MESHCAST_HAS_CATCH2:INTERNAL=1" in (tmp_path / name / "CMakeCache.txt").read_text()

    assert not known("first", *fetch), "a file with another hash"
    command = ["cmake", "--build", str(tmp_path / "first"), "--target", "meshcast_tests"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "meshcast: Catch2 was not found, so the C++ tests cannot be built: install it" in done.stdout
    header = Path("/usr/include/catch2/catch.hpp")
    digest = "3725c0f0a75f376a5005dde31ead0feb8f7da7507644c201b814443de8355170"
    if not header.exists() or hashlib.sha256(header.read_bytes()).hexdigest() != digest:
        pytest.skip("this machine does not have the header of Catch2 2.13.10 to download from")
    shutil.copy2(header, mirror)
    assert known("first", *fetch)
    mirror.unlink()
    assert known("second")


def test_help_names_every_target(source_tree: Path) -> None:
    said = subprocess.run(
        ["make", "help"], cwd=source_tree, check=True, capture_output=True, text=True
    ).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (source_tree / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^  ([a-z0-9 -]+?)  +\S", said.partition("Variables:")[0], re.MULTILINE)
    listed += re.findall(r"^  ([a-z0-9-]{16}) \S", said, re.MULTILINE)
    assert set(" ".join(listed).split()) == set(phony.split())
    assert re.search(r"^  MESHCAST_CUDA +AUTO, ON or OFF", said, re.MULTILINE)


def test_unknown_cuda_option(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", "-DMESHCAST_CUDA=maybe")
    assert done.returncode != 0
    assert 'MESHCAST_CUDA is "maybe": set it to AUTO, ON or OFF.' in one_line(done.stderr)


def has_gpu() -> bool:
    signs = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
    return bool(shutil.which("nvidia-smi")) or any(Path(sign).exists() for sign in signs)


def test_configure_says_what_it_found_and_builds(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert f"for torch {torch.__version__}" in done.stdout
    assert "CUDA: MESHCAST_CUDA=AUTO" in done.stdout
    flavour = "CPU only: " if torch.version.cuda is None else r"CPU (only: |and CUDA [\d.]+\n)"  # with nvcc
    assert re.search(f"CUDA: built is {flavour}", done.stdout), done.stdout
    if not has_gpu():
        assert "CPU only: this machine has no GPU; MESHCAST_CUDA=ON builds for others" in done.stdout


@pytest.fixture
def cuda_machine(other_torch: Callable, tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with CUDA's torch and compiler; whether it has a GPU is not said."""
    site = Path(other_torch("2.13.0", cuda="13.0"))
    nvidia = site / "nvidia"
    for file, text in (
        ("cu13/lib/libcudart.so.13", ""),
        ("nccl/include/nccl.h", "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"),
    ):
        (nvidia / file).parent.mkdir(parents=True)
        (nvidia / file).write_text(text)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    nvcc.chmod(0o755)
    return {"PYTHONPATH": str(site), "CUDACXX": str(nvcc)}


def test_cuda_is_built_where_there_is_a_gpu_or_it_is_asked_for(
    cuda_machine: dict[str, str], source_tree: Path, tmp_path: Path
) -> None:
    def built(name: str, *options: str, **env: str) -> str:
        done = configure(source_tree, tmp_path / name, *options, **cuda_machine, **env)
        assert done.returncode == 0, done.stderr
        return "\n".join(line for line in done.stdout.splitlines() if "CUDA: " in line)

    if not has_gpu():
        text = built("auto")
        assert "CUDA: built is CPU only: this machine has no GPU; MESHCAST_CUDA=ON builds for others" in text
    text = built("on", "-DMESHCAST_CUDA=ON")
    assert "CUDA: built is CPU and CUDA 13.0" in text
    if not shutil.which("nvidia-smi"):
        assert text.splitlines()[0].endswith("architectures: 8.0 9.0a 10.0+PTX")
    text = built("named", TORCH_CUDA_ARCH_LIST="8.6")
    assert "CUDA: built is CPU and CUDA 13.0" in text
    assert text.splitlines()[0].endswith("architectures: 8.6")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 9.0\n")
    tool.chmod(0o755)
    text = built("gpu", PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    assert "CUDA: built is CPU and CUDA 13.0" in text
    assert text.splitlines()[0].endswith("architectures: 9.0")
    text = built("off", "-DMESHCAST_CUDA=OFF", PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    assert "CUDA: built is CPU only: MESHCAST_CUDA=OFF" in text


def test_architectures_are_those_of_the_gpus_that_are_here(source_tree: Path, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '9.0\\n8.0\\n9.0\\n'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    done = configure(source_tree, tmp_path / "build", PATH=path)
    assert "architectures: 8.0 9.0\n" in done.stdout, done.stdout + done.stderr
    done = configure(source_tree, tmp_path / "named", PATH=path, TORCH_CUDA_ARCH_LIST="8.6")
    assert "architectures: 8.6\n" in done.stdout, done.stdout + done.stderr
