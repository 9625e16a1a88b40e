"""Says whether version, changelog, documents, tag and wheels of a release agree; twine reads metadata alone.

python tools/release_check.py [--wheels dist/wheels] [--tree PATH]

Prints a line for each, and exits with 1 where one is wrong. Nothing is changed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RELEASE = re.compile(r"^\d+\.\d+\.\d+$")


class WrongError(Exception):
    """What does not agree, and what to do."""


def version_of(tree: Path) -> str:
    text = (tree / "python" / "meshcast" / "_version.py").read_text()
    found = re.search(r'__version__ = "(.*)"', text)
    if not found or not RELEASE.match(found[1]):
        raise WrongError(
            f"_version.py has {found[1] if found else 'no version'!r}, expected major.minor.patch"
        )
    return found[1]


def check_changelog(tree: Path, version: str) -> str:
    """Its first section that has a release is this one, with a date, and nothing waits above it."""
    sections = re.split(r"^## ", (tree / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    bodies = {head.strip(): body.strip() for head, _, body in (each.partition("\n") for each in sections)}
    waiting = bodies.pop("Unreleased", "")
    if waiting:
        raise WrongError(
            f"CHANGELOG.md: {len(waiting.splitlines())} lines are under Unreleased; move them to {version}"
        )
    head, body = next(iter(bodies.items()), ("no section", ""))
    name, _, date = head.partition(" - ")
    if name != version:
        raise WrongError(f"CHANGELOG.md begins with {name!r}, expected {version!r}")
    if not body:
        raise WrongError(f"CHANGELOG.md says nothing of {version}")
    try:
        when = datetime.date.fromisoformat(date)
    except ValueError:
        raise WrongError(f"CHANGELOG.md: {head!r} has no date; write '## {version} - YYYY-MM-DD'") from None
    if when > datetime.date.today():
        raise WrongError(f"CHANGELOG.md: {version} is dated {when}, which is to come")
    return f"{version} of {when}"


def check_documents(tree: Path, version: str) -> str:
    """Where the version is written out."""
    named = re.findall(r"Version (\d+\.\d+\.\d+)", (tree / "docs" / "limitations.md").read_text())
    if named != [version]:
        raise WrongError(f"docs/limitations.md names {', '.join(named) or 'no version'}, expected {version}")
    minor = version.rpartition(".")[0]
    status = re.findall(r"Status: (\d+\.\d+)", (tree / "README.md").read_text())
    if status != [minor]:
        raise WrongError(f"README.md has status {', '.join(status) or 'of no version'}, expected {minor}")
    return "docs/limitations.md and README.md name it"


def check_tag(tree: Path, version: str) -> str:
    """The tag of this version is what is checked out, and nothing else is."""
    if changed := git(tree, "status", "--porcelain", "--untracked-files=no"):
        raise WrongError(f"{len(changed.splitlines())} files differ from the commit; commit or restore them")
    here = git(tree, "rev-parse", "HEAD")
    tagged = git(tree, "rev-parse", "--verify", "--quiet", f"v{version}^{{commit}}")
    if not tagged:
        raise WrongError(f"there is no tag v{version}; git tag -a v{version}")
    if tagged != here:
        raise WrongError(f"tag v{version} is at {tagged[:9]}, and {here[:9]} is checked out")
    return f"v{version} is at {here[:9]}"


def git(tree: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", tree, *command], check=False, capture_output=True, text=True)
    return done.stdout.strip()


def check_wheels(folder: Path, version: str) -> str:
    """Each is of this version, in its name and inside."""
    wheels = sorted(folder.glob("meshcast-*.whl"))
    if not wheels:
        raise WrongError(f"no wheels in {folder}; make wheels")
    for wheel in wheels:
        named = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            inside = re.search(r"^Version: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
        found = {named, inside[1] if inside else "none"}
        if any(each.partition("+")[0] != version for each in found):
            raise WrongError(
                f"{wheel.name} is of {' and '.join(sorted(found))}, expected {version}; make wheels"
            )
    return f"{len(wheels)} of {version}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=None, help="default dist/wheels of the tree")
    parser.add_argument("--tree", type=Path, default=ROOT, help="default this one")
    options = parser.parse_args()
    tree = options.tree
    try:
        version = version_of(tree)
    except WrongError as wrong:
        print(f"version    WRONG: {wrong}")
        return 1
    print(f"version    {version}")
    checks: dict[str, Callable[[], str]] = {
        "changelog": lambda: check_changelog(tree, version),
        "documents": lambda: check_documents(tree, version),
        "tag": lambda: check_tag(tree, version),
        "wheels": lambda: check_wheels(options.wheels or tree / "dist" / "wheels", version),
    }
    bad = 0
    for name, check in checks.items():
        try:
            said = check()
        except WrongError as wrong:
            said, bad = f"WRONG: {wrong}", bad + 1
        print(f"{name:10} {said}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
