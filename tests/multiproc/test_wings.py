"""The wings (tuning, the elastic launcher, integrations, pages, the command line and benchmarks) are imported
by those who use them, not by the core; see cases_wings.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

WINGS = ("tuning", "elastic", "integrations", "pages", "cli", "bench")
MOST_MODULES = 74  # lower it as modules are merged


@pytest.fixture(scope="module")
def world() -> WorldResult:
    result = run_world(Path(__file__).with_name("cases_wings.py"), 2)
    result.check("modules")
    result.check_ends()
    return result


def test_pipelines_say_what_they_are(world: WorldResult) -> None:
    world.check("pipelines_say_what_they_are")


@pytest.mark.parametrize("rank", range(2))
def test_the_core_imports_no_wing(world: WorldResult, rank: int) -> None:
    imported = world.value("modules", rank)
    assert "meshcast.resharding.reshard" in imported
    assert [name for name in imported if name.split(".")[1:2] and name.split(".")[1] in WINGS] == []


@pytest.mark.parametrize("rank", range(2))
def test_the_core_is_few_modules(world: WorldResult, rank: int) -> None:
    imported = world.value("modules", rank)
    assert len(imported) <= MOST_MODULES, "\n".join(imported)
