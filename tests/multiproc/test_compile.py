"""reshard as an operator and under torch.compile; see cases_compile.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(330)

MODULE = Path(__file__).with_name("cases_compile.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WorldResult:
    # The compiler's cache outlives runs; one that was killed while it wrote leaves kernels that crash.
    cache = str(tmp_path_factory.mktemp("inductor"))
    env = {"COMPILER": request.param, "TORCHINDUCTOR_CACHE_DIR": cache}
    return run_world(MODULE, 3, limit=300.0, env=env)


@pytest.mark.parametrize("case", CASES)
def test_compiled(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
