"""What `import meshcast` costs and does, each in a fresh process."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import meshcast
import pytest

PACKAGE = Path(meshcast.__file__).parent


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
    )


def test_adds_little_to_import_torch() -> None:
    code = "import time, torch; t = time.perf_counter(); import meshcast; print(time.perf_counter() - t)"
    best = min(float(_python(code).stdout) for _ in range(3))
    assert best < 0.3, f"{best:.3f} s"


def test_opens_no_socket_and_starts_no_thread() -> None:
    code = """
import json, os, sys, threading
import torch

def files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return links

sockets = lambda: sorted(link for link in files() if link.startswith(("socket:", "anon_inode:")))
threads = lambda: len(os.listdir("/proc/self/task"))
before = sockets(), threads()
audit = []
sys.addaudithook(lambda event, args: audit.append(event) if event.startswith("socket.") else None)
import meshcast
meshcast.Layout, meshcast.plan, meshcast.Topology, meshcast.reshard, meshcast.backward
print(json.dumps([before == (sockets(), threads()), threading.active_count(), audit]))
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 1, []]


def test_planning_needs_no_dtensor() -> None:
    code = """
import sys, meshcast
plan = meshcast.plan((8, 8), "int32", meshcast.Layout.parse("2:S0R"), meshcast.Layout.parse("2@2:RS0"))
plan.describe(), plan.to_json(), list(plan.transfers)
print("torch.distributed.tensor" in sys.modules, "matplotlib" in sys.modules)
"""
    assert _python(code).stdout.split() == ["False", "False"]


def test_public_names() -> None:
    assert set(meshcast.__all__) <= set(dir(meshcast))
    for name in meshcast.__all__:
        assert getattr(meshcast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = meshcast.nothing  # type: ignore[attr-defined]


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname: node.module for node in imports for alias in node.names}
    assert homes == {**meshcast._HOME, "__version__": "_version"}


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing it would put the module in the function's place."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert not modules & {name for name in meshcast.__all__ if callable(getattr(meshcast, name))}


def test_backend_is_registered_and_torch_otherwise_unchanged() -> None:
    code = """
import torch, torch.distributed as dist
import torch.distributed.tensor as tensor
before = tensor.DTensor.redistribute, set(dist.Backend.backend_list)
import meshcast
print(tensor.DTensor.redistribute is before[0], sorted(set(dist.Backend.backend_list) - before[1]))
"""
    assert _python(code).stdout.strip() == "True ['meshcast']"


def _copy_package(target: Path, without: str) -> None:
    (target / "meshcast").mkdir()
    for path in PACKAGE.iterdir():
        if not path.name.startswith(without):
            (target / "meshcast" / path.name).symlink_to(path)


def test_another_torch_is_reported_in_one_sentence(tmp_path: Path) -> None:
    _copy_package(tmp_path, "_build_info")
    info = (PACKAGE / "_build_info.py").read_text().replace("torch_version = ", 'torch_version = "1.2.3" or ')
    (tmp_path / "meshcast" / "_build_info.py").write_text(info)
    done = _python("import meshcast", PYTHONPATH=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: meshcast was built for torch 1.2.3, but torch ")
    assert "pip install" in last


def test_a_missing_module_is_reported_in_one_sentence(tmp_path: Path) -> None:
    _copy_package(tmp_path, "_build_info")
    done = _python("import meshcast", PYTHONPATH=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: meshcast's extension module has not been built")
    assert "pip install" in last
