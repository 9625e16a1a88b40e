"""What the source archive holds, and that a wheel built from it works in an environment of its own."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

BUILD_SDIST = """
import sys
sys.path.insert(0, "tools")
import build_backend
print(build_backend.build_sdist("dist"))
"""


def build_sdist(interpreter: Callable, source_tree: Path) -> Path:
    done = interpreter(with_torch=False).run("-c", BUILD_SDIST, cwd=source_tree)
    assert done.returncode == 0, done.stderr
    return source_tree / "dist" / done.stdout.strip().splitlines()[-1]


def test_sdist_needs_no_torch_and_holds_every_source(interpreter: Callable, source_tree: Path) -> None:
    with tarfile.open(build_sdist(interpreter, source_tree)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(source_tree))
        for folder in ("csrc", "cmake", "python", "tests", "examples", "tools")
        for path in (source_tree / folder).rglob("*")
        if path.suffix
        in {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".cmake", ".in", ".typed", ".sh", ".json", ".csv"}
        or path.name == "py.typed"
    }
    assert len(wanted) > 50
    assert wanted <= names, sorted(wanted - names)
    assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    built = [name for name in names if name.endswith((".so", "_build_info.py"))]
    assert built == []


def test_sdist_holds_all_that_git_has(interpreter: Callable, source_tree: Path) -> None:
    """A user of the archive can build, test and measure; pre-commit needs a checkout."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, check=False, capture_output=True, text=True)
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=ROOT, check=False, capture_output=True)
    if done.returncode != 0 or Path(top.stdout.decode().strip()) != ROOT:
        pytest.skip(f"{ROOT} is no checkout of git, so there is no list to compare with")
    tracked = {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(build_sdist(interpreter, source_tree)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert tracked - names == {".gitignore"}
    written = {name for name in names - tracked if ".egg-info/" not in name}
    assert written == {"PKG-INFO", "setup.cfg"}


def test_sdist_asks_for_any_torch_that_is_new_enough(interpreter: Callable, source_tree: Path) -> None:
    with tarfile.open(build_sdist(interpreter, source_tree)) as archive:
        member = next(
            name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")
        )
        metadata = archive.extractfile(member).read().decode()
    assert "Requires-Dist: torch>=2.11" in metadata.splitlines()


TRY_OUT = """
import meshcast, torch
from meshcast import _C, _build_info
assert _build_info.torch_version == torch.__version__, _build_info.torch_version
assert "site-packages" in meshcast.__file__, meshcast.__file__
src, dst = meshcast.Layout.parse("1x2:S0R"), meshcast.Layout.parse("1x3@2:S0R")
p = meshcast.plan((64, 8), torch.float32, src, dst)
print("planned", len(p.tasks), "tasks with meshcast", meshcast.__version__)
"""


def install_by_links(site: Path) -> None:
    """The packages of the running interpreter, as if they had been installed in `site`: what a build
    environment hides."""
    for package in Path(torch.__file__).parents[1].iterdir():
        if not (site / package.name).exists() and not package.name.startswith(("__pycache__", "meshcast")):
            (site / package.name).symlink_to(package)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("isolated", [False, True])
def test_wheel_from_the_sdist_imports_elsewhere(
    interpreter: Callable, source_tree: Path, tmp_path: Path, isolated: bool
) -> None:
    """The slow ones: they compile everything, from the archive and not from the checkout. In isolation pip
    makes an environment for the build, which has no torch, and takes setuptools from an index."""
    sdist = build_sdist(interpreter, source_tree)
    unpacked = tmp_path / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    environment = interpreter(with_torch=not isolated)
    if isolated:
        install_by_links(environment.site)

    pip = ("-m", "pip", "--disable-pip-version-check")
    how = [] if isolated else ["--no-build-isolation"]
    done = environment.run(*pip, "wheel", *how, "--no-deps", "-w", str(tmp_path), ".", cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    data = {f"meshcast/{name}" for name in ("py.typed", "pages/page.html", "pages/page.css", "pages/plan.js")}
    assert data | {"meshcast/_C.pyi", "meshcast/_build_info.py"} <= set(names)
    assert [name for name in names if name.endswith(".so") and name.startswith("meshcast/_C.")]
    assert "Requires-Dist: torch>=2.11" in metadata.splitlines()

    done = environment.run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = environment.run("-c", TRY_OUT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("planned")
