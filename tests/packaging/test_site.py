"""`make docs`: the site builds without a warning, needs no network, and its index has every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 500  # seconds; it takes about 12 on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 50)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages."""
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="needs requirements-docs.txt, which make test-all installs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "tools" / "build_docs.sh", folder], env=os.environ | {"PY": sys.executable}, timeout=LIMIT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "html"


def inventory(site: Path) -> dict[str, str]:
    """{name: page} of the Python names in objects.inv."""
    whole = (site / "objects.inv").read_bytes()
    head, _, body = whole.partition(b"# The remainder of this file is compressed")
    assert head.startswith(b"# Sphinx inventory version 2")
    lines = zlib.decompress(body.partition(b"\n")[2]).decode().splitlines()
    found = (re.fullmatch(r"(\S+) py:\w+ -?\d+ (\S+) .*", line) for line in lines)
    return {each[1]: each[2].partition("#")[0] for each in found if each}


def test_every_public_name_is_in_the_index(site: Path) -> None:
    names = inventory(site)
    for module in ("meshcast", "meshcast.pipelining"):
        for name in importlib.import_module(module).__all__:
            page = names.get(f"{module}.{name}", "")
            assert page.startswith("docs/reference/") and (site / page).is_file(), f"{name}: {page!r}"


def test_plug_ins_are_in_the_index(site: Path) -> None:
    """Also those whose packages are not installed."""
    names = inventory(site)
    for name in ("megatron.MeshcastCopyService", "torchft.MeshcastTransport", "vllm.MeshcastTrainerEngine"):
        assert f"meshcast.integrations.{name}" in names


def test_links_between_pages_hold(site: Path) -> None:
    """Those to files and to places in them, as somebody follows them who has opened a page from a file."""
    anchors: dict[Path, set[str]] = {}
    for page in site.rglob("*.html"):
        for target in re.findall(r'<(?:a|img|link|script)\b[^>]*? (?:href|src)="([^"]+)"', page.read_text()):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            other = (page.parent / path.partition("?")[0]).resolve() if path else page
            assert other.is_file(), f"{page.relative_to(site)} links to {target}"
            if anchor and other.suffix == ".html":
                known = anchors.get(other) or set(re.findall(r'\bid="([^"]+)"', other.read_text()))
                anchors[other] = known
                assert anchor in known, f"{page.relative_to(site)} links to {target}"


def test_first_page_leads_to_the_pages(site: Path) -> None:
    (page,) = re.findall(r'url=([^"]+)"', (site / "index.html").read_text())
    assert (site / page).is_file()
