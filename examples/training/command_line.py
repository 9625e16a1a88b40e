"""How a program says no: one line from one rank and exit status 2, before anything starts.

Imports no torch: a wrong command line is answered in well under a second.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from training.layout import ConfigError, nearest_name

RANK_0_SPEAKS = 60.0  # seconds that the other ranks leave it; torchrun ends them in a tenth of one


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit, which every rank would do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, argv: list[str]) -> argparse.Namespace:  # type: ignore[override]
        args, unknown = self.parse_known_args(argv)
        if unknown:
            wrong = next((each for each in unknown if each.startswith("--")), None)
            if wrong is None:
                raise ConfigError(f"{' '.join(unknown)}: belongs to no option")
            name = wrong.partition("=")[0]
            likely = nearest_name(name, (each for each in self._option_string_actions if each != "-h"))
            raise ConfigError(f"{name}: no such option; use {likely}, or see --help")
        return args


def check_name(option: str, value: str, names: Collection[str]) -> None:
    """Raise ConfigError unless --option is one of the names."""
    if value not in names:
        likely = nearest_name(value, names)
        raise ConfigError(f"--{option} {value}: unknown; use {likely} (of {', '.join(names)})")


def check_writable(name: str, path: Path | None, kind: str) -> None:
    """Raise ConfigError where a file or folder of that path cannot be written: not only after hours."""
    if path is None:
        return
    if path.exists() and path.is_dir() != (kind == "folder"):
        raise ConfigError(f"--{name} {path}: is no {kind}; name another path")
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if (there != path.absolute() and not there.is_dir()) or not os.access(there, os.W_OK):
        raise ConfigError(f"--{name} {path}: cannot be written below {there}; name a {kind} elsewhere")


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Turn a ConfigError, which all ranks meet alike, into one line on stderr and exit status 2."""
    try:
        yield
    except ConfigError as error:
        # torchrun ends all ranks when the first one exits, so the others leave rank 0 the time to speak. If
        # they are still there then, rank 0 has not met this error: they are on a host that lacks something.
        if int(os.environ.get("RANK", "0")) != 0:
            time.sleep(RANK_0_SPEAKS)
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(str(error))
        sys.exit(2)


def _tell_torchrun(why: str) -> None:
    """As the root cause, which it names below what it has to say itself."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        cause = {"message": why, "extraInfo": {"py_callstack": why, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": cause}))
