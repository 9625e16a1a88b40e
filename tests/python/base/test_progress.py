"""What takes long says how far it is, on stderr alone: a bar on a terminal, lines in a file, nothing where it
is soon over."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from meshcast import cli
from meshcast.base import progress
from meshcast.base.progress import Progress, seconds_text, track
from meshcast.pipelining import simulate

MODULE = Path(progress.__file__)
LEFT = re.compile(r"(\d+) of (\d+), (.*?) s, about (.*?) left\n")
# Loaded by its path, as `doctor` does: importing torch takes longer than all of this.
START = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("progress", {str(MODULE)!r})
progress = importlib.util.module_from_spec(spec)
sys.modules["progress"] = progress
spec.loader.exec_module(progress)
fast = lambda: 40 * time.monotonic()
"""
# Four things, each of which takes 0.2 s, or 8 s of a fast clock.
LONG = """
with progress.Progress("things", 4, clock=fast) as shown:
    for each in range(4):
        time.sleep(0.2)
        print("out", each, "x" * 100, flush=True)
        shown.done()
    sys.stdout.write("end")
"""
OUT = "".join(f"out {each} {'x' * 100}\n" for each in range(4)) + "end"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def lines_of(seconds: list[float], **options) -> list[str]:
    """What is shown of things that take so long, one after the other."""
    clock, stream = Clock(), io.StringIO()
    with Progress("things", len(seconds), stream=stream, clock=clock, ticks=False, **options) as shown:
        for each in seconds:
            clock.now += each
            shown.done()
    return stream.getvalue().splitlines()


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    lines = lines_of([3.0] * 40)
    assert lines[0] == "things: 1 of 40, 3 s, about 117 s left"
    at = [int(re.search(r"(\d+) of 40", line)[1]) * 3 for line in lines]
    assert min(later - earlier for earlier, later in pairwise(at)) >= 10
    assert 120 / 13 <= len(lines) <= 120 / 10


@pytest.mark.parametrize("seconds", [[0.1] * 19, [], [1.9]])
def test_what_is_soon_over_shows_nothing(seconds: list[float]) -> None:
    assert lines_of(seconds) == []


def test_the_time_left_is_what_the_rest_takes() -> None:
    """Things of different length, as benchmarks have: after a third, within a third of the truth."""
    seconds = [2.0 + (7 * each) % 5 for each in range(60)]
    for line in lines_of(seconds):
        done = int(re.search(r"(\d+) of", line)[1])
        left = re.search(r"about (.*) left", line)[1]
        minutes = re.match(r"(\d+) min (\d+) s", left)
        found = 60 * int(minutes[1]) + int(minutes[2]) if minutes else int(left.removesuffix(" s"))
        if done >= 20:
            assert abs(found - sum(seconds[done:])) <= 1 + sum(seconds[done:]) / 3


def test_the_time_left_does_not_end_before_the_thing_that_takes_long() -> None:
    clock = Clock()
    with Progress("things", 3, stream=io.StringIO(), clock=clock, ticks=False) as shown:
        clock.now += 4.0
        assert shown.text() == "0 of 3, 4 s"
        shown.done()
        assert shown.text() == "1 of 3, 4 s, about 8 s left"
        clock.now += 3.0
        assert shown.text() == "1 of 3, 7 s, about 5 s left"
        clock.now += 30.0  # the second one takes much longer than the first: the third may still take 4 s
        assert shown.text() == "1 of 3, 37 s, about 4 s left"
        shown.done(2)
        assert shown.text() == "3 of 3, 37 s, about 0 s left"
        shown.at(1, 2, "others")  # another part of the work: what the first one took does not count
        clock.now += 1.0
        assert shown.text() == "1 of 2, 1 s, about 0 s left"


def test_without_a_total_the_time_so_far_is_shown() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("planning", stream=stream, clock=clock, ticks=False) as shown:
        clock.now += 200.0
        shown.look()
    assert stream.getvalue() == "planning: 3 min 20 s\n"
    assert [seconds_text(each) for each in (0.4, 119.4, 120, 7500)] == [
        "0 s",
        "119 s",
        "2 min 0 s",
        "2 h 5 min",
    ]


def test_a_single_thing_tells_how_far_it_is() -> None:
    clock = Clock()
    with Progress("simulating", stream=io.StringIO(), clock=clock, ticks=False) as shown:
        assert shown.text() == "0 s"
        clock.now += 10.0
        progress.tell(0.25)
        assert shown.text() == "25 %, 10 s, about 30 s left"
        progress.tell(0.1)  # no step back
        assert shown.text() == "25 %, 10 s, about 30 s left"
    with Progress("things", 4, stream=io.StringIO(), clock=clock, ticks=False) as shown:
        progress.tell(0.5)  # one of many: those are counted
        assert shown.text() == "0 of 4, 0 s"


def test_a_simulation_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(sys.modules["meshcast.pipelining.simulate"], "_REPORTED", 10)
    with Progress("simulating", stream=io.StringIO(), ticks=False) as shown:
        monkeypatch.setattr(shown, "part", told.append)
        simulate("1F1B", 3, 8, transfer=0.5)
    assert len(told) > 5
    assert told == sorted(told)
    assert 0.4 < told[0] < 0.6 and 0.9 < told[-1] <= 1.0


def test_one_rank_speaks_and_one_thing_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert lines_of([3.0] * 5) == []
    assert len(lines_of([3.0] * 5, here=True)) == 2
    monkeypatch.setenv("RANK", "0")
    assert len(lines_of([3.0] * 5)) == 2
    with Progress("all", stream=io.StringIO(), ticks=False):
        assert lines_of([3.0] * 5) == []
    with pytest.raises(ZeroDivisionError), Progress("all", stream=io.StringIO(), ticks=False):
        raise ZeroDivisionError
    assert len(lines_of([3.0] * 5)) == 2


def run(
    program: str, *, out: int = subprocess.PIPE, err: int = subprocess.PIPE
) -> subprocess.CompletedProcess:
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", START + program],
        stdout=out,
        stderr=err,
        text=True,
        timeout=60,
        check=True,
        env=env,
    )


def on_terminal(program: str, *, both: bool) -> tuple[str, str]:
    """stdout, and what a terminal on stderr, or on both, has got."""
    ours, theirs = pty.openpty()
    done = run(program, out=theirs if both else subprocess.PIPE, err=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the end of a terminal
            break
        seen += piece
        if not piece:
            break
    os.close(ours)
    return done.stdout or "", seen.decode()


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return lines


def test_stdout_is_what_it_was() -> None:
    """In files; the thread shows that something goes on while one thing takes long."""
    done = run(LONG)
    assert done.stdout == OUT
    assert re.fullmatch(r"(things: \d of 4, \d+ s(, about \d+ s left)?\n){1,5}", done.stderr)
    slow = run('with progress.Progress("one", 2, clock=fast):\n    time.sleep(1.0)\nprint("end")')
    assert slow.stdout == "end\n"
    assert slow.stderr.startswith("one: 0 of 2, ")
    quick = run('for each in progress.track(range(3), "three"): print(each)')
    assert (quick.stdout, quick.stderr) == ("0\n1\n2\n", "")


def test_a_terminal_gets_a_bar() -> None:
    out, seen = on_terminal(LONG, both=False)
    assert out == OUT
    assert re.search(r"things \[=+ *\] [123] of 4, \d+ s, about \d+ s left", seen)
    assert "".join(screen(seen)) == ""  # nothing is left of it
    _, quick = on_terminal('for each in progress.track(range(3), "three"): pass', both=False)
    assert quick == ""


def test_what_is_printed_stays_above_the_bar() -> None:
    """Bar and output on one terminal: all lines are whole, and the bar is gone in the end."""
    _, seen = on_terminal(LONG, both=True)
    assert "of 4" in seen
    assert "\n".join(screen(seen)).rstrip("\n") == OUT


def test_a_terminal_without_a_bar_gets_lines() -> None:
    out, seen = on_terminal("import os; os.environ['TERM'] = 'dumb'\n" + LONG, both=False)
    assert out == OUT
    assert re.fullmatch(r"(things: \d of 4, \d+ s(, about \d+ s left)?\r\n){1,5}", seen)


COMMANDS = {
    "plan": "--shape 64,64 --dtype float32 --src 2:S0R --dst 2@2:RS0 --ranks-per-host 2",
    "plan --compare": "--shape 64,64 --dtype float32 --src 2:S0R --dst 2@2:RS0 --ranks-per-host 2",
    "simulate": "--stages 3 --microbatches 4",
    "simulate --compare": "--stages 3 --microbatches 4",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_what_they_did(command: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each of them took long."""
    words = [*command.split(), *COMMANDS[command].split()]
    assert cli.main(words) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_TICK", 0.001)
    look = Progress.__exit__

    def at_the_end(self: Progress, *raised) -> None:
        self.look()
        look(self, *raised)

    monkeypatch.setattr(Progress, "__exit__", at_the_end)
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out == quiet.out
    assert re.fullmatch(r"((planning|strategies|simulating|schedules): .*\n)+", shown.err)


def test_items_of_unknown_number() -> None:
    assert list(track((each for each in range(3)), "each", ticks=False)) == [0, 1, 2]
