"""Plan how a tensor moves between two layouts, without any process group, and print or draw the plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..base import checks
from ..base.checks import read_json
from ..base.progress import Progress, track
from ..errors import LayoutError
from ..layout import Layout
from ..pages.page import write_plan_page
from ..planning.plan import BALANCES, STRATEGIES, Plan, plan
from ..planning.show import time_text
from ..topology import Topology
from ._values import PICTURES, named, output_file

T = TypeVar("T")

_TOPOLOGY_OPTIONS: dict[str, Any] = {
    "ranks_per_host": 8,
    "nic_gbps": 10.0,
    "nics_per_host": 1,
    "local_gbps": 80.0,
    "latency_us": 20.0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`."""
    parser.add_argument(
        "--shape", required=True, metavar="N,N,...", help="sizes of the tensor; '' for a scalar"
    )
    parser.add_argument("--dtype", required=True, help="torch dtype by name: float32, bfloat16, int32, ...")
    parser.add_argument(
        "--src",
        required=True,
        metavar="LAYOUT",
        help="source: mesh, @ first rank, : a placement for each mesh dimension, e.g. "
        "2x4:Shard(0),Replicate(); or S and R for each tensor dimension, e.g. 2x4:S0RR, where mesh "
        'dimension 0 shards tensor dimension 0; or boxes by rank, e.g. {"0": [[[0, 4], [0, 8]]]}',
    )
    parser.add_argument(
        "--dst", required=True, metavar="LAYOUT", help="destination, e.g. 3x4@8:Shard(0),Replicate()"
    )
    group = parser.add_argument_group("topology")
    group.add_argument(
        "--topology", type=Path, metavar="FILE", help="JSON of Topology.to_json; excludes the options below"
    )
    group.add_argument(
        "--ranks-per-host", metavar="N", help="consecutive ranks that share a host (default 8)"
    )
    group.add_argument("--nic-gbps", metavar="RATE", help="Gbit/s of each NIC and direction (default 10)")
    group.add_argument("--nics-per-host", metavar="N", help="NICs of a host (default 1)")
    group.add_argument(
        "--local-gbps", metavar="RATE", help="Gbit/s of a rank to its neighbours on the host (default 80)"
    )
    group.add_argument(
        "--latency-us", metavar="TIME", help="fixed cost of a hop in microseconds (default 20)"
    )
    group = parser.add_argument_group("planning")
    group.add_argument("--strategy", default="auto", help=f"{', '.join(STRATEGIES)} (default auto)")
    group.add_argument(
        "--balance", default="greedy", help=f"of broadcast: {', '.join(BALANCES)} (default greedy)"
    )
    group.add_argument(
        "--chunk-bytes", metavar="N", help="pipelining grain (default: chosen by the cost model)"
    )
    group.add_argument("--seed", default="0", metavar="N", help="of the random rounds of greedy (default 0)")
    group = parser.add_argument_group("output")
    group.add_argument("--draw", type=Path, metavar="FILE", help="write the timeline as .png, .svg or .pdf")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with hosts, NICs and chunks on their way"
    )
    group.add_argument("--json", action="store_true", help="print the plan as JSON instead of text")
    group.add_argument(
        "--compare",
        action="store_true",
        help="print every strategy's makespan instead of one plan, as JSON with --json",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan."""
    output_file("--draw", arguments.draw, PICTURES)
    output_file("--html", arguments.html)
    if arguments.compare:
        chosen = {
            "--strategy": arguments.strategy != "auto",
            "--draw": arguments.draw,
            "--html": arguments.html,
        }
        for option in (each for each, given in chosen.items() if given):
            raise LayoutError(f"{option}: not allowed with --compare, which prints a table of all strategies")
    with named("--shape"):
        shape = _read_shape(arguments.shape)
    with named("--dtype"):
        dtype = checks.dtype(arguments.dtype)
    layouts = []
    for name in ("--src", "--dst"):
        with named(name):
            layout = _read_layout(getattr(arguments, name[2:]))
            layout.shards(shape)
            layouts.append(layout)
    topology = _read_topology(arguments)
    with named("--strategy"):
        strategy = checks.choice("value", arguments.strategy, STRATEGIES)
    with named("--balance"):
        balance = checks.choice("value", arguments.balance, BALANCES)
    with named("--chunk-bytes"):
        chunk_bytes = None if arguments.chunk_bytes is None else _read_number(arguments.chunk_bytes, int)
        if chunk_bytes is not None:
            checks.integer("value", chunk_bytes, 1, checks.MAX_INT64)
    with named("--seed"):
        seed = checks.integer("value", _read_number(arguments.seed, int), 0, (1 << 64) - 1)

    def made(strategy: str) -> Plan:
        return plan(shape, dtype, layouts[0], layouts[1], topology, strategy, balance, chunk_bytes, seed)

    if arguments.compare:
        print(_compare(made, arguments.json))
        return 0
    with Progress("planning"):
        result = made(strategy)
    if arguments.draw is not None:
        with named("--draw"), Progress("drawing"):
            result.draw(arguments.draw)
    if arguments.html is not None:
        with named("--html"), Progress("writing the page"):
            write_plan_page(result, arguments.html)
    print(result.to_json() if arguments.json else result.describe())
    return 0


def _read_layout(text: str) -> Layout:
    """The notation, or JSON of boxes by rank: {"0": [[[0, 4], [0, 8]]], ...}."""
    if not text.lstrip().startswith("{"):
        return Layout.parse(text)
    boxes = read_json(text, "layout")
    ranks = {_read_number(rank, int): listed for rank, listed in boxes.items()}
    return Layout.from_boxes(ranks)


def _read_shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",") if text.strip() else []
    if not all(size.strip().isascii() and size.strip().isdigit() and len(size) < 25 for size in sizes):
        raise LayoutError(
            f"{checks.shown(text)}: expected sizes with commas between them, for example 1024,1024,512"
        )
    return checks.shape(int(size) for size in sizes)


def _read_number(text: str, kind: Callable[[str], T]) -> T:
    try:
        if len(text) > 30:
            raise ValueError
        return kind(text)
    except ValueError:
        raise LayoutError(
            f"{checks.shown(text)}: expected {'an integer' if kind is int else 'a number'}"
        ) from None


def _read_topology(arguments: argparse.Namespace) -> Topology:
    given = {
        name: getattr(arguments, name) for name in _TOPOLOGY_OPTIONS if getattr(arguments, name) is not None
    }
    if arguments.topology is not None:
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise LayoutError(f"{option}: not allowed with --topology, which sets it")
        with named("--topology"):
            return Topology.from_json(arguments.topology)
    values = dict(_TOPOLOGY_OPTIONS)
    for name, text in given.items():
        with named(f"--{name.replace('_', '-')}"):
            values[name] = _read_number(text, type(_TOPOLOGY_OPTIONS[name]))
            Topology.uniform(**{**_TOPOLOGY_OPTIONS, name: values[name]})
    return Topology.uniform(**values)


def _compare(made: Callable[[str], Plan], as_json: bool) -> str:
    """A table of all strategies, best first. Those that this pair of layouts rules out say why."""
    rows, refused = [], {}
    for strategy in track(STRATEGIES[1:], "strategies"):
        try:
            rows.append(made(strategy))
        except LayoutError as error:
            refused[strategy] = str(error)
    rows.sort(key=lambda row: row.makespan)
    if as_json:
        figures = [
            {"strategy": row.strategy, "makespan": row.makespan, "lower_bound": row.lower_bound}
            for row in rows
        ]
        return json.dumps({"strategies": figures, "refused": refused}, indent=2)
    lines = [f"{'strategy':<18} {'makespan':>10}  x lower bound"]
    lines += [f"{row.strategy:<18} {time_text(row.makespan):>10}  {row.ratio:.3f}" for row in rows]
    if rows:
        lines.append(f"{'lower bound':<18} {time_text(rows[0].lower_bound):>10}  1")
    return "\n".join([*lines, *(f"{strategy:<18} {why}" for strategy, why in refused.items())])
