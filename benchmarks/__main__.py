"""python -m benchmarks NAME [options]: what is measured, with a name for each and how long it takes.

NAME --help lists the options of one; options without a name are those of `reshard`. What says "a rank" is
started on each rank, by torchrun or by `cluster run`. Run with PYTHONPATH=python:. from the root of the tree.
Where hosts are emulated, root and iproute2 are needed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NamedTuple

from .harness import parser


class Benchmark(NamedTuple):
    """program: MODULE of this package, or MODULE:FUNCTION."""

    program: str
    takes: str
    what: str


BENCHMARKS = {
    "reshard": Benchmark(
        "reshard.session", "10 min", "reshards over links, compared with gloo, MPI and plans of others"
    ),
    "calls": Benchmark(
        "calls.measure", "15 min", "every kind of call by size, compared with gloo, Open MPI and UCX alone"
    ),
    "resources": Benchmark("resources", "2 min", "memory, CPU time, small calls, copies inside a host"),
    "many_ranks": Benchmark("many_ranks", "1 min", "the first calls of 8 to 128 ranks"),
    "broadcast_sizes": Benchmark("sizes:broadcasts", "1 min", "torch.distributed.broadcast by size; a rank"),
    "message_sizes": Benchmark("sizes:messages", "1 min", "torch.distributed.send and recv by size; a rank"),
    "planner": Benchmark("planner", "5 min", "time to plan and predictions, for up to 16,384 ranks"),
    "windows": Benchmark("planner:windows", "15 s", "state dicts in windows, predicted"),
    "quantize": Benchmark("quantize", "30 s", "block-scaled types on one core, compared with a copy"),
    "weights": Benchmark("weights.sync", "7 min", "a model's weights from trainers to servers"),
    "delta": Benchmark("weights.delta", "2 min", "versions of weights in training as their changes"),
    "reader": Benchmark("weights.reader", "1 min", "weights for an engine that restarts, from other engines"),
    "peer_weights": Benchmark(
        "weights.peer_weights", "1 min", "who sends how many bytes on layouts of others, planned"
    ),
    "clients": Benchmark(
        "weights.clients", "5 min", "torchft and Megatron Core with their own transports and ours"
    ),
    "pipeline": Benchmark(
        "pipeline.sweep", "7 min", "schedules on an emulated cluster, measured and simulated"
    ),
    "partition": Benchmark("pipeline.partition", "7 min", "cuts into stages, measured and simulated"),
    "e2e": Benchmark("pipeline.e2e", "6 min", "the paper's jobs, and what each part of the method adds"),
    "curves": Benchmark(
        "pipeline.e2e_page:curves", "1 s", "loss curves that a test has left, laid over each other"
    ),
    "tiny_steps": Benchmark("pipeline.tiny_steps", "1 min", "steps that compute next to nothing; a rank"),
    "time_to_error": Benchmark("elastic.time_to_error", "30 min", "how soon the others know of a lost rank"),
    "kills": Benchmark(
        "elastic.kills", "5 min", "random kills in an elastic job, and whether its steps are right"
    ),
    "job_compared": Benchmark(
        "elastic.job_compared", "4 min", "a job with kills: elastic, torchrun, torchft"
    ),
    "remesh": Benchmark("elastic.remesh", "2 min", "a state that moves when ranks join and leave"),
    "replicas": Benchmark("elastic.replicas", "2 min", "what copies of the state cost a step; a rank"),
    "rebalance": Benchmark("elastic.rebalance", "1 min", "a rank that becomes slower in a pipeline; a rank"),
    "cuda_kernels": Benchmark("cuda:kernels", "2 min", "pack and unpack kernels; a GPU"),
    "cuda_ipc": Benchmark("cuda:ipc", "2 min", "reshards between processes on one GPU; a rank"),
    "cuda_beside": Benchmark("cuda:beside", "1 min", "a matrix product next to a reshard on one GPU; a rank"),
    "cuda_topology": Benchmark(
        "cuda:topology", "20 s", "rates between GPUs, and what is kept of them; a rank"
    ),
    "check": Benchmark("check", "15 min", "whether this tree is as fast as the results that are kept"),
    "publish": Benchmark(
        "__main__:publish", "20 s", "pages and charts again, from the results that are kept"
    ),
    "cluster": Benchmark("cluster", "", "an emulated cluster by hand"),
}
_PAGES = (
    "calls.page", "elastic.job_compared", "elastic.time_to_error", "many_ranks", "pipeline.e2e_page",
    "pipeline.partition", "pipeline.sweep_page", "planner", "resources", "weights.clients", "weights.delta",
    "weights.peer_weights", "weights.reader", "weights.sync",
)  # fmt: skip
"""Modules with PAGES."""


def listing() -> str:
    lines = [f"  {name:<16} {each.takes:>6}  {each.what}" for name, each in BENCHMARKS.items()]
    return "\n".join([str(__doc__), "", *lines])


def publish() -> int:
    """python -m benchmarks publish: makes pages and charts from the results that are kept, and compresses
    those that are large."""
    from .reshard.page import publish as publish_cases

    parser("publish", publish.__doc__).parse_args()
    status = publish_cases()
    for module in _PAGES:
        for page in importlib.import_module(f"benchmarks.{module}").PAGES:
            page.draw(page.results)
    return status


def main() -> int:
    name, *rest = sys.argv[1:] or ["list"]
    if name in ("list", "-h", "--help"):
        print(listing())
        return 0
    if name.startswith("-"):
        name, rest = "reshard", sys.argv[1:]
    if name not in BENCHMARKS:
        print(
            f"python -m benchmarks: unknown name {name!r}; known are {', '.join(BENCHMARKS)}", file=sys.stderr
        )
        return 2
    if "RANK" not in os.environ:  # ended from outside, it cleans up behind itself as after an error
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.argv = [f"python -m benchmarks {name}", *rest]
    module, _, function = BENCHMARKS[name].program.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), function or "main")() or 0


if __name__ == "__main__":
    sys.exit(main())
