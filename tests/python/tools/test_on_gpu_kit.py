"""tools/on_gpu.sh: what stops it before it builds, its limits, its counts, and the table that it writes."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
pytestmark = pytest.mark.timeout(120)


def tool(name: str) -> ModuleType:
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)


machines = tool("on_gpu_machine")
kit = tool("on_gpu")

GOOD = machines.Machine(
    python="3.12.3", cores=16, torch="2.11.0+cu130", torch_cuda="13.0", driver="580.159.04",
    driver_cuda=(13, 0), gpu="NVIDIA H100", gpus=1, capability="9.0", free_gib=78.0, total_gib=79.2,
    nvcc="/usr/local/cuda/bin/nvcc",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": None}, "has no torch"),
        ({"missing": ["pytest"]}, "lacks pytest"),
        ({"torch_cuda": None, "torch": "2.13.0+cpu"}, "torch 2.13.0+cpu is a build for CPUs"),
        ({"driver_cuda": None}, "no driver of NVIDIA"),
        ({"driver_cuda": (12, 8), "driver": "570.1"}, "570.1 knows CUDA 12.8, and torch 2.11.0+cu130"),
        ({"gpu": None}, "torch sees no GPU"),
        ({"nvcc": None}, "no nvcc"),
        ({"arch_list": "8.0 8.6"}, "=8.0 8.6 has no code for the NVIDIA H100, which is 9.0"),
        ({"arch_list": "10.0+PTX"}, "has no code"),
        ({"others": ["4711, python, 900 MiB"]}, "others use the GPU (4711, python, 900 MiB)"),
        ({"free_gib": 3.25}, "3.2 of 79.2 GiB of GPU memory are free, 12 are needed"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    reason = machines.obstacle(replace(GOOD, **changes), dry=False)
    assert reason is not None and said in reason
    assert "\n" not in reason and len(re.findall(r"\.\s", reason)) == 0


@pytest.mark.parametrize("arch_list", [None, "9.0", "8.0;9.0a", "8.0+PTX"])
def test_a_machine_with_all_it_takes(arch_list: str | None) -> None:
    assert machines.obstacle(replace(GOOD, arch_list=arch_list), dry=False) is None
    assert machines.obstacle(replace(GOOD, others=["4711, python, 900 MiB"]), dry=False, shared=True) is None


def test_this_machine_is_seen() -> None:
    seen = machines.seen()
    assert seen.python == ".".join(map(str, sys.version_info[:3]))
    assert machines.obstacle(seen, dry=True) is None


def test_without_a_gpu_nothing_is_built(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: it would run")
    out = tmp_path / "results.json"
    command = [str(TOOLS / "on_gpu.sh"), "--out", str(out)]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"on-gpu: .*: nothing was built\n", done.stderr), done.stderr
    assert not out.exists()


def test_a_second_copy_of_the_tree_keeps_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it runs in the first one, as the steps do."""
    monkeypatch.setattr(kit, "BUILD", tmp_path)
    monkeypatch.setattr(kit, "TREE", tmp_path / "tree")
    kit.copy_tree()
    package = tmp_path / "tree" / "python" / "meshcast"
    assert not [*package.glob("_C.*.so"), *package.glob("_build_info.py")]
    (package / "_C.of-another.so").write_text("built")
    (package / "gone.py").write_text("of before")
    monkeypatch.chdir(tmp_path / "tree")
    kit.copy_tree()
    assert subprocess.run(["cmake", "--version"], capture_output=True, check=False).returncode == 0
    assert (package / "_C.of-another.so").read_text() == "built"
    assert not (package / "gone.py").exists()


def run(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dry: bool = True
) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(kit, "BUILD", tmp_path)
    monkeypatch.setattr(kit, "TREE", tmp_path / "tree")
    monkeypatch.setattr(kit, "DRY_LIMITS", 1)
    log = io.StringIO()
    return kit.run_step(step, dry, log), log.getvalue()


def shell(text: str, **options: Any) -> Any:
    return kit.Command(("bash", "-c", text), **options)


def test_what_a_step_started_ends_with_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has a session of its own, as the ranks of some tests do."""
    file = tmp_path / "pid"
    commands = (shell(f"setsid sleep 60 & echo $! > {file}; echo begun; wait"), shell("echo after"))
    begin = time.monotonic()
    result, log = run(kit.Step("hangs", "", 2.0, commands), tmp_path, monkeypatch)
    assert time.monotonic() - begin < 30
    assert result["timed_out"] and "over its limit of 2 s" in result["first_error"]
    assert "begun" in log
    pid = int(file.read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_counts_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'unlike'\n"
        "def test_c(): pytest.skip('no second GPU')\n"
    )
    words = kit.pytest("-c", "/dev/null", str(tests)).words
    commands = (kit.Command(words), shell("exit 0"), shell("echo broken; exit 3"))
    result, log = run(kit.Step("counts", "", 60.0, commands), tmp_path, monkeypatch)
    assert (result["passed"], result["failed"], result["skipped"]) == (2, 2, 1)
    assert result["first_error"].startswith("test_b: AssertionError: unlike")
    assert result["not_run"] == ["no second GPU"]
    assert "broken" in log


def test_a_refusal_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = (
        shell("echo 'Error: Device not supported'; exit 1", needs_gpu=True, refusal="Device not supported"),
        kit.Command(("no-such-program",), True),
    )
    step = kit.Step("sanitizer", "", 20.0, commands)
    result, _ = run(step, tmp_path, monkeypatch, dry=False)
    assert (result["passed"], result["failed"]) == (0, 0)
    assert result["not_run"] == [
        "no-such-program: No such file or directory",
        "refused: Device not supported",
    ]
    assert run(step, tmp_path, monkeypatch)[0]["not_run"] == ["needs a GPU"]


def test_a_call_that_waited_is_distinguished_from_processes_that_take_turns() -> None:
    """Whatever the GPU's pace: bounds are ratios to copies of the same run."""
    sys.path.append(str(ROOT / "tests" / "cuda"))
    pace = tool("pace")

    def paces(slow: float, busy: bool, calls: float, copies: float) -> list[Any]:
        return [pace.Pace(0.1 * slow, 0.02 * slow, calls * slow, copies * slow, of) for of in (busy, None)]

    for slow in (1.0, 300.0):
        assert pace.waited(paces(slow, True, 0.1, 0.02)) == ""
        assert pace.waited(paces(slow, False, 9.0, 1.2)) == "turns"
        assert pace.waited([paces(slow, False, 9.0, 1.2)[0], paces(slow, False, 2.5, 0.021)[1]]) == "a fault"


def results(dry: bool = False) -> dict[str, Any]:
    step = {"name": "ipc", "passed": 38, "failed": 1, "skipped": 0, "not_run": ["one | two"], "seconds": 41.0}
    machine = {"gpu": "NVIDIA H100", "driver": "580.159.04"}
    return {
        "head": {"commit": "abc1234", "date": "2027-01-05", "dry": dry, "machine": machine},
        "steps": [step],
    }


def test_the_table_is_that_of_the_results() -> None:
    text = kit.PAGE.read_text()
    found = kit.published(text, results())
    cell = "38 passed, 1 failed; not run: one \\| two (abc1234, 2027-01-05, NVIDIA H100, driver 580.159.04)"
    rows = [
        line for line in text.split("\n") if re.match(r"\|[^|]*\| `ipc` \|", line) and "nothing yet" in line
    ]
    assert found.count(cell) == len(rows) > 3
    assert kit.published(found, None) == kit.published(text, None)
    assert kit.published(text, results(dry=True)) == kit.published(text, None)


def test_the_page_has_what_was_run() -> None:
    kept = json.loads(kit.RESULTS.read_text()) if kit.RESULTS.exists() else None
    assert kit.published(kit.PAGE.read_text(), kept) == kit.PAGE.read_text(), (
        f"docs/cuda.md does not follow from {kit.RESULTS.name}: run tools/on_gpu.sh --publish"
    )


def test_every_row_names_a_step() -> None:
    names = {step.name for step in kit.steps()} | {"none"}
    lines = kit.PAGE.read_text().split("\n")
    first = lines.index(kit.HEAD) + 2
    rows = lines[first : first + lines[first:].index("")]
    assert {row.split("|")[2].strip().strip("`") for row in rows} <= names
    limits = {step.name: f"{step.limit_s:.0f} s" for step in kit.steps()}
    described = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (\d+ s) \|$", kit.PAGE.read_text(), re.M))
    assert described == limits


def test_all_steps_fit_into_the_time_for_which_a_machine_is_lent() -> None:
    """Even where each takes all of its limit; the first ten leave two minutes to start the machine."""
    limits = [step.limit_s for step in kit.steps()]
    assert sum(limits) <= kit.LENT_S
    assert sum(limits[:10]) <= kit.LENT_S - 120


def test_what_a_step_did_before_its_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import pytest, time\ndef test_a(): pass\ndef test_b(): assert 0\n"
        "def test_c(): pytest.skip('none')\ndef test_d(): time.sleep(60)\n"
    )
    step = kit.Step("slow", "", 8.0, (kit.Command(kit.pytest("-c", "/dev/null", str(tests)).words),))
    result, _ = run(step, tmp_path, monkeypatch)
    assert (result["passed"], result["failed"], result["skipped"]) == (1, 2, 1)
    assert result["timed_out"]
    assert result["first_error"].startswith("over its limit of 8 s; ") and "test_b" in result["first_error"]


def test_a_second_command_runs_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies of the results after each step. On another machine the module is built again."""
    log = tmp_path / "ran"
    steps = [kit.Step(name, "", 5.0, (shell(f"echo {name} >> {log}"),)) for name in ("build", "one", "two")]
    monkeypatch.setattr(kit, "steps", lambda: steps)
    monkeypatch.setattr(kit, "BUILD", tmp_path)
    monkeypatch.setattr(kit, "TREE", tmp_path / "tree")
    package = tmp_path / "tree" / "python" / "meshcast"
    package.mkdir(parents=True)
    (package / "_C.so.so").write_text("built")

    def command(*words: str) -> list[str]:
        log.write_text("")
        copies = ["--copy", str(tmp_path / "copies")]
        arguments = ["on_gpu.py", "--dry", "--out", str(tmp_path / "results.json"), *copies, *words]
        monkeypatch.setattr(sys, "argv", arguments)
        assert kit.main() == 0
        return log.read_text().split()

    assert command("--within", "1") == ["build"]  # the first step always runs
    copied = json.loads((tmp_path / "copies" / "results.json").read_text())
    assert [each["name"] for each in copied["steps"]] == ["build"]
    assert command("--rest") == ["one", "two"]
    assert command("--rest") == []
    (package / "_C.so.so").unlink()
    assert command("--rest") == ["build"]
    assert command() == ["build", "one", "two"]
