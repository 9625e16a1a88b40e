"""What a first call imports, see cases_receivers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(150)


def test_receivers_import_nothing_slow() -> None:
    world = run_world(Path(__file__).with_name("cases_receivers.py"), 3, bare=True)
    world.check("nothing_slow_is_imported")
    world.check_ends()
