"""What `partition` proposes beside three obvious choices, each with its best schedule, measured and
simulated, on an emulated cluster of four hosts with two ranks each; compute timed by sleeps. Needs root and
iproute2.

Shapes and bytes of the models are measured on the meta device, times are counts of floating-point operations.
So the models may be large, and are the same everywhere. Writes the raw results, then the table of
docs/pipelining.md from them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Topology
from meshcast.pipelining import Layer, PipelineStage, Value, get_schedule_class, partition
from meshcast.tuning.candidates import best_of
from meshcast.tuning.partition import Evaluator, PlannedJob, _called, measured_layers
from meshcast.tuning.search import Cut, even, uses_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.flop_counter import FlopCounterMode

from ..cluster import Cluster, ClusterError, run_job
from ..harness import ROOT, Found, Page, command, machine, names, positive
from ..ranks import Report, Steps
from .stages import Clock, LayersStage, Part, loss_fn, parts_of, timed_step

sys.path.insert(0, str(ROOT / "examples"))

from gpt.config import MODELS as GPT_MODELS
from gpt.model import build_stage
from unet.config import MODELS as UNET_MODELS
from unet.model import UNetStage

RATE = 40e12  # floating-point operations per second
PLAN = {
    "layers.*.attention.qkv": ColwiseParallel(),
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}


def gpt(name: str, layers: int, samples: int, degrees: tuple[int, ...] = ()) -> list[Layer]:
    """A GPT of so many layers, embedding and head; attention and MLP shared by tensor-parallel ranks."""
    config = replace(GPT_MODELS[name], layers=layers)
    with torch.device("meta"):
        model = build_stage(config, 0, 1, seed=0)
        tokens = torch.zeros(samples, config.seq_len, dtype=torch.long)
    return _timed(model, (tokens,), degrees)


def unet(name: str, samples: int) -> list[Layer]:
    """A U-Transformer: 13 layers, skip connections between them."""
    config = UNET_MODELS[name]
    with torch.device("meta"):
        model = UNetStage(config, 0, 1, seed=0)
        image = torch.zeros(samples, config.image_channels, config.image, config.image)
        return _timed(model, (image, torch.zeros(samples), torch.zeros(samples, dtype=torch.long)), ())


def scaled(layers: list[Layer], seconds: float, nbytes: float) -> list[Layer]:
    """The same, with times and bytes multiplied. Values have their samples and one dimension of floats."""
    return [
        replace(
            _times(layer, seconds),
            parameters=round(layer.parameters * nbytes / 4) * 4,
            held=round(layer.held * nbytes),
            values=tuple(_scaled(value, nbytes) for value in layer.values),
            tensor={},
        )
        for layer in layers
    ]


def _times(layer: Layer, factor: float) -> Layer:
    inputs = None if layer.inputs is None else factor * layer.inputs
    return replace(layer, forward=factor * layer.forward, backward=factor * layer.backward, inputs=inputs)


def _scaled(value: Value, nbytes: float) -> Value:
    samples, *rest = value.shape
    floats = math.prod(rest) * value.dtype.itemsize / 4
    return Value((samples, max(1, round(floats * nbytes))), torch.float32, value.used_by)


def _timed(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], degrees: tuple[int, ...]
) -> list[Layer]:
    layers = measured_layers(model, example, None, degrees, PLAN if degrees else {})
    found = []
    for layer, call in zip(layers, _called(model, example, None), strict=True):
        with FlopCounterMode(display=False) as counter:
            call.module(*call.args, **call.kwargs)
        seconds = counter.get_total_flops() / RATE
        # Of a layer that is shared nearly all operations are.
        shared = {degree: _with(each, seconds / degree) for degree, each in layer.tensor.items()}
        found.append(replace(_with(layer, seconds), tensor=shared))
    return found


def _with(layer: Layer, forward: float) -> Layer:
    return replace(layer, forward=forward, backward=2 * forward, inputs=forward)


SAMPLES = 8  # of a micro-batch
GBIT, HOST_RANKS = 25.0, 2  # of the cluster that is emulated
_MOST_STAGES = 4
_PAYLOAD = 1448 / 1514  # of a link's rate: the rest are headers

MODELS = {
    "GPT, width 2048, 6 layers": lambda: gpt("1.3B", 6, SAMPLES),
    "U-Transformer 470M": lambda: unet("470M", SAMPLES),
}


@dataclass(frozen=True)
class Emulated:
    """Layers whose times are stretched and whose bytes are shrunk, so that compute and transfers keep their
    proportion on a slower network."""

    layers: list[Layer]
    topology: Topology
    stretch: float


def emulated(layers: list[Layer], forward: float, mbit: float) -> Emulated:
    """forward: seconds of a micro-batch through all layers. mbit: of a link of a host, each way."""
    stretch = forward / sum(layer.forward for layer in layers)
    nbytes = stretch * mbit * _PAYLOAD / 1e3 / GBIT
    topology = Topology.uniform(ranks_per_host=HOST_RANKS, nic_gbps=mbit * _PAYLOAD / 1e3)
    return Emulated(scaled(layers, stretch, nbytes), topology, stretch)


@dataclass(frozen=True)
class Choice:
    """name: of the choice; layers, ranks: how many each stage has; simulated: seconds of a step."""

    name: str
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    schedule: str
    options: dict[str, Any]
    simulated: float


def choices(job: Emulated, ranks: int, microbatches: int) -> list[Choice]:
    """The proposal first."""
    layers, topology, hosts = job.layers, job.topology, ranks // HOST_RANKS
    stages = range(1, min(_MOST_STAGES, len(layers), ranks) + 1)
    found = partition(layers, SAMPLES, ranks, topology, microbatches=microbatches, stages=stages)
    evaluator = Evaluator(
        layers, uses_of(layers), PlannedJob(topology, microbatches, SAMPLES, None, False, None, 4.0)
    )

    def choice(name: str, cut: Cut) -> Choice:
        best = best_of([each for each in evaluator.best(cut) if not each.why_not])
        return Choice(name, cut.layers, cut.ranks, best.schedule, dict(best.options), best.seconds)

    proposed = found.schedule
    mine = [len(each) for each in found.layers], [len(each) for each in found.ranks]
    return [
        Choice(
            "partition",
            tuple(mine[0]),
            tuple(mine[1]),
            proposed.schedule,
            dict(proposed.options),
            proposed.seconds,
        ),
        choice("equal layers, a stage for each host", even(len(layers), hosts, ranks)),
        choice("equal parameters, a stage for each host", equal_parameters(layers, hosts, ranks)),
        choice("one stage, data parallel", even(len(layers), 1, ranks)),
    ]


def equal_parameters(layers: list[Layer], stages: int, ranks: int) -> Cut:
    """The cut whose largest stage is smallest, then that whose next largest is."""
    best: tuple[list[float], tuple[int, ...]] = ([math.inf], ())
    for counts in _compositions(len(layers), stages):
        cut = Cut(counts, even(len(layers), stages, ranks).ranks)
        sizes = [sum(layers[i].parameters for i in each) for each in cut.layer_ranges()]
        best = min(best, (sorted(sizes, reverse=True), counts))
    return Cut(best[1], even(len(layers), stages, ranks).ranks)


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, total)))


def rank(job: Found, report: Report) -> None:
    """Reports the choices of each model, by its name."""
    total = job["repeats"] * sum(len(chosen) for _, chosen in job["models"].values())
    with Steps("steps", total) as counted:
        for model, (emulated, chosen) in job["models"].items():
            report(model, measure(emulated, chosen, job["microbatches"], job["repeats"], counted.done))


def measure(
    job: Emulated,
    chosen: list[Choice],
    microbatches: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """The choices in turn, round after round, after a first step of each that only checks gradients. done: is
    called after each step."""
    runs = [Run(choice, job, microbatches) for choice in chosen]
    for _ in range(repeats):
        for run in runs:
            run.timed()
            done()
    for run in runs:
        run.schedule.close()
    return [{**asdict(run.choice), **run.found} for run in runs]


class Run:
    """One choice, on this rank."""

    def __init__(self, choice: Choice, job: Emulated, microbatches: int) -> None:
        self.choice = choice
        self.found: dict[str, list[float]] = {"seconds": [], "late": [], "others": []}
        parts, edges = parts_of(job.layers, choice.layers)
        starts = [sum(choice.ranks[:stage]) for stage in range(len(parts))]
        meshes = [
            DeviceMesh("cpu", list(range(start, start + count)))
            for start, count in zip(starts, choice.ranks, strict=True)
        ]
        index = max(stage for stage, start in enumerate(starts) if dist.get_rank() >= start)
        self.clock = Clock(0.0, 0.0, 0.0, scale=0.0)
        self.module = LayersStage(parts[index], SAMPLES, self.clock)
        stage = PipelineStage(
            self.module, index, len(parts), torch.device("cpu"), mesh=meshes[index], edges=edges,
            topology=job.topology,
        )  # fmt: skip
        made: Any = get_schedule_class(choice.schedule)
        self.schedule = made(stage, microbatches, loss_fn=loss_fn, **choice.options)
        numbers = torch.arange(microbatches * SAMPLES, dtype=torch.float32)
        self.batch, self.target = (numbers % 13 + 1)[:, None], numbers % 7 + 1
        self.expected = one_process(parts, edges, self.batch, self.target)[index]
        self.step()
        self.clock.scale = 1.0

    def step(self) -> None:
        """Its weight gradient needs every activation and every gradient."""
        self.module.zero_grad()
        self.schedule.step(self.batch, target=self.target, return_outputs=False)
        assert self.module.weight.grad is not None
        found = self.module.weight.grad.item()
        if not math.isclose(found, self.expected, rel_tol=1e-3):
            raise RuntimeError(
                f"{self.choice.name}, rank {dist.get_rank()}: gradient {found}, not {self.expected}"
            )

    def timed(self) -> None:
        found, _ = timed_step(self.step, self.clock)
        for name, value in found.items():
            self.found[name].append(value)


def one_process(
    parts: list[Part], edges: list[Any], batch: torch.Tensor, target: torch.Tensor
) -> list[float]:
    """The weight gradient of each stage, on the whole batch at once."""
    clock = Clock(0.0, 0.0, 0.0, scale=0.0)
    modules = [LayersStage(part, len(batch), clock) for part in parts]
    made: list[tuple[torch.Tensor, ...]] = []
    for stage, module in enumerate(modules):
        into = sorted((edge for edge in edges if edge.to_stage == stage), key=lambda edge: edge.input)
        inputs = [made[edge.from_stage][edge.output] for edge in into] if stage else [batch]
        output = module(*inputs)
        made.append(output if isinstance(output, tuple) else (output,))
    loss_fn(made[-1][0], target).backward()
    return [module.weight.grad.item() for module in modules if module.weight.grad is not None]


_HEAD = """\
| model | choice | layers of each stage, on ranks | schedule | step, s | over the proposal |
|---|---|---|---|---:|---:|"""


def rows(model: str, found: list[dict[str, Any]]) -> list[str]:
    """One for each choice; the proposal is the first. Simulated figures are in brackets."""
    lines = []
    first = found[0]
    for choice in found:
        step, base = (statistics.median(each["seconds"]) for each in (choice, first))
        delayed = ", delayed" if choice["options"].get("delay_weight_grad") else ""
        ratio, expected = step / base, choice["simulated"] / first["simulated"]
        lines.append(
            f"| {model if choice is first else 'the same'} | {choice['name']} | {_stages(choice)} | "
            f"{choice['schedule']}{delayed} | {step:.2f} ({choice['simulated']:.2f}) | "
            f"{ratio:.2f} ({expected:.2f}) |"
        )
    return lines


def _stages(choice: dict[str, Any]) -> str:
    ends = accumulate(choice["ranks"])
    spans = [
        f"{layers} on {end - count}" + (f" to {end - 1}" if count > 1 else "")
        for layers, count, end in zip(choice["layers"], choice["ranks"], ends, strict=True)
    ]
    return "; ".join(spans)


def text(results: dict[str, Any]) -> str:
    head, models = results["header"], results["models"]
    every = [choice for found in models.values() for choice in found]
    spread = max((max(e["seconds"]) - min(e["seconds"])) / statistics.median(e["seconds"]) for e in every)
    errors = [abs(statistics.median(e["seconds"]) / e["simulated"] - 1) for e in every]
    late = max(max(each["late"]) for each in every)
    others = max(max(each["others"]) for each in every)
    table = "\n".join(line for model, found in models.items() for line in rows(model, found))
    return f"""\
`{command(head)}`: {head["hosts"]} hosts (network namespaces) of {head["host_ranks"]} ranks, a link of
{head["link_mbit"]:g} Mbit/s each way for each host, {head["microbatches"]} micro-batches.
**Compute is timed**: a forward of all layers sleeps {head["forward_seconds"]:g} s on one rank. Bytes of
values and parameters are shrunk, so that compute and transfers are to each other as with
{head["emulated_gbit"]:g} Gbit/s. Values, gradients and their sums are real, and the gradients of every step
are checked. In brackets what `partition` simulates.
Medians of {head["repeats"]} rounds, in each of which every choice stepped once; largest spread {spread:.1%}.
Timed compute ended {late * 1e3:.0f} ms late at most, while others had {others:.0%} of the cores at most.
{head["cores"]} cores, torch {head["torch"]}, commit {head["commit"]}.

{_HEAD}
{table}

Simulated and measured steps differ by {max(errors):.1%} at most."""


_HOSTS = 4
_LIMIT = 1800.0  # seconds for everything


PAGE = Page("partition", "partition.json", "docs/pipelining.md", text)
PAGES = [PAGE]


def parse() -> argparse.Namespace:
    options = PAGE.parser(__doc__)
    known = list(MODELS)
    options.add_argument("--models", type=names(known, "model", ";"), default=known, help="split by ;")
    options.add_argument("--microbatches", type=positive(int), default=8)
    options.add_argument(
        "--forward", type=positive(float), default=0.6,
        help="seconds of a micro-batch through all layers on one rank",
    )  # fmt: skip
    options.add_argument("--mbit", type=positive(float), default=25.0, help="rate of a host's link, each way")
    options.add_argument(
        "--repeats", type=positive(int), default=5, help="rounds, in each of which every choice steps once"
    )
    return options.parse_args()


def main() -> int:
    args = parse()
    header = {
        **machine("partition"),
        "hosts": _HOSTS,
        "host_ranks": HOST_RANKS,
        "microbatches": args.microbatches,
        "forward_seconds": args.forward,
        "link_mbit": args.mbit,
        "emulated_gbit": GBIT,
        "repeats": args.repeats,
    }
    results: Found = {"header": header, "models": {}}
    print("# " + ", ".join(f"{name} {value}" for name, value in header.items()), flush=True)
    begin, failed = time.monotonic(), False
    models = {}
    for name in args.models:
        work = emulated(MODELS[name](), args.forward, args.mbit)
        models[name] = work, choices(work, _HOSTS * HOST_RANKS, args.microbatches)
    job = {"models": models, "microbatches": args.microbatches, "repeats": args.repeats}

    def heard(model: str, found: Any) -> None:
        results["models"][model] = found
        print("\n".join(rows(model, found)), flush=True)

    try:
        with Cluster(_HOSTS, args.mbit, own_cores=False) as cluster:
            run_job(cluster, HOST_RANKS, "pipeline.partition:rank", job, limit=_LIMIT, heard=heard)
    except ClusterError as error:
        print(f"the benchmark did not run to its end: {error}", file=sys.stderr)
        failed = True
    if not results["models"]:
        return 1
    header["seconds"] = round(time.monotonic() - begin)
    if args.out or not failed:
        PAGE.finish(args, results)
    return int(failed)
