"""Command line: `python -m meshcast <command>`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from .._version import __version__
from ..base import checks
from ..errors import LayoutError, MeshcastError

_PROGRAM = "python -m meshcast"
# Module and its purpose. The module has NAME_arguments(parser) and run_NAME(arguments).
COMMANDS = {
    "plan": ("plan", "plan the transfer of a tensor between two layouts and print it"),
    "bench": ("bench", "measure reshard cases on the ranks that torchrun started"),
    "simulate": ("schedules", "simulate a pipeline schedule, or compare all of them"),
    "timeline": ("schedules", "draw the traces of a pipeline step"),
    "dump": ("records", "ask the ranks of a running job on this host for their flight records"),
    "explain": ("records", "explain a stuck or failed job from the flight records of its ranks"),
    "doctor": ("doctor", "print versions, backends, devices and what will not work here, and why"),
}


class _Parser(argparse.ArgumentParser):
    """Bad input is one line on stderr and exit status 2, without the usage text around it."""

    def error(self, message: str) -> NoReturn:
        raise LayoutError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    program = _PROGRAM
    try:
        if not argv:
            _general().print_help()
            return 0
        if argv[0] not in COMMANDS and not argv[0].startswith("-"):
            meant = get_close_matches(argv[0], COMMANDS, 1)
            remedy = f"is {meant[0]} meant?" if meant else f"choose one of {', '.join(COMMANDS)}"
            raise LayoutError(f"there is no command {checks.shown(argv[0])}; {remedy}")
        if argv[0] not in COMMANDS:
            _general().parse_args(argv)
        program = f"{_PROGRAM} {argv[0]}"
        arguments = parser_of(argv[0]).parse_args(argv[1:])
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except LayoutError as error:
        return _complain(program, error, 2)
    except MeshcastError as error:
        return _complain(program, error, 1)
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # of stdout: the disk is full, for one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _complain(program, LayoutError(f"cannot write the output: {error.strerror}"), 1)
    return status


def _general() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    text = f"Cross-mesh resharding of tensors. Commands:\n{rows}\nEach explains its options with --help."
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=_PROGRAM, description=text, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"meshcast {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="|".join(COMMANDS))
    return parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, whose `run` is what runs it."""
    module = importlib.import_module(f".{COMMANDS[command][0]}", __name__)
    run = getattr(module, f"run_{command}")
    parser = _Parser(prog=f"{_PROGRAM} {command}", description=inspect.getdoc(run), allow_abbrev=False)
    getattr(module, f"{command}_arguments")(parser)
    parser.set_defaults(run=run)
    return parser


def _complain(program: str, error: Exception, status: int) -> int:
    print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
