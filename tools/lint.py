"""Runs every style and static check and reports all failures, not only the first.

python tools/lint.py [--jobs N] [--only NAME ...]

"analyzer", which takes minutes, runs only where it is named: `make analyze` does.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh", ".cmake"}  # of files with a limit of lines
WARN_LINES = 700
MAX_LINES = 800
# clang-tidy reads only what needs no torch: torch's headers take it a minute per file.
TORCH_FREE = (ROOT / "csrc" / "core", ROOT / "csrc" / "ucx")


def run(command: list[str | Path]) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def file_sizes() -> tuple[int, str]:
    """A file is a concept, of 300 to 700 lines as a rule. One above 700 is printed, and 800 is the limit, for
    tests as well."""
    lines = []
    for name in run(["git", "ls-files", "--cached", "--others", "--exclude-standard"])[1].splitlines():
        path = ROOT / name
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        if (count := path.read_bytes().count(b"\n")) > WARN_LINES:
            lines.append((count, name))
    long = f" (above {WARN_LINES}: is it one concept?)"
    too_long = f", the limit is {MAX_LINES}: split it where an interface is narrow"
    texts = (
        f"{name}: {count} lines{too_long if count > MAX_LINES else long}"
        for count, name in sorted(lines, reverse=True)
    )
    return int(any(count > MAX_LINES for count, _ in lines)), "\n".join(texts)


def cpp_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for folder in ("csrc", "tests/cpp", "tests/simulation")
        for suffix in ("*.h", "*.cpp", "*.cu", "*.cuh")
        for path in (ROOT / folder).rglob(suffix)
    )


def clang_tidy(jobs: int, analyzer: bool) -> tuple[int, str]:
    """Over the sources of each folder together, as a build compiles them: their headers are read once.
    Clang's analyzer looks at functions of the file itself alone: with it each source has its own command."""
    build = ROOT / "build" / ("analyze" if analyzer else "lint")
    unity = f"-DMESHCAST_UNITY={'OFF' if analyzer else 'ON'}"
    configure: list[str | Path] = ["cmake", "-S", ROOT, "-B", build, unity]
    configure += ["-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON", f"-DPython_EXECUTABLE={BIN / 'python'}"]
    status, output = run(configure)
    if status != 0:
        return status, output
    entries = json.loads((build / "compile_commands.json").read_text())
    sources = {entry["file"]: torch_free(entry["file"]) for entry in entries}
    read = {source for its in sources.values() for source in its}
    if read != (there := {path for folder in TORCH_FREE for path in folder.rglob("*.cpp")}):
        missing = ", ".join(str(path.relative_to(ROOT)) for path in sorted(there - read))
        return 1, f"{build / 'compile_commands.json'} does not compile {missing}\n"
    # The wheel of clang-tidy lacks headers such as stddef.h: lend it those of the compiler.
    words = next(entry["command"] for entry in entries).split()
    compiler = next(word for word in words if "ccache" not in word)
    _, own_headers = run([compiler, "-print-file-name=include"])
    command: list[str | Path] = [BIN / "clang-tidy", "-p", build, "--quiet", "--use-color=0"]
    command.append(f"--extra-arg=-isystem{own_headers.strip()}")
    command.append("--extra-arg=-Wno-unknown-warning-option")  # options meant for GCC
    if not analyzer:
        command.append("--checks=-clang-analyzer-*,-bugprone-suspicious-include")  # the sources themselves
    with ThreadPoolExecutor(jobs) as pool:
        files = sorted(file for file, its in sources.items() if its)
        results = list(pool.map(lambda file: run([*command, file]), files))
    output = "".join(text for status, text in results if status != 0)
    return max(status for status, _ in results), output


def torch_free(file: str) -> list[Path]:
    """Of the sources that a file of the build stands for, itself or what it includes: those without torch."""
    path = Path(file)
    included = re.findall(r'^#include "(.+\.cpp)"', path.read_text(), re.MULTILINE)
    return [
        source
        for source in ([Path(each) for each in included] or [path])
        if any(source.is_relative_to(folder) for folder in TORCH_FREE)
    ]


def checks(jobs: int) -> dict[str, Callable[[], tuple[int, str]]]:
    return {
        "file size": file_sizes,
        "docstrings": lambda: run([sys.executable, "tools/check_docs.py", "docstrings"]),
        "layers": lambda: run([sys.executable, "tools/check_layers.py"]),
        "docs width": lambda: run([sys.executable, "tools/check_docs.py", "width"]),
        "words": lambda: run([sys.executable, "tools/check_docs.py", "words"]),
        "ruff check": lambda: run([BIN / "ruff", "check", "."]),
        "ruff format": lambda: run([BIN / "ruff", "format", "--check", "."]),
        "mypy": lambda: run([sys.executable, "-m", "mypy"]),
        "clang-format": lambda: run([BIN / "clang-format", "--dry-run", "-Werror", *cpp_files()]),
        "clang-tidy": lambda: clang_tidy(jobs, analyzer=False),
        "analyzer": lambda: clang_tidy(jobs, analyzer=True),
    }


DEFAULT = [name for name in checks(1) if name != "analyzer"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="parallel clang-tidy processes")
    parser.add_argument("--only", nargs="+", choices=list(checks(1)), help="run these checks only")
    args = parser.parse_args()
    failed = []
    for name, check in checks(args.jobs).items():
        if name not in (args.only or DEFAULT):
            continue
        start = time.monotonic()
        status, output = check()
        print(f"{name}: {'ok' if status == 0 else 'FAILED'} ({time.monotonic() - start:.1f} s)", flush=True)
        if output and (status != 0 or name in ("file size", "layers")):
            print(output, end="" if output.endswith("\n") else "\n", flush=True)
        if status != 0:
            failed.append(name)
    print(f"lint: {'all checks passed' if not failed else 'failed: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
