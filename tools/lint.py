"""Runs every style and static check and reports all failures, not only the first.

python tools/lint.py [--jobs N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BUILD = ROOT / "build" / "lint"
# clang-tidy reads only what needs no torch: torch's headers take it a minute per file.
TORCH_FREE = (ROOT / "csrc" / "core", ROOT / "csrc" / "ucx")


def run(command: list[str | Path]) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def cpp_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for folder in ("csrc", "tests/cpp")
        for suffix in ("*.h", "*.cpp", "*.cu", "*.cuh")
        for path in (ROOT / folder).rglob(suffix)
    )


def clang_tidy(jobs: int) -> tuple[int, str]:
    # A build compiles the files of a folder together; here each has its own command.
    status, output = run(
        ["cmake", "-S", ROOT, "-B", BUILD, "-DMESHCAST_UNITY=OFF", f"-DPython_EXECUTABLE={BIN / 'python'}"]
    )
    if status != 0:
        return status, output
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    files = sorted(
        entry["file"]
        for entry in entries
        if any(Path(entry["file"]).is_relative_to(folder) for folder in TORCH_FREE)
    )
    if not files:
        return 1, "no torch-free source in build/lint/compile_commands.json\n"
    # The wheel of clang-tidy lacks headers such as stddef.h: lend it those of the compiler.
    words = next(entry["command"] for entry in entries).split()
    compiler = next(word for word in words if "ccache" not in word)
    _, own_headers = run([compiler, "-print-file-name=include"])
    command: list[str | Path] = [BIN / "clang-tidy", "-p", BUILD, "--quiet", "--use-color=0"]
    command.append(f"--extra-arg=-isystem{own_headers.strip()}")
    command.append("--extra-arg=-Wno-unknown-warning-option")  # options meant for GCC
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda file: run([*command, file]), files))
    output = "".join(text for status, text in results if status != 0)
    return max(status for status, _ in results), output


def checks(jobs: int) -> dict[str, Callable[[], tuple[int, str]]]:
    return {
        "file size": lambda: run([sys.executable, "tools/check_file_size.py"]),
        "layers": lambda: run([sys.executable, "tools/check_layers.py"]),
        "docs width": lambda: run([sys.executable, "tools/check_docs.py"]),
        "ruff check": lambda: run([BIN / "ruff", "check", "."]),
        "ruff format": lambda: run([BIN / "ruff", "format", "--check", "."]),
        "mypy": lambda: run([sys.executable, "-m", "mypy"]),
        "clang-format": lambda: run([BIN / "clang-format", "--dry-run", "-Werror", *cpp_files()]),
        "clang-tidy": lambda: clang_tidy(jobs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="parallel clang-tidy processes")
    parser.add_argument("--only", nargs="+", choices=list(checks(1)), help="run these checks only")
    args = parser.parse_args()
    failed = []
    for name, check in checks(args.jobs).items():
        if args.only and name not in args.only:
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
