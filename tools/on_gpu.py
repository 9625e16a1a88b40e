"""Builds, tests and measures what was written for GPUs; no runner of CI is on the machines that have one.

Steps run one after another, also after a failure.

tools/on_gpu.sh [--dry] [--list] [--from STEP] [--only STEP ...] [--rest] [--within SECONDS] [--shared]
                [--out FILE.json] [--copy FOLDER] [--commit NAME] [--publish FILE.json]

Each step has a time limit of its own, so that a hang costs one step, and prints its row when it has ended.
--within begins no step whose limit would not fit; --rest runs the steps that have no result yet, so that two
commands one after the other are one run. Results go to build/on_gpu/results.json, where those of other steps
stay, and all output to results.log next to it; --copy copies both after each step. --publish writes them into
docs/cuda.md.
Exit status 1 where a step failed, 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TextIO

import on_gpu_machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "on_gpu"
# What is run is a copy: the tree's own package may hold the module of another torch.
TREE = BUILD / "tree"
PAGE = ROOT / "docs" / "cuda.md"
# Kept in the tree once there is one: the page follows from it.
RESULTS = ROOT / "benchmarks" / "results" / "on_gpu.json"
NOTHING = "nothing yet"
HEAD = "| part | step | on hardware | otherwise |"
# In the environment of whatever a step starts, so that all of it can be found and ended.
MARK = "MESHCAST_ON_GPU_STEP"
LENT_S = 900  # for which a machine with a GPU is lent, all commands together
DRY_LIMITS = 4  # times as long as on a machine with a GPU, which has more cores
SHOWN = 160  # characters of an error in the table
FOLDERS = ("python", "tests", "benchmarks", "examples", "tools", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
OURS = ("_C.*.so", "_build_info.py")


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
    """JUNIT stands for the file that the results go to. A step that is cut leaves the lines of -v."""
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml=JUNIT", *paths)
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


def on_device(*names: str, needs_gpu: bool = False) -> Command:
    return pytest(*(f"tests/cuda/test_{name}.py" for name in names), needs_gpu=needs_gpu)


def steps() -> list[Step]:
    """The most telling ones first: a machine is lent for LENT_S in all, and the last may not be reached."""
    figures = str(BUILD / "figures")
    build = Command((sys.executable, str(Path(__file__).resolve()), "--build"))
    # What it measures is what the plans of all later steps are made with.
    topology = torchrun(2, "-m", "benchmarks", "cuda_topology", "--out", f"{figures}/topology.json")
    ranks_2 = torchrun(2, "-m", "benchmarks", "cuda_ipc", "--out", f"{figures}/ipc_2.json")
    return [
        Step("build", "the flavour for this torch", 180, (build,)),
        Step(
            "import",
            "import, doctor, kernels, a reshard between CPU ranks",
            40,
            (python("tools/cuda_check.py"), python("-m", "meshcast", "doctor")),
        ),
        Step(
            "kernels", "kernels against torch", 60, (on_device("kernels", "kernel_limits", needs_gpu=True),)
        ),
        Step("ipc", "ranks on one GPU over CUDA IPC", 100, (on_device("ipc"),)),
        Step("casts", "to another dtype, block-scaled types", 60, (on_device("casts", "quantize"),)),
        Step(
            "rates",
            "rates over CUDA IPC between two ranks, and what plans take of them",
            50,
            (topology, ranks_2),
        ),
        Step("backend", "backend, state dicts, compiled functions", 60, (on_device("backend", "wiring"),)),
        Step("pipeline", "pipelines, GPT and U-Transformer", 80, (on_device("pipeline"),)),
        Step("mixed", "between CPUs and GPUs", 45, (on_device("mixed"),)),
        Step("review", "doubts, and one rank for each GPU", 95, (on_device("review", "reshard"),)),
        Step(
            "figures",
            "rates of kernels, four ranks over CUDA IPC, a matrix product next to a reshard",
            70,
            (
                python(
                    "-m", "benchmarks", "cuda_kernels", "--out", f"{figures}/kernels.json", needs_gpu=True
                ),
                torchrun(2, "-m", "benchmarks", "cuda_beside", "--out", f"{figures}/beside.json"),
                torchrun(4, "-m", "benchmarks", "cuda_ipc", "--out", f"{figures}/ipc_4.json"),
            ),
        ),
        Step(
            "sanitizer",
            "memcheck, racecheck, initcheck on the kernels",
            60,
            tuple(sanitizer(tool) for tool in ("memcheck", "racecheck", "initcheck")),
        ),
    ]


def limit_of(step: Step, dry: bool) -> float:
    return step.limit_s * (DRY_LIMITS if dry else 1)


def environment(dry: bool, step: Step) -> dict[str, str]:
    """DEVICE=cpu puts the cases on the CPU, where they show that they are right themselves."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{TREE / 'python'}:{TREE}",
        "MESHCAST_WORLD_LIMIT": str(limit_of(step, dry) * 0.6),
        "MESHCAST_GPU_FIGURES": str(BUILD / "gpu_figures"),
    }
    env |= {"DEVICE": "cpu"} if dry else {"MESHCAST_REQUIRE_CUDA": "1"}
    if dry:
        env.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    return env


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


def build_tree() -> None:
    """Copies the package, its tests and its benchmarks to TREE, and builds the module there: the flavour of
    MESHCAST_CUDA, for the architecture of the GPU or TORCH_CUDA_ARCH_LIST. Compiles only what has changed."""
    begin = time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    copy_tree()
    try:
        cmake()
    except subprocess.CalledProcessError as error:
        sys.exit(f"on-gpu: build: {error.cmd[0]} ended with status {error.returncode}; its output is above")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"on-gpu: build: {time.monotonic() - begin:.0f} s, {cpu:.0f} s of CPU")


def run_step(step: Step, dry: bool, log: TextIO) -> dict[str, Any]:
    """Runs the commands one after another; what one of them leaves undone, the next still does."""
    result: dict[str, Any] = {"name": step.name, "what": step.what, "passed": 0, "failed": 0, "skipped": 0}
    result |= {"not_run": [], "first_error": None, "timed_out": False}
    begin = time.monotonic()
    (BUILD / "figures").mkdir(parents=True, exist_ok=True)
    for command in step.commands:
        words = " ".join(command.words)
        if dry and command.needs_gpu:
            result["not_run"].append("needs a GPU")
            continue
        left = limit_of(step, dry) - (time.monotonic() - begin)
        log.write(f"\n==== {step.name}: {words}\n")
        log.flush()
        _run(command, step, dry, left, log, result)
    result["not_run"] = sorted(set(result["not_run"]))
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result


def _run(command: Command, step: Step, dry: bool, left: float, log: TextIO, result: dict[str, Any]) -> None:
    junit = BUILD / "junit.xml"
    junit.unlink(missing_ok=True)
    words = [word.replace("JUNIT", str(junit)) for word in command.words]
    output = BUILD / "output"
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    env = environment(dry, step) | {MARK: mark}
    place = TREE if TREE.exists() else ROOT
    with output.open("w") as sink:
        try:
            process = subprocess.Popen(
                words,
                cwd=place,
                env=env,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            result["not_run"].append(f"{words[0]}: {error.strerror}")
            return
        try:
            status: int | None = process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            status = None
        end_all(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)  # what hangs inside the driver cannot be killed
    said = output.read_text(errors="replace")
    log.write(said)
    if command.refusal and command.refusal in said:
        result["not_run"].append(f"refused: {command.refusal}")
        return
    problem = _count(junit, result) if junit.exists() else _count_lines(said, result)
    if not junit.exists() and status == 0:
        result["passed"] += 1
    if status is None:
        result["timed_out"] = True
        problem = f"over its limit of {limit_of(step, dry):.0f} s" + (f"; {problem}" if problem else "")
    if status != 0 and (problem is None or not junit.exists()):
        result["failed"] += 1
        problem = problem or _last_line(said) or f"exit status {status}"
    if problem and result["first_error"] is None:
        result["first_error"] = re.sub(r"\s+", " ", problem)[:SHOWN]


def end_all(mark: str) -> None:
    """Ends every process that has the mark: a killed pytest leaves the ranks that it had started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _count(junit: Path, result: dict[str, Any]) -> str | None:
    """Adds pytest's results. The message of the first failure."""
    first = None
    try:
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    except ElementTree.ParseError:
        return "pytest was ended while it wrote its results"
    for case in cases:
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            result["failed"] += 1
            first = first or f"{case.get('name')}: {problems[0].get('message', '')}"
        elif (skipped := next(case.iter("skipped"), None)) is not None:
            result["skipped"] += 1
            result["not_run"].append(skipped.get("message", "skipped"))
        else:
            result["passed"] += 1
    return first


def _count_lines(said: str, result: dict[str, Any]) -> str | None:
    """The same of a pytest that was killed before it wrote its file. The name of the first failure."""
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", said, re.MULTILINE)
    for _, state in found:
        result[{"PASSED": "passed", "SKIPPED": "skipped"}.get(state, "failed")] += 1
    return next((name for name, state in found if state in ("FAILED", "ERROR")), None)


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def published(page: str, results: dict[str, Any] | None) -> str:
    """The page with the column filled in: a row says what the last run of its step brought, and where."""
    lines = page.split("\n")
    try:
        first = lines.index(HEAD) + 2
    except ValueError:
        raise SystemExit(f"on-gpu: docs/cuda.md has no line {HEAD!r}") from None
    for number in range(first, len(lines)):
        if not lines[number].startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", lines[number])
        cells[3] = f" {_cell(cells[2].strip().strip('`'), results)} "
        lines[number] = "|".join(cells)
    return "\n".join(lines)


def _cell(step: str, results: dict[str, Any] | None) -> str:
    if step == "none":
        return "does not apply"
    found = next((each for each in (results or {}).get("steps", []) if each["name"] == step), None)
    if found is None or results is None or results["head"]["dry"]:
        return NOTHING
    head = results["head"]
    machine = head["machine"]
    counts = f"{found['passed']} passed" + (f", {found['failed']} failed" if found["failed"] else "")
    missing = f"; not run: {', '.join(found['not_run'])}" if found["not_run"] else ""
    missing = missing.replace("|", "\\|").replace("\n", " ")
    return (
        f"{counts}{missing} ({head['commit']}, {head['date']}, {machine['gpu']}, driver {machine['driver']})"
    )


def publish(source: Path) -> None:
    results = json.loads(source.read_text())
    if results["head"]["dry"]:
        sys.exit(f"on-gpu: {source} is of a dry run: nothing of it is of hardware")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(published(PAGE.read_text(), results))


def stop(reason: str) -> NoReturn:
    print(f"on-gpu: {reason}", file=sys.stderr)
    sys.exit(2)


def arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/on_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU, as far as each step goes")
    parser.add_argument("--build", action="store_true", help="the first step: into build/on_gpu/tree")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    parser.add_argument("--from", dest="first", choices=names, metavar="STEP")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP")
    parser.add_argument("--rest", action="store_true", help="the steps that have no result yet")
    parser.add_argument("--within", type=float, metavar="SECONDS")
    parser.add_argument("--shared", action="store_true", help="others may be on the GPU")
    parser.add_argument("--out", type=Path, default=BUILD / "results.json", metavar="FILE.json")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="where copies of the results go")
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--publish", type=Path, metavar="FILE.json")
    return parser.parse_args()


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def chosen(args: argparse.Namespace, every: list[Step], done: Collection[str] = ()) -> list[Step]:
    """The steps to run. done: those that have a result. A machine that is new has no module yet."""
    names = [step.name for step in every]
    taken = every[names.index(args.first) :] if args.first else every
    left = [step for step in taken if args.only is None or step.name in args.only]
    if not args.rest:
        return left
    built = any((TREE / "python" / "meshcast").glob("_C.*.so"))
    return [step for step in left if step.name not in done or (step.name == "build" and not built)]


def earlier(out: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Results of steps that were run before with the same code on the same machine."""
    if not out.exists():
        return {}
    try:
        found = json.loads(out.read_text())
        same = all(found["head"][key] == head[key] for key in ("commit", "dry", "machine"))
        return {result["name"]: result for result in found["steps"]} if same else {}
    except (KeyError, TypeError, ValueError):
        return {}


def stable(machine: on_gpu_machine.Machine) -> dict[str, Any]:
    """What does not change between two calls on one machine."""
    return {key: value for key, value in asdict(machine).items() if key not in ("free_gib", "others")}


def row(result: dict[str, Any], dry: bool) -> str:
    counts = f"{result['passed']:>4} passed {result['failed']:>3} failed {result['skipped']:>3} skipped"
    said = result["first_error"] or "; ".join(result["not_run"])
    state = "FAILED" if result["failed"] else "dry" if dry else "ok" if not result["not_run"] else "in part"
    return f"{result['name']:<10} {state:<7} {counts} {result['seconds']:6.1f} s  {said}"


def main() -> int:
    every = steps()
    args = arguments([step.name for step in every])
    if args.build:
        build_tree()
        return 0
    if args.publish:
        publish(args.publish)
        return 0
    if args.list:
        for step in every:
            print(f"{step.name:<10} {step.limit_s:4.0f} s  {step.what}")
        print(f"{'in all':<10} {sum(step.limit_s for step in every):4.0f} s  of {LENT_S} s")
        print(f"Needs, without a network: {on_gpu_machine.NEEDS}")
        return 0
    machine = on_gpu_machine.seen()
    if reason := on_gpu_machine.obstacle(machine, dry=args.dry, shared=args.shared):
        stop(f"{reason}: nothing was built")
    head = {
        "commit": args.commit or commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "dry": args.dry,
        "machine": json.loads(json.dumps(stable(machine))),
    }
    place = "without a GPU" if args.dry else f"{machine.gpu}, driver {machine.driver}"
    print(f"on-gpu: {head['commit']}, torch {machine.torch}, {place}, {machine.cores} cores", flush=True)
    out = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    results = earlier(out, head)
    begin = time.monotonic()
    ran: list[str] = []
    failed = False
    with out.with_suffix(".log").open("a" if results else "w") as log:
        for step in chosen(args, every, set(results)):
            left = None if args.within is None else args.within - (time.monotonic() - begin)
            if left is not None and left < limit_of(step, args.dry) and ran:
                limit = f"{step.name} may take {limit_of(step, args.dry):.0f}"
                print(f"on-gpu: {left:.0f} s are left, {limit}: continue with --rest")
                break
            result = run_step(step, args.dry, log)
            results[step.name] = result
            ran.append(step.name)
            print(row(result, args.dry), flush=True)
            failed = failed or result["failed"] > 0
            ordered = [results[each.name] for each in every if each.name in results]
            out.write_text(json.dumps({"head": head, "steps": ordered}, indent=1) + "\n")
            log.flush()
            if args.copy:
                args.copy.mkdir(parents=True, exist_ok=True)
                for file in (out, out.with_suffix(".log")):
                    shutil.copy2(file, args.copy)
            if step.name == "build" and result["failed"]:
                print("on-gpu: nothing else can be run")
                break
    shown = os.path.relpath(out)
    print(f"on-gpu: {shown} and its log; {'a step FAILED' if failed else 'no failure'}")
    took = sum(result["seconds"] for result in results.values())
    limits = sum(step.limit_s for step in every)
    print(
        f"on-gpu: {len(results)} of {len(every)} steps took {took:.0f} s; limits: {limits:.0f} of {LENT_S} s"
    )
    if args.dry:
        print("on-gpu: NOT checked: whatever needs a GPU, since this was a dry run (docs/cuda.md)")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
