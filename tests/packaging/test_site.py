"""`make docs`: the site builds without a warning, needs no network, and its index has every public name."""

from __future__ import annotations

import importlib
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
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-d", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, timeout=LIMIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "html"


def test_the_gallery_is_written(site: Path) -> None:
    names = {path.name for path in (site / "gallery").iterdir()}
    assert {"case-1.html", "case-9.html", "weights-512.html", "recorded-gpt.html"} <= names


def test_a_page_that_needs_a_network_is_found(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs requirements-docs.txt, which make test-all installs")
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    import meshcast_site

    (tmp_path / "good.html").write_text('<a href="https://a.b">a</a><script src="from_files.js"></script>')
    assert meshcast_site.fetched(tmp_path) == []
    (tmp_path / "bad.html").write_text('<script defer src="https://cdn.a.b/c.js"></script>')
    (tmp_path / "bad.css").write_text('@import "//a.b/c.css"; p { background: url(http://a.b/d.png) }')
    assert meshcast_site.fetched(tmp_path) == [
        'bad.css: @import "//a.b/c.css"',
        "bad.css: url(http://a.b/d.png",
        'bad.html: <script defer src="https://cdn.a.b/c.js"',
    ]


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
