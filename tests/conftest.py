"""What every test, and every process that a test starts, has in common."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest

# torch's store looks up the name of each address it connects to, and where no name server answers that takes
# seconds, which tests with short deadlines do not have. No query is sent with this (see resolv.conf(5));
# all addresses of the tests are loopback's.
os.environ["RES_OPTIONS"] = "attempts:0"

# nohup, and shells for what they start in the background, have signals ignored, and every process that is
# started inherits that. Tests of how ranks end need them as in a terminal. A handler is not inherited,
# and keeps pytest itself as it was.
for _signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, lambda *_: None)

_TESTS = Path(__file__).parent
# Files of few tests that take long, since they wait. Where files run side by side none should be left for the
# end, when the other processors have nothing to do any more.
_FIRST = ("fault", "packaging", "multiproc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of _FIRST in their order, then the others; the order inside a folder stays."""

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(_TESTS).parts[0]
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=turn)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, by folder, after a run of more than a minute."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.split("::")[0].rpartition("/")[0]
                seconds[folder] += report.duration
                tests[folder].add(report.nodeid)
    if sum(seconds.values()) < 60:
        return
    terminalreporter.section("seconds by folder")
    for folder in sorted(seconds, key=lambda each: -seconds[each]):
        terminalreporter.write_line(f"{seconds[folder]:7.1f}  {len(tests[folder]):5d} tests  {folder}")
