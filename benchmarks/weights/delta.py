"""Versions of a model in training as their changes: how many values change in a step of AdamW, and what
`WeightSync(delta=True)` makes of it, next to whole versions, over links of 250 Mbit/s. Then the rate of the
kernels on one core over that of a plain copy. Needs root and iproute2. Writes
benchmarks/results/delta.json and a part of docs/end_to_end.md; takes two minutes, with nothing else
running."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.bench.measure import numbered
from meshcast.bench.report import calibration_text, overload
from meshcast.transfers.medium import STREAM_HEAD, apply_changes, encode_changes
from torch.nn import functional as F

from ..cluster import Cluster, ClusterError, Network, run_job
from ..harness import ROOT, Found, Page, machine, origin, positive, table
from ..ranks import Report, Steps, calibrated, largest, total
from .ways import DTYPE, TRAINERS, Shapes, Sync, Weights, files_folder, slices_of

_HOSTS, _RANKS_PER_HOST = 4, 2
_LIMIT = 480.0  # seconds for all ranks
_BATCH, _LENGTH = 8, 128  # sequences of bytes
_HEADS = 6
_RATES = (1e-6, 1e-5)
_KEPT = ("float32", "bfloat16")  # what the optimizer steps; what travels is bfloat16
_ROUNDS = 9  # of kernels
_PARTS = (0.0, 0.001, 0.01, 0.1, 0.5)  # of values that have changed, for kernels
_BITS = torch.int16


def shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """A decoder on bytes, with the names of Llama."""
    wide = width * 8 // 3
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        found |= {f"{at}mlp.{name}_proj.weight": (wide, width) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (width, wide)
        found |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (256, width)}


def loss_of(weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[name])

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name])

    x = F.embedding(tokens[:, :-1], weights["model.embed_tokens.weight"])
    for layer in range(sum(name.endswith("down_proj.weight") for name in weights)):
        at = f"model.layers.{layer}."
        h = normed(x, f"{at}input_layernorm.weight")
        q, k, v = (
            linear(h, f"{at}self_attn.{name}_proj.weight").unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for name in "qkv"
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(seen, f"{at}self_attn.o_proj.weight")
        h = normed(x, f"{at}post_attention_layernorm.weight")
        h = F.silu(linear(h, f"{at}mlp.gate_proj.weight")) * linear(h, f"{at}mlp.up_proj.weight")
        x = x + linear(h, f"{at}mlp.down_proj.weight")
    logits = linear(normed(x, "model.norm.weight"), "lm_head.weight")
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """AdamW on the text of this repository's documents. kept: the type that the optimizer steps; losses and
    gradients are of float32."""

    def __init__(self, weights: Mapping[str, torch.Tensor], rate: float, kept: torch.dtype) -> None:
        self._text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/*.md")))))
        self._draw = torch.Generator().manual_seed(1)
        self.kept = {name: x.to(kept) for name, x in weights.items()}
        self._optimizer = torch.optim.AdamW(self.kept.values(), lr=rate, weight_decay=0.01)

    def step(self) -> None:
        at = torch.randint(len(self._text) - _LENGTH - 1, (_BATCH, 1), generator=self._draw)
        tokens = self._text[at + torch.arange(_LENGTH + 1)]
        exact = {name: x.to(torch.float32, copy=True).requires_grad_() for name, x in self.kept.items()}
        loss_of(exact, tokens).backward()
        for name, x in self.kept.items():
            x.grad = exact[name].grad.to(x.dtype)  # type: ignore[union-attr]
        self._optimizer.step()


def first_weights(given: Shapes, steps: int) -> dict[str, torch.Tensor]:
    """What a training from nothing has come to."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * 0.02
        for name, shape in given.items()
    }
    training = Training(weights, 1e-3, torch.float32)
    for _ in range(steps):
        training.step()
    return training.kept


def train(
    weights: Mapping[str, torch.Tensor], rate: float, kept: str, before: int, versions: int, folder: Path
) -> list[float]:
    """Writes versions, one a step, after `before` steps without any. Returns the part of the values that
    each step has changed."""
    training, parts, last = Training(weights, rate, getattr(torch, kept)), [], None
    for _ in range(before):
        training.step()
    for version in range(versions):
        training.step()
        now = {name: x.to(DTYPE) for name, x in training.kept.items()}
        torch.save(now, folder / f"{version}.pt")
        if last is not None:
            count = sum(int((now[n].view(_BITS) != last[n].view(_BITS)).sum()) for n in now)
            parts.append(count / sum(x.numel() for x in now.values()))
        last = {name: x.clone() for name, x in now.items()}
    return parts


class _Trained(Weights):
    """One rank's part of a model in training; the version that `become` reads."""

    def read(self, path: str) -> None:
        self._whole = torch.load(path, mmap=True)

    @torch.no_grad()
    def become(self, version: int) -> None:  # noqa: ARG002  what was read
        for name, x in self.held.items():
            box = slices_of(self.shapes[name], x.device_mesh, x.placements)
            x.to_local().copy_(self._whole[name][box])

    def wrong(self, found: Mapping[str, torch.Tensor], version: int) -> int:  # noqa: ARG002
        return sum(
            int((x.view(_BITS) != self._whole[name][self.slices(name)].view(_BITS)).sum())
            for name, x in found.items()
        )


def rank(job: Found, report: Report) -> None:
    links = calibrated(job["ranks_per_host"], job["mbit"])
    topology = links.topology(job["ranks_per_host"], 1)
    given = {name: tuple(shape) for name, shape in job["shapes"].items()}
    weights = _Trained(given, dist.get_rank())
    described: list[Any] = [weights.described()]
    dist.broadcast_object_list(described, TRAINERS[0])
    report("calibration", links.facts())
    report("bound", weights.bound(topology, described[0]))
    report("nbytes", weights.nbytes)
    found = []
    with Steps("versions", len(job["runs"]) * job["versions"]) as counted:
        for run in job["runs"]:
            found.append(_measure(weights, topology, run, job["versions"], counted))
    report("runs", found)


def _measure(weights: _Trained, topology: Any, run: Found, versions: int, counted: Steps) -> Found:
    """Whole and as changes, by turns; the first version of both is whole, and is not counted."""
    ways = {name: Sync(weights, topology, 2, delta=name == "changes") for name in ("whole", "changes")}
    found: Found = {name: {"seconds": [], "bytes": []} for name in ways} | {"ratio": [], "wrong": 0}
    for version in range(versions):
        weights.read(f"{run['folder']}/{version}.pt")
        weights.become(version)
        for name in ways if version % 2 else reversed(ways):
            dist.barrier()
            begin = time.perf_counter()
            ways[name].run(version)
            seconds = largest(time.perf_counter() - begin)
            stats = ways[name].stats
            sent = total(float(stats.bytes_sent if weights.trains else 0))
            if version > 0:
                found[name]["seconds"].append(seconds)
                found[name]["bytes"].append(sent)
                if name == "changes":
                    found["ratio"].append(stats.ratio)
            if weights.serves:
                found["wrong"] += weights.wrong(ways[name].received(), version)
            dist.barrier()
        counted.done()
    for way in ways.values():
        way.close()
    return found | {"wrong": int(total(float(found["wrong"])))}


def kernels(mib: int) -> list[Found]:
    """GB of the tensor a second: of a plain copy, of finding the changes, of making them. CPU time."""
    torch.set_num_threads(1)
    found = []
    before = numbered((mib << 19,), ((0, mib << 19),)).remainder(251).to(DTYPE)
    draw = torch.Generator().manual_seed(0)
    stream = torch.empty(before.nbytes + STREAM_HEAD, dtype=torch.uint8)
    for part in _PARTS:
        now = before.clone()
        now[torch.rand(now.shape, generator=draw) < part] = 300
        copied, served, earlier = torch.empty_like(now), before.clone(), before.clone()
        taken: list[list[float]] = [[], [], []]
        for _ in range(_ROUNDS + 1):  # the first touches the memory
            earlier.copy_(before)
            clocks = [time.thread_time()]
            copied.copy_(now)
            clocks.append(time.thread_time())
            size = encode_changes([now], earlier.view(torch.uint8), stream)
            clocks.append(time.thread_time())
            if size:
                apply_changes(stream[:size], [[served]])
            clocks.append(time.thread_time())
            for each, begin, end in zip(taken, clocks[:-1], clocks[1:], strict=True):
                each.append(end - begin)
        assert torch.equal(served, now)
        copy, find, make = (statistics.median(each[1:]) for each in taken)
        found.append(
            {"part": part, "copy": now.nbytes / copy / 1e9, "find": copy / find,
             "make": copy / make if size else None, "ratio": size / now.nbytes}
        )  # fmt: skip
    return found


def text(results: Found) -> str:
    head = results["header"]
    said = (
        f"{origin(head)}, links of {head['link_mbit']:g} Mbit/s; medians of {head['versions'] - 1} "
        f"versions, whole and as changes by turns; {calibration_text(results['calibration'])}. "
        f"{results['nbytes'] / 2**20:.1f} MiB of bfloat16; lower bound of a whole version "
        f"{results['bound']:.3f} s."
    )
    rows = []
    for run in results["runs"]:
        whole, changes = run["whole"], run["changes"]
        sent, few = (statistics.median(each["bytes"]) for each in (whole, changes))
        slow, fast = (statistics.median(each["seconds"]) for each in (whole, changes))
        rows.append(
            [f"{run['rate']:g}", run["kept"], f"{statistics.median(run['parts']):.2%}", f"{sent / 2**20:.2f}",
             f"{few / 2**20:.2f}", f"{few / sent:.3f}", f"{slow:.3f}", f"{fast:.3f}", f"{fast / slow:.2f}",
             str(run["wrong"])]
        )  # fmt: skip
    columns = [
        "lr", "stepped in", "values that change", "MiB sent, whole", "as changes", "/ whole", "s, whole",
        "as changes", "/ whole", "wrong values",
    ]  # fmt: skip
    each = [
        [
            f"{k['part']:.1%}",
            f"{k['copy']:.1f}",
            f"{k['find']:.2f}",
            "-" if k["make"] is None else f"{k['make']:.2f}",
            f"{k['ratio']:.4f}",
        ]
        for k in results["kernels"]
    ]

    names = ["values that change", "copy, GB/s", "find / copy", "make / copy", "bytes / whole"]
    return "\n\n".join([said, table(columns, rows), table(names, each)])


PAGE = Page("delta", "delta.json", "docs/end_to_end.md", text)
PAGES = [PAGE]


def measure(
    network: Network, given: Shapes, pretrain: int, before: int, versions: int, folder: Path
) -> Found:
    weights = first_weights(given, pretrain)
    runs: list[Found] = []
    for kept in _KEPT:
        for rate in _RATES:
            place = folder / f"{kept} {rate:g}"
            place.mkdir()
            parts = train(weights, rate, kept, before, versions, place)
            runs.append({"rate": rate, "kept": kept, "parts": parts, "folder": str(place)})
    job = {
        "shapes": given, "runs": runs, "versions": versions, "mbit": network.rates,
        "ranks_per_host": _RANKS_PER_HOST,
    }  # fmt: skip
    found = run_job(network, _RANKS_PER_HOST, "weights.delta:rank", job, limit=_LIMIT)
    told = [{key: run[key] for key in ("rate", "kept", "parts")} for run in runs]
    return found | {"runs": [a | b for a, b in zip(told, found["runs"], strict=True)]}


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--width", type=positive(int), default=384, help="of the model, a multiple of 6")
    options.add_argument("--layers", type=positive(int), default=6)
    options.add_argument("--versions", type=positive(int), default=8)
    options.add_argument("--pretrain", type=positive(int), default=40, help="steps at a rate of 1e-3")
    options.add_argument("--before", type=positive(int), default=10, help="steps before the first version")
    options.add_argument("--mbit", type=positive(float), default=250.0, help="rate of a link each way")
    args = options.parse_args()
    try:
        with files_folder() as folder, Cluster(_HOSTS, args.mbit) as cluster:
            given = shapes(args.width, args.layers)
            found = measure(cluster, given, args.pretrain, args.before, args.versions, Path(folder))
    except ClusterError as error:
        print(f"benchmarks delta did not run: {error}", file=sys.stderr)
        return 1
    head = {**machine("delta"), "link_mbit": args.mbit, "versions": args.versions}
    results = {"header": head, **found, "kernels": kernels(64)}
    print(text(results))
    if why := overload(results["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    PAGE.finish(args, results)
    return 0
