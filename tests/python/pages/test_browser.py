"""The pages in headless Chromium: the slider moves, figures are those of the plan, and no script fails.

They run where there is a `chromium`, of the distribution for example; elsewhere they say that there is none.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import meshcast
import pytest
from meshcast import Layout, Plan, Topology
from meshcast.pages.page import panel_of, write_plan_page, write_timeline_page
from meshcast.pipelining import simulate
from meshcast.pipelining.trace import Timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium on this machine: Debian and Ubuntu have a package of that name"
    ),
]


class Dom(dict):
    """What a page says of itself: the data- attributes of its body. text: all of the page as it stands."""

    text: str


def opened(page: Path, fragment: str = "", *, milliseconds: int = 0) -> Dom:
    """The page after it was opened, and so much of its own time has passed."""
    assert CHROMIUM is not None
    budget = [f"--virtual-time-budget={milliseconds}"] if milliseconds else []
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1200", *budget]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"{page.as_uri()}#{fragment}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body is not None, done.stderr
    dom = Dom((name, html.unescape(value)) for name, value in re.findall(r'data-([\w-]+)="([^"]*)"', body[1]))
    dom.text = done.stdout
    assert "errors" not in dom, dom["errors"]
    return dom


@pytest.fixture(scope="module")
def plan() -> Plan:
    src, dst = Layout.parse("2x4:S0RR"), Layout.parse("3x4@8:S0RR")
    return meshcast.plan((512, 512, 64), "int32", src, dst, Topology.uniform(4, 10, nics_per_host=2))


@pytest.fixture(scope="module")
def plan_page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    write_plan_page(plan, path)
    return path


@pytest.mark.parametrize("part", [0.0, 0.25, 0.6, 1.0])
def test_the_slider_moves_time(plan: Plan, plan_page: Path, part: float) -> None:
    hops = json.loads(plan.to_json())["result"]["hops"]
    dom = opened(plan_page, f"t={part}")
    now = float(dom["time"])
    assert now == pytest.approx(part * plan.makespan * 1e9)
    spans = list(zip(hops["start_ns"], hops["finish_ns"], strict=True))
    assert int(dom["flying"]) == sum(start <= now < finish for start, finish in spans)


def test_the_figures_are_those_of_the_plan(plan: Plan, plan_page: Path) -> None:
    dom = opened(plan_page)
    assert float(dom["makespan"]) == round(plan.makespan * 1e9)
    assert float(dom["bound"]) == round(plan.lower_bound * 1e9)
    assert int(dom["hops"]) == len(plan)
    carried = json.loads(dom["busy"])  # of each NIC: bytes out and in
    for host in range(5):
        assert tuple(map(sum, zip(*carried[2 * host : 2 * host + 2], strict=True))) == plan.nic_bytes(host)


def test_buttons(plan_page: Path) -> None:
    """Forward goes to the next begin of a hop, Back to the last one, Play moves time until it is over."""
    first, second = (
        float(opened(plan_page, f"t=0.5&click={names}")["time"]) for names in ("forth", "forth,forth")
    )
    middle = float(opened(plan_page, "t=0.5")["time"])
    assert middle < first < second
    assert float(opened(plan_page, "t=0.5&click=forth,forth,back")["time"]) == first
    played = opened(plan_page, "t=0&click=play", milliseconds=3000)
    assert 0.2 < float(played["time"]) / float(played["makespan"]) < 0.6  # 3 s of 10
    assert 'data-theme="dark"' in opened(plan_page, "theme=light&click=theme").text


def test_arrow_keys_move_time_by_a_hundredth(plan: Plan, plan_page: Path) -> None:
    whole = round(plan.makespan * 1e9)
    for keys, part in (
        ("ArrowRight", 0.51),
        ("ArrowLeft,ArrowDown", 0.48),
        ("PageUp", 0.6),
        ("ArrowUp", 0.51),
    ):
        dom = opened(plan_page, f"t=0.5&key={keys}")
        assert float(dom["time"]) == pytest.approx(part * whole, rel=1e-3)
    now = re.search(r'<output id="now"[^>]*>([^<]*)<', opened(plan_page, "t=0").text)
    assert now is not None
    assert re.fullmatch(r"at 0 us; all has arrived at [0-9.]+ ms", now[1])


@pytest.mark.parametrize("kind", ["plan", "schedules"])
def test_nothing_is_wider_than_a_telephone(kind: str, plan_page: Path, tmp_path: Path) -> None:
    """The body has 390 pixels, since a window may not be so narrow; tables scroll by themselves."""
    page = plan_page
    if kind == "schedules":
        page = tmp_path / "schedules.html"
        panels = [panel_of(Timeline.simulated("Eager1F1B " * 9, simulate("Eager1F1B", 4, 8), "units"))] * 3
        write_timeline_page(panels, "A" * 200, page, "word " * 50)
    script = (
        "<script>addEventListener('load', () => { document.body.dataset.wide = [...document.querySelectorAll("
        "'body *')].filter((one) => one.getBoundingClientRect().right > 391 && !one.closest('.scroll'))"
        ".map((one) => one.tagName).join(); document.body.dataset.broken = [...document.querySelectorAll('"
        ".pair > *, td.number, .figures td')].filter((one) => one.matches('td') ? linesOf(one) > 1 : "
        "Math.abs(middleOf(one) - middleOf(one.parentElement)) > 4).map((one) => one.textContent).join() });"
        "function linesOf(one) { const all = document.createRange(); all.selectNodeContents(one); return "
        "all.getClientRects().length; }"
        "function middleOf(one) { const box = one.getBoundingClientRect(); return box.top + box.height / 2; }"
        "</script></body>"
    )
    text = page.read_text().replace("</body>", script)
    page = tmp_path / "measured.html"
    page.write_text(text.replace("<body", '<body style="width: 390px; margin: 0"', 1))
    dom = opened(page)
    assert dom["wide"] == ""
    assert dom["broken"] == "", "a label stays beside its control, and a figure beside its unit"


def test_pointing_at_a_hop_says_what_it_is(plan: Plan, plan_page: Path) -> None:
    """At the middle of the chart's time, in the row that host 0's first NIC sends by."""
    height = 6 + 10 * 30 + 26  # ten NICs
    dom = opened(plan_page, f"point=1,0.5,{(6 + 5) / height}")
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div>', dom.text, re.DOTALL)
    assert tip is not None
    said = re.search(r"host 0 NIC 0 out.*\nrank (\d+) → rank (\d+): chunk (\d+)", html.unescape(tip[1]))
    assert said is not None, tip[1]
    hops = json.loads(plan.to_json())["result"]["hops"]
    assert tuple(map(int, said.groups())) in set(zip(hops["src"], hops["dst"], hops["chunk"], strict=True))
    assert int(said[1]) in (0, 2)  # of this NIC


def test_every_control_has_a_name_and_is_one_of_html(plan_page: Path) -> None:
    """So that keys reach and move it: buttons, a range and a select."""
    text = opened(plan_page).text
    labels = set(re.findall(r'<label for="(\w+)"', text))
    for kind, attributes, content in re.findall(r"<(button|input|select)\b([^>]*)>([^<]*)", text):
        name = re.search(r'id="(\w+)"', attributes)
        assert name is not None
        labelled = name[1] in labels or (kind == "button" and content.strip())
        assert labelled, f"{kind} {attributes}"
    assert "onclick" not in text
    assert not re.search(r'tabindex="-', text)


def test_schedules(tmp_path: Path) -> None:
    reports = [simulate(name, 4, 8, transfer=0.5) for name in ("GPipe", "1F1B", "Eager1F1B")]
    panels = [panel_of(Timeline.simulated(name, r)) for name, r in zip("abc", reports, strict=True)]
    write_timeline_page(panels, "Three schedules", tmp_path / "page.html")
    dom = opened(tmp_path / "page.html", "t=0.5&upper=1&lower=2")
    assert json.loads(dom["makespans"]) == [report.makespan for report in reports]
    # Both have one axis, which ends with the later one.
    now = 0.5 * max(report.makespan for report in reports[1:])
    expected = []
    for report in reports[1:]:
        for rank in range(4):
            working = [s for s in report.timeline if s.rank == rank and s.start <= now < s.end]
            expected.append(str(working[0].action) if working else "idle")
    assert [row[1].split(":")[0] for row in json.loads(dom["does"])] == expected
    opened(tmp_path / "page.html", "t=0.5&click=critical,theme,forth")
    assert "<li>paler" not in dom.text
    two = panel_of(Timeline.simulated("two stages on a rank", simulate("ZBV", 4, 4)))
    write_timeline_page([two], "Paler bars", tmp_path / "two.html")
    assert "<li>paler: a later stage of the rank</li>" in opened(tmp_path / "two.html").text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(plan_page: Path, theme: str) -> None:
    """Text and background are far enough from each other: 7 to 1, and 4.5 to 1 for what is less important."""
    assert f'data-theme="{theme}"' in opened(plan_page, f"theme={theme}").text
    style = (Path(meshcast.__file__).parent / "pages" / "page.css").read_text()
    block = style.split(':root[data-theme="dark"]')[1 if theme == "dark" else 0]
    value = dict(re.findall(r"--(\w+): (#\w{6})", block))
    assert contrast(value["fg"], value["bg"]) >= 7
    assert contrast(value["fg"], value["row"]) >= 7
    assert contrast(value["muted"], value["bg"]) >= 4.5
    assert contrast(value["muted"], value["row"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """By WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_many_hops(tmp_path: Path) -> None:
    """A hundred thousand of them are drawn as parts of the time that each NIC is busy."""
    src, dst = Layout.parse("16x16:S0S1R"), Layout.parse("8x32@256:S1S0R")
    big = meshcast.plan(
        (4096, 4096, 64), "int32", src, dst, Topology.uniform(8, 10), "send_recv", chunk_bytes=32768
    )
    assert len(big) > 100_000
    write_plan_page(big, tmp_path / "big.html")
    dom = opened(tmp_path / "big.html", "t=0.5")
    assert int(dom["hops"]) == len(big)
    assert f"{len(big)} hops are more than 20000" in dom.text
    assert float(dom["open-ms"]) > 0
