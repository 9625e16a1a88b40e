"""torchrun for jobs that go on: python -m meshcast.elastic.run [options] SCRIPT [arguments]

The options are torchrun's. When a worker dies the others keep their processes and what these hold: they make
a new process group among themselves. A worker that is started in its place joins them when it is ready.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import determine_local_world_size, get_args_parser

from .agent import Agent, Config

__all__ = ["main", "parser", "read"]

# Of torchrun, and without meaning where all workers are on the agent's host.
_SEVERAL_HOSTS = ("rdzv_endpoint", "node_rank", "master_addr", "master_port", "local_addr")
_OTHERS = (
    *("start_method", "run_path", "event_log_handler", "duplicate_stdout_filters"),
    *("duplicate_stderr_filters", "logs_specs", "numa_binding", "virtual_local_rank"),
)


def parser() -> argparse.ArgumentParser:
    """torchrun's, with what differs said."""
    found = get_args_parser()
    found.prog = "python -m meshcast.elastic.run"
    found.description = (
        "Starts a job whose ranks may die and join: survivors go on in their processes (docs/elastic.md). "
        "All workers run on this host."
    )
    said = {
        "--nproc-per-node": "Number of workers, or MIN:MAX: starts MAX, goes on while MIN live. An int, or "
        "auto, cpu, gpu, xpu for MAX.",
        "--max-restarts": "How many workers, in all, are started in the place of dead ones.",
        "--nnodes": "1: all workers run on this host.",
        "--rdzv-conf": "join_timeout=SECONDS (600): who has not come to a rendezvous by then is killed. "
        "last_call_timeout=SECONDS (5): that a worker waits to join together with others.",
    }
    for action in found._actions:
        for option in said.keys() & set(action.option_strings):
            action.help = said[option]
        if action.dest in (*_SEVERAL_HOSTS, *_OTHERS, "rdzv_backend"):
            action.help = argparse.SUPPRESS
    return found


def read(arguments: Sequence[str]) -> Config:
    """Ends the program, with one line on stderr, for what cannot be."""
    options = parser()
    args = options.parse_args(list(arguments))
    for name in (*_SEVERAL_HOSTS, *_OTHERS):
        if getattr(args, name) != options.get_default(name):
            why = "all workers run on this host" if name in _SEVERAL_HOSTS else "only torchrun has it"
            options.error(f"--{name.replace('_', '-')}: {why}; leave it out")
    if args.nnodes not in ("1", "1:1"):
        options.error(f"--nnodes {args.nnodes}: all workers run on this host; leave it out")
    if args.rdzv_backend not in ("static", "c10d"):
        options.error(f"--rdzv-backend {args.rdzv_backend}: the agent has a store of its own; leave it out")
    least, most = _ranks(options, args.nproc_per_node)
    if args.max_restarts < 0:
        options.error(f"--max-restarts {args.max_restarts}: expected 0 or more")
    if not args.monitor_interval > 0:
        options.error(f"--monitor-interval {args.monitor_interval}: expected seconds above 0")
    try:
        times = _parse_rendezvous_config(args.rdzv_conf)
        join = float(times.pop("join_timeout", 600))
        last_call = float(times.pop("last_call_timeout", 5))
        if times or not (join > 0 and last_call >= 0):
            raise ValueError("expected join_timeout=SECONDS,last_call_timeout=SECONDS")
        redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
        shown = frozenset(map(int, args.local_ranks_filter.split(","))) if args.local_ranks_filter else None
    except ValueError as error:
        options.error(str(error))
    command, before = (args.training_script, []) if args.no_python else (sys.executable, ["-u"])
    if args.no_python and args.module:
        options.error("--no-python and --module: it is one or the other")
    if not args.no_python:
        before += (["-m"] if args.module else []) + [args.training_script]
    patience = args.shutdown_timeout
    if patience is None:
        patience = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = args.signals_to_handle
    return Config(
        command=command,
        arguments=(*before, *args.training_script_args),
        least=least,
        most=most,
        max_restarts=args.max_restarts,
        interval=args.monitor_interval,
        join_timeout=join,
        last_call=last_call,
        shutdown_timeout=patience,
        role=args.role,
        run_id=args.rdzv_id,
        log_dir=args.log_dir,
        redirects=redirects,
        tee=tee,
        shown=shown,
    )


def _ranks(options: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    least, colon, most = text.rpartition(":")
    try:
        high = determine_local_world_size(most)
        low = int(least) if colon else high
    except ValueError as error:
        options.error(f"--nproc-per-node {text}: {error}")
    if not 1 <= low <= high:
        options.error(f"--nproc-per-node {text}: expected N, or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def main(arguments: Sequence[str] | None = None) -> int:
    config = read(sys.argv[1:] if arguments is None else arguments)
    if config.most > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    try:
        Agent(config).run()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"{error}; the workers have ended", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
