"""How long plans take to make, and what the cost model predicts, up to 16,384 ranks, and for the weights of
models that go from their trainer to their replicas, tensor by tensor, in published shapes.

Nothing is sent: the figures of the plans are predictions of the simulation, those of the planner are
measured. Times are processor time (user and system) of one core, so that they hold on a busy machine, too.
Memory is the peak of what a process of its own has beyond what it had before the plan.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from meshcast import Layout, Topology
from meshcast.base import checks
from meshcast.base.progress import Progress
from meshcast.planning.plan import Options, Plan, Problem
from torch.distributed.tensor import Replicate, Shard

from .harness import Found, Page, in_child, machine, parser, save, table


class Fleet(NamedTuple):
    """Where a mixture of experts is trained and where it is served. Experts are shared out over `experts`
    ranks on either side."""

    trainer: int  # ranks; each expert is cut by FSDP over trainer / experts of them, all else over all
    inference: int  # ranks; experts are replicated inference / experts times
    experts: int = 32
    tensor_parallel: int = 8  # attention and shared experts at inference


PER_HOST = 8
_RANKS = (64, 512, 4096, 16384)  # of both meshes together
_SHAPE = (1 << 14, 1 << 15)  # bfloat16: 1 GiB
_REPEATS = 3
_FAST_NICS = Topology.uniform(PER_HOST, 400, nics_per_host=PER_HOST)
_HOSTS = "8 ranks a host, which copy at 80 Gbit/s among themselves, and a NIC of 400 Gbit/s for each"
MULTICASTS = f"Multicasts in bfloat16: {_HOSTS}"
MIXTURES = (
    "Weights of Kimi K2, a mixture of 384 experts with a trillion parameters, bfloat16 cast to fp8 before it "
    "travels. Trained with 32 ranks of expert parallel, each expert cut by FSDP over the others, all else by "
    "FSDP over all; served by replicas of expert parallel 32, attention tensor parallel 8: " + _HOSTS
)
FLEETS = (Fleet(256, 128), Fleet(96, 160), Fleet(512, 256), Fleet(1024, 1024))
# Measured by their authors, on their machines; beside predictions the order of magnitude is what compares.
_ARTICLE = "https://research.perplexity.ai/articles/weight-transfer-for-rl-post-training-in-under-2-seconds"
PUBLISHED = f"""\
| what others measured | seconds |
|---|---:|
| Kimi K2, bfloat16 on 256 GPUs to fp8 on 128, RDMA writes by a static schedule \
([Perplexity]({_ARTICLE})) | 1.3 |
| Kimi K2, fp8, to 256 H20 in tensor parallel 16, broadcast \
([checkpoint-engine](https://github.com/MoonshotAI/checkpoint-engine)) | 16.04 |
| Kimi K2 to thousands of GPUs (the same) | about 20 |"""
WEIGHTS = (
    "Weights of a 70B Llama in bfloat16, from FSDP over 512 ranks to 64 replicas of tensor parallel 8: "
    + _HOSTS
)

COPIES = "1 GiB in bfloat16, one rank to replicas on all other hosts: how fast ranks of a host copy"

CAPTIONS = {"weights": WEIGHTS, "multicasts": MULTICASTS, "copies": COPIES, "mixtures": MIXTURES}


def llama(layers: int = 80) -> dict[str, list[Problem]]:
    """Tensors of a Llama of 70 billion parameters, and all of them, from FSDP over 512 ranks to 64 replicas
    of tensor parallel 8."""
    src = Layout(list(range(512)), [Shard(0)])
    hosts = [list(range(first, first + PER_HOST)) for first in range(512, 1024, PER_HOST)]
    rows, columns, whole = (Layout(hosts, [Replicate(), each]) for each in (Shard(0), Shard(1), Replicate()))

    def tensor(*shape: int, dst: Layout) -> Problem:
        return Problem(shape, torch.bfloat16, src, dst)

    query, key, gate = (tensor(n, 8192, dst=rows) for n in (8192, 1024, 28672))
    out, down = (tensor(8192, n, dst=columns) for n in (8192, 28672))
    norm, embedding = tensor(8192, dst=whole), tensor(128256, 8192, dst=rows)
    layer = [query, key, key, out, gate, gate, down, norm, norm]
    batch = layers * layer + [embedding, embedding, norm]
    return {
        "8192 x 8192 to Shard(0)": [query], "8192 x 8192 to Shard(1)": [out],
        "8192 x 28672 to Shard(1)": [down], "8192, replicated": [norm],
        "128256 x 8192 to Shard(0)": [embedding],
        f"all {len(batch)} tensors, one plan": batch,
    }  # fmt: skip


def mixture(fleet: Fleet, layers: int = 61) -> list[Problem]:
    """All tensors of Kimi K2, a mixture of 384 experts with a trillion parameters, trained in bfloat16 and
    cast to fp8 before they travel. Routed experts of a layer are one tensor, as trainers keep them.

    Shapes are those of its config.json: hidden 7168, 61 layers of which the first is dense, 64 heads, ranks
    1536 and 512 of the query and the key and value projections."""
    hidden, inner, dense, heads, vocabulary, experts = 7168, 2048, 18432, 64, 163840, 384
    query_rank, key_rank, nope, rope, value = 1536, 512, 128, 64, 128
    trainer = list(range(fleet.trainer))
    ranks = list(range(fleet.trainer, fleet.trainer + fleet.inference))

    def rows_of(all_ranks: list[int], length: int) -> list[list[int]]:
        return [all_ranks[first : first + length] for first in range(0, len(all_ranks), length)]

    sharded = Layout(trainer, [Shard(0)])
    parallel = rows_of(ranks, fleet.tensor_parallel)
    rows, columns = (Layout(parallel, [Replicate(), Shard(d)]) for d in (0, 1))
    whole = Layout(ranks, [Replicate()])
    cut = Layout(rows_of(trainer, fleet.experts), [Shard(1), Shard(0)])
    served = Layout(rows_of(ranks, fleet.experts), [Replicate(), Shard(0)])

    def tensor(*shape: int, dst: Layout, src: Layout = sharded) -> Problem:
        return Problem(shape, torch.float8_e4m3fn if len(shape) > 1 else torch.bfloat16, src, dst)

    def mlp(n: int) -> list[Problem]:
        up = tensor(n, hidden, dst=rows)
        return [up, up, tensor(hidden, n, dst=columns)]

    norm = tensor(hidden, dst=whole)
    attention = [
        tensor(query_rank, hidden, dst=whole),
        tensor(query_rank, dst=whole),
        tensor(heads * (nope + rope), query_rank, dst=rows),
        tensor(key_rank + rope, hidden, dst=whole),
        tensor(key_rank, dst=whole),
        tensor(heads * (nope + value), key_rank, dst=rows),
        tensor(hidden, heads * value, dst=columns),
        norm,
        norm,
    ]
    up = tensor(experts, inner, hidden, src=cut, dst=served)
    down = tensor(experts, hidden, inner, src=cut, dst=served)
    router = [tensor(experts, hidden, dst=whole), tensor(experts, dst=whole)]
    embedding = tensor(vocabulary, hidden, dst=rows)
    layer = attention + router + mlp(inner) + [up, up, down]
    return [embedding, *attention, *mlp(dense), *((layers - 1) * layer), norm, embedding]


def kinds(ranks: int) -> dict[str, tuple[Layout, Layout]]:
    """Between the two halves of the ranks, rows of 8."""
    rows = [list(range(first, first + PER_HOST)) for first in range(0, ranks, PER_HOST)]
    one, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return {
        "rows of 8 to columns of 8, all hosts replicas": (
            Layout(one, [Replicate(), Shard(0)]), Layout(other, [Replicate(), Shard(1)]),
        ),
        "cut over all ranks to rows per host, replicas inside": (
            Layout(one, [Shard(0), Shard(1)]), Layout(other, [Shard(0), Replicate()]),
        ),
        "one rank to replicas on all others": (
            Layout([0], [Replicate()]), Layout(list(range(PER_HOST, ranks)), [Replicate()]),
        ),
    }  # fmt: skip


def multicasts() -> dict[str, tuple[int, Problem]]:
    """Where NICs are faster than copies inside hosts: how many ranks, and the problem."""

    def replicas(first: int, ranks: int) -> Layout:
        return Layout(list(range(first, first + ranks)), [Replicate()])

    rows = Layout(list(range(128)), [Shard(0)])
    one = Problem((1 << 16, 1 << 16), torch.bfloat16, replicas(0, 1), replicas(PER_HOST, 64))
    many = Problem((8192, 8192), torch.bfloat16, rows, replicas(128, 128))
    return {
        "65536 x 65536, one rank to 64 replicas": (65, one),
        "8192 x 8192, Shard(0) over 128 to 128 replicas": (256, many),
    }


def copies() -> dict[str, Topology]:
    """Slower than a NIC takes in, and faster."""
    return {
        "copies at 80 Gbit/s, a NIC of 400 for each rank": Topology.uniform(
            PER_HOST, 400, nics_per_host=PER_HOST
        ),
        "copies at 1,600 Gbit/s, a NIC of 100 for each host": Topology.uniform(
            PER_HOST, 100, local_gbps=1600
        ),
    }


def measure_copies(ranks: int, kind: str, topology: Topology) -> Found:
    layouts = kinds(ranks)["one rank to replicas on all others"]
    return _row(ranks, kind, [Problem(_SHAPE, torch.bfloat16, *layouts)], topology, 1)


def measure(ranks: int, kind: str, src: Layout, dst: Layout) -> Found:
    problem = Problem(_SHAPE, torch.bfloat16, src, dst)
    return _row(ranks, kind, [problem], Topology.uniform(PER_HOST, 100), _REPEATS)


def measure_fast_nics(kind: str, problems: list[Problem], ranks: int = 1024) -> Found:
    return _row(ranks, kind, problems, _FAST_NICS, _REPEATS if len(problems) == 1 else 1)


def measure_mixture(fleet: Fleet) -> Found:
    problems = mixture(fleet)
    kind = f"{fleet.trainer} to {fleet.inference}, all {len(problems)} tensors, one plan"
    return measure_fast_nics(kind, problems, fleet.trainer + fleet.inference)


def _row(ranks: int, kind: str, problems: list[Problem], topology: Topology, repeats: int) -> Found:
    seconds = []
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    for _ in range(repeats):
        start = time.process_time()  # below the cache of plans
        made = Plan(problems, topology, Options())
        seconds.append(time.process_time() - start)
    return {
        "ranks": ranks, "kind": kind, "plan_seconds": statistics.median(seconds),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "strategy": made.strategy, "tasks": len(made.tasks), "hops": len(made), "predicted": made.makespan,
        "lower_bound": made.lower_bound, "filling_bound": made.filling_bound,
    }  # fmt: skip


def tables(rows: list[Found]) -> str:
    columns = "ranks|layouts|plan, ms|MiB|strategy|tasks|hops|predicted, ms|predicted / bound|with filling"
    lines = []
    for row in rows:
        memory = row.get("peak_bytes")  # results of before have none
        filling = row.get("filling_bound", row["lower_bound"])
        lines.append(
            [
                str(row["ranks"]), row["kind"], f"{1e3 * row['plan_seconds']:.3g}",
                "-" if memory is None else format(memory / 2**20, ".0f"), row["strategy"], str(row["tasks"]),
                str(row["hops"]), f"{1e3 * row['predicted']:.4g}",
                f"{row['predicted'] / row['lower_bound']:.3f}", f"{row['predicted'] / filling:.3f}",
            ]
        )  # fmt: skip
    return table(columns.split("|"), lines, "rlrrlr")


def main() -> int:
    options = parser("planner", __doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=_RANKS, help="of both meshes together")
    options.add_argument("--only", default="", help="only rows whose layouts have this in their name")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    if any(ranks < 2 * PER_HOST or ranks % (2 * PER_HOST) for ranks in args.ranks):
        options.error(f"--ranks: multiples of {2 * PER_HOST}")
    measures: dict[str, list[tuple[Any, ...]]] = {
        "rows": [
            (kind, measure, ranks, kind, *layouts)
            for ranks in args.ranks
            for kind, layouts in kinds(ranks).items()
        ],
        "weights": [(kind, measure_fast_nics, kind, problems) for kind, problems in llama().items()],
        "multicasts": [
            (kind, measure_fast_nics, kind, [each], ranks) for kind, (ranks, each) in multicasts().items()
        ],
        "copies": [
            (kind, measure_copies, ranks, kind, topology)
            for kind, topology in copies().items()
            for ranks in args.ranks
        ],
        "mixtures": [(f"{fleet.trainer} to {fleet.inference}", measure_mixture, fleet) for fleet in FLEETS],
    }
    chosen = {name: [call for call in calls if args.only in call[0]] for name, calls in measures.items()}
    results: dict[str, list[Found]] = {name: [] for name in chosen}
    with Progress("plans", sum(map(len, chosen.values())), ticks=False) as shown:
        for name, calls in chosen.items():
            for call in calls:
                row = in_child(call[1], *call[2:], name=call[0], look=shown.look)
                results[name].append(row)
                print(f"{row['ranks']} ranks, {row['kind']}: {row['plan_seconds']:.2f} s", file=sys.stderr)
                shown.done()
    print("# predictions of the cost model, nothing was sent")
    for name, caption in {"rows": "8 ranks and 100 Gbit/s per host, 1 GiB", **CAPTIONS}.items():
        if results[name]:
            print(f"\n# {caption}\n{tables(results[name])}")
    print(f"\n{PUBLISHED}")
    if args.out:
        save(args.out, {"header": machine("planner")} | results)
    return 0


_GIB = 1 << 30
_LIMITS = (None, 32 * _GIB, 8 * _GIB, 2 * _GIB)  # bytes in flight


def cut_windows(batch: list[Problem], limit: int | None) -> list[tuple[Problem, ...]]:
    """In order, as reshard_state_dict cuts them: a larger tensor goes alone."""
    found: list[list[Problem]] = [[]]
    total = 0
    for problem in batch:
        size = checks.total_bytes(problem.shape, problem.dtype)
        if found[-1] and limit is not None and total + size > limit:
            found.append([])
            total = 0
        found[-1].append(problem)
        total += size
    return [tuple(each) for each in found]


def measure_windows(batch: list[Problem], limit: int | None, bound: float | None) -> Found:
    """bound: of the whole, seconds; None where this is the whole."""
    plans: dict[tuple[int, ...], Plan] = {}  # tensors that are alike are one object
    seconds, start = 0.0, time.process_time()
    cut = cut_windows(batch, limit)
    for window in cut:
        key = tuple(map(id, window))
        if key not in plans:
            plans[key] = Plan(list(window), _FAST_NICS, Options())
        seconds += plans[key].makespan
    whole = next(iter(plans.values())).lower_bound if bound is None else bound
    return {
        "limit": limit, "windows": len(cut), "distinct": len(plans), "predicted": seconds, "bound": whole,
        "plan_seconds": time.process_time() - start,
    }  # fmt: skip


def windows_text(results: Found) -> str:
    lines = [
        [
            "all" if row["limit"] is None else f"{row['limit'] / _GIB:g} GiB", str(row["windows"]),
            str(row["distinct"]), f"{row['predicted']:.4f}", f"{row['predicted'] / row['bound']:.4f}",
            f"{row['plan_seconds']:.1f}",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    columns = "bytes in flight|windows|distinct plans|predicted, s|/ bound of the whole|to plan, s"
    return f"`python -m benchmarks windows`, one core:\n\n{table(columns.split('|'), lines, 'r')}"


WINDOWS = Page("windows", "windows.json", "docs/planner.md", windows_text)
PAGES = [WINDOWS]


def windows() -> int:
    """What it costs to move a state dict in windows of so many bytes, each with a plan of its own
    (max_bytes_in_flight), by the planner's predictions. All tensors of a Llama of 70 billion parameters, from
    512 ranks to 512; a quarter of a minute, one core. Writes benchmarks/results/windows.json and the table of
    docs/planner.md."""
    args = WINDOWS.parser(windows.__doc__).parse_args()
    batch = list(llama().values())[-1]
    rows = [measure_windows(batch, None, None)]
    rows += [measure_windows(batch, limit, rows[0]["bound"]) for limit in _LIMITS[1:]]
    results = {**machine("windows"), "rows": rows}
    print(windows_text(results))
    WINDOWS.finish(args, results)
    return 0
