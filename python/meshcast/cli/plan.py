"""The command `plan`."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base import checks
from ..base.checks import read_json
from ..base.progress import Progress, track
from ..errors import LayoutError
from ..layout import Layout
from ..pages.page import write_plan_page
from ..planning.plan import BALANCES, STRATEGIES, Plan, plan
from ..planning.show import time_text
from ..topology import Topology
from .arguments import PICTURES, choice, named, number, output, reads, writes

_TOPOLOGY: dict[str, Any] = {
    "ranks_per_host": 8,
    "nic_gbps": 10.0,
    "nics_per_host": 1,
    "local_gbps": 80.0,
    "latency_us": 20.0,
}


_LAYOUTS = (
    "A LAYOUT is a mesh, @ and its first rank if that is not 0, and after a colon DTensor's placement "
    "for each dimension of the mesh: Shard(d), Replicate(), Partial(), Partial(max), _StridedShard(d, "
    "split_factor=n). Or, shorter, a letter for each dimension of the tensor: R is not sharded, S has "
    "the mesh dimensions that shard it. 2x4:S1R is 2x4:Replicate(),Shard(0): mesh dimension 1 shards "
    'tensor dimension 0. Or the boxes of each rank as JSON: {"0": [[[0, 4], [0, 8]]]}. Quote what has '
    "brackets, for the shell."
)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    required: Any = functools.partial(parser.add_argument, required=True)
    required("--shape", type=_shape, metavar="N,N,...", help="sizes of the tensor; '' for a scalar")
    required("--dtype", type=_dtype, help="torch dtype by name: float32 or fp32, bfloat16 or bf16, ...")
    parser.epilog = _LAYOUTS
    source, destination = (
        "source, e.g. 2x4:Shard(0),Replicate()",
        "destination, e.g. 3x4@8:Shard(0),Replicate()",
    )
    for option, text in (("--src", source), ("--dst", destination)):
        required(option, type=_layout, metavar="LAYOUT", help=text)
    add = parser.add_argument_group("topology").add_argument
    text = "JSON of Topology.to_json; excludes the options below"
    add("--topology", type=Path, metavar="FILE", help=text)
    for name, metavar, text in (
        ("ranks_per_host", "N", "consecutive ranks that share a host (default 8)"),
        ("nic_gbps", "RATE", "Gbit/s of each NIC and direction (default 10)"),
        ("nics_per_host", "N", "NICs of a host (default 1)"),
        ("local_gbps", "RATE", "Gbit/s of a rank to its neighbours on the host (default 80)"),
        ("latency_us", "TIME", "fixed cost of a hop in microseconds (default 20)"),
    ):
        add(_option(name), type=_topology_part(name), metavar=metavar, help=text)
    add = parser.add_argument_group("planning").add_argument
    for option, allowed, default, of in (
        ("--strategy", STRATEGIES, "auto", ""),
        ("--balance", BALANCES, "greedy", "of broadcast: "),
    ):
        text = f"{of}{', '.join(allowed)} (default {default})"
        add(option, type=choice(allowed), default=default, help=text)
    text = "pipelining grain (default: chosen by the cost model)"
    add("--chunk-bytes", type=_integer(1, checks.MAX_INT64), metavar="N", help=text)
    text = "of the random rounds of greedy (default 0)"
    add("--seed", type=_integer(0, (1 << 64) - 1), default=0, metavar="N", help=text)
    add = parser.add_argument_group("output").add_argument
    text = "write the timeline as .png, .svg or .pdf"
    add("--draw", type=output(PICTURES), metavar="FILE", help=text)
    text = "write a page with hosts, NICs and chunks in flight"
    add("--html", type=output(), metavar="FILE", help=text)
    add("--json", action="store_true", help="print the plan as JSON instead of text")
    text = "print every strategy's makespan instead of one plan, as JSON with --json"
    add("--compare", action="store_true", help=text)


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan how a tensor moves between two layouts, without any process group, and print or draw the plan."""
    if arguments.compare:
        chosen = {
            "--strategy": arguments.strategy != "auto",
            "--draw": arguments.draw,
            "--html": arguments.html,
        }
        for option in (each for each, given in chosen.items() if given):
            raise LayoutError(
                f"{option}: not allowed with --compare, which prints a table of all strategies; choose one "
                "of them and plan again without --compare"
            )
    shape, src, dst = arguments.shape, arguments.src, arguments.dst
    for option, layout in (("--src", src), ("--dst", dst)):
        with named(option):
            layout.shards(shape)
    given = {name: getattr(arguments, name) for name in _TOPOLOGY if getattr(arguments, name) is not None}
    if arguments.topology is None:
        topology = Topology.uniform(**{**_TOPOLOGY, **given})
    elif given:
        raise LayoutError(f"{_option(next(iter(given)))}: not allowed with --topology, which sets it")
    else:
        with named("--topology"):
            topology = Topology.from_json(arguments.topology)

    def made(strategy: str) -> Plan:
        options = strategy, arguments.balance, arguments.chunk_bytes, arguments.seed
        return plan(shape, arguments.dtype, src, dst, topology, *options)

    if arguments.compare:
        print(_compare(made, arguments.json))
        return 0
    with Progress("planning"):
        result = made(arguments.strategy)
    if arguments.draw is not None:
        with writes("--draw", arguments.draw), Progress("drawing"):
            result.draw(arguments.draw)
    if arguments.html is not None:
        with writes("--html", arguments.html), Progress("writing the page"):
            write_plan_page(result, arguments.html)
    print(result.to_json() if arguments.json else result.describe())
    return 0


@reads
def _layout(text: str) -> Layout:
    """Reads the notation, or JSON of boxes by rank: {"0": [[[0, 4], [0, 8]]], ...}."""
    if not text.lstrip().startswith("{"):
        return Layout.parse(text)
    boxes = read_json(text, "layout")
    return Layout.from_boxes({number(rank, int): listed for rank, listed in boxes.items()})


@reads
def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",") if text.strip() else []
    if not all(size.strip().isascii() and size.strip().isdigit() and len(size) < 25 for size in sizes):
        raise LayoutError(
            f"{checks.shown(text)}: expected sizes with commas between them, for example 1024,1024,512"
        )
    return checks.shape(int(size) for size in sizes)


_dtype = reads(checks.dtype)


def _integer(least: int, most: int) -> Callable[[str], int]:
    return reads(lambda text: checks.integer("value", number(text, int), least, most))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _topology_part(name: str) -> Callable[[str], Any]:
    """Returns the type of an argument of Topology.uniform."""

    def read(text: str) -> Any:
        value = number(text, type(_TOPOLOGY[name]))
        Topology.uniform(**{**_TOPOLOGY, name: value})
        return value

    return reads(read)


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
