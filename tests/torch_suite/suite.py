"""PyTorch's own suite of torch.distributed under a backend of choice.

    python tests/torch_suite/suite.py                     both backends, both debug modes, a table of counts
    python tests/torch_suite/suite.py --one gloo NAME ...  some tests, one backend, a JSON line for each

The suite (torch.testing._internal.distributed.distributed_test) asks for the name of its backend in many
places. GATES are those where "gloo" has to read "gloo or meshcast", where it looks for profiler ranges,
which gloo itself records whichever backend it runs in, and where torch calls every backend that it does not
know "custom". Nothing else of the suite is changed. The processes of a test are forked from one that has
already imported torch, not spawned: that saves most of the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
import unittest
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "torch.testing._internal.distributed.distributed_test"
WORLD_SIZE = 3
TEST_LIMIT = 120  # seconds for one test, after which its processes are ended and it counts as failed
BACKENDS = ("gloo", "meshcast")
MODES = ("OFF", "DETAIL")  # of TORCH_DISTRIBUTED_DEBUG

# What is replaced in the text of the suite: pattern, replacement, what it decides.
GATES = (
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "meshcast")', "tests that run for gloo only"),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "meshcast")', "DDP hooks on CPU models"),
    (
        r'@require_backend_is_available\(\{"gloo"\}\)',
        '@require_backend_is_available({"gloo", "meshcast"})',
        "sparse and coalesced collectives, complex numbers, DDP without GPUs",
    ),
    (
        r"(    dist\.Backend\.GLOO,\n)",
        r'\1    "meshcast",\n',
        "sets of backends with profiler ranges",
    ),
    (
        r"dist\.get_backend\(\) \+ profiling_title_postfix",
        '"gloo" + profiling_title_postfix',
        "names of profiler ranges",
    ),
    (r"\{dist\.get_backend\(\)\}:", "gloo:", "names of profiler ranges"),
    (
        r'(get\("backend_name"\), )dist\.get_backend\(group_id\)',
        r'\1"custom"',
        "what DDP's log calls a backend from outside torch",
    ),
)
# The same for sets of common_distributed.DistTestCases.backend_feature.
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")


def load(backend: str) -> types.ModuleType:
    """The suite for the backend, its gates opened. A gate that the text does not have is an error."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(WORLD_SIZE), INIT_METHOD="env://")
    from torch.testing._internal.common_distributed import DistTestCases

    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    if backend == "meshcast":
        import meshcast  # noqa: F401  registers the backend

        for feature in FEATURES:
            DistTestCases.backend_feature[feature].add(backend)
        for pattern, replacement, what in GATES:
            text, count = re.subn(pattern, replacement, text)
            assert count > 0, f"the suite of this torch has no gate for {what}: {pattern}"
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def suite_class(backend: str) -> type[unittest.TestCase]:
    """All tests of the suite, each in WORLD_SIZE processes."""
    module = load(backend)
    import torch

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()

    return Suite


class Outcomes(unittest.TestResult):
    """Prints a line for each test as it ends."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  unittest's name
        super().startTest(test)
        self.begin = time.monotonic()

    def tell(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self.begin, 2)
        line = {"test": name, "outcome": outcome, "reason": reason[-6000:], "seconds": seconds}
        print(RESULT + json.dumps(line), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.tell(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.tell(test, "skipped", reason)

    def addFailure(self, test, err) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
        self.tell(test, "failed", self._exc_info_to_string(err, test))

    def addError(self, test, err) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
        self.tell(test, "failed", self._exc_info_to_string(err, test))


RESULT = "RESULT "  # begins a line about a test, among all else that the suite prints


def run_one(backend: str, names: list[str]) -> None:
    Suite = suite_class(backend)
    for name in names or unittest.TestLoader().getTestCaseNames(Suite):
        Suite(name).run(Outcomes())


def names_of_piece(piece: int, pieces: int) -> list[str]:
    """Every pieces-th test of the suite: neighbours take alike long."""
    done = subprocess.run(
        [sys.executable, __file__, "--list"], env=_environment("OFF"), stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.decode().splitlines()[-1])[piece::pieces]


def _environment(mode: str) -> dict[str, str]:
    env = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": mode, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TEST_LIMIT)
    env["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), env.get("PYTHONPATH", "")])
    env.pop("MASTER_PORT", None)
    return env


def run(backend: str, mode: str, names: list[str], limit: float) -> dict[str, dict]:
    """Those tests in a process of their own: name -> outcome, reason, seconds. A test that did not end, and
    all after it, are missing."""
    command = [sys.executable, __file__, "--one", backend, *names]
    done = subprocess.run(
        command,
        env=_environment(mode),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=limit,
        check=False,
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    found = [json.loads(line[len(RESULT) :]) for line in lines if line.startswith(RESULT)]
    return {line["test"]: line for line in found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", choices=BACKENDS, help="run under this backend only, here")
    parser.add_argument("--list", action="store_true", help="print the names of all tests")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("names", nargs="*", help="tests, by default all")
    args = parser.parse_args()
    if args.list:
        print(json.dumps(unittest.TestLoader().getTestCaseNames(suite_class("gloo"))))
        return 0
    if args.one:
        run_one(args.one, args.names)
        return 0
    names = args.names or names_of_piece(0, 1)
    worse = []
    print(f"{'debug':8}{'backend':10}{'passed':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for mode in args.modes:
        both = {}
        for backend in BACKENDS:
            begin = time.monotonic()
            both[backend] = found = run(backend, mode, names, 3600)
            counts = Counter(line["outcome"] for line in found.values())
            counts["failed"] += len(names) - len(found)
            shown = "".join(f"{counts[k]:>{w}}" for k, w in (("passed", 8), ("skipped", 9), ("failed", 8)))
            print(f"{mode:8}{backend:10}{shown}{time.monotonic() - begin:>9.0f}", flush=True)
            for line in found.values():
                if line["outcome"] == "failed":
                    print(f"  {line['test']}: {_cause(line['reason'])}", flush=True)
        worse += [(mode, name) for name in regressions(both["gloo"], both["meshcast"], names)]
    return 1 if worse else 0


def _cause(traceback: str) -> str:
    """The last line of it that names an exception."""
    lines = [line for line in traceback.splitlines() if re.match(r"\w[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else traceback[:200]


def regressions(gloo: dict[str, dict], meshcast: dict[str, dict], names: list[str]) -> list[str]:
    """Tests that gloo passes and meshcast does not, and those that fail or do not end under meshcast only."""
    out = []
    for name in names:
        ours = meshcast.get(name, {"outcome": "did not end", "reason": ""})
        theirs = gloo.get(name, {"outcome": "did not end"})["outcome"]
        lost = theirs == "passed" and ours["outcome"] != "passed"
        worse = theirs == "skipped" and ours["outcome"] not in ("passed", "skipped")
        if lost or worse:
            out.append(f"{name}: {theirs} under gloo, {ours['outcome']} under meshcast: {ours['reason']}")
    return out


if __name__ == "__main__":
    sys.exit(main())
