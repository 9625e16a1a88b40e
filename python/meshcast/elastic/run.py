"""torchrun for jobs that continue: python -m meshcast.elastic.run [options] SCRIPT [arguments]

The options are torchrun's. When a worker dies the others keep their processes and what these hold: they make
a new process group among themselves. A worker that is started in its place joins them when it is ready.
Several hosts: the same command on each, with --nnodes and --rdzv-endpoint.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import determine_local_world_size, get_args_parser

from .agent import Agent, Config, Follower
from .rendezvous import JobGoneError

__all__ = ["main", "parser", "read", "run"]

_DEFAULT_PORT = 29400  # torchrun's
# Options of torchrun that --rdzv-endpoint replaces here.
_BY_ENDPOINT = ("node_rank", "master_addr", "master_port", "local_addr")
_OTHERS = (
    *("start_method", "run_path", "event_log_handler", "duplicate_stdout_filters"),
    *("duplicate_stderr_filters", "logs_specs", "numa_binding", "virtual_local_rank"),
)


_LEADS = {"": None, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_CONF = "join_timeout=SECONDS,last_call_timeout=SECONDS,keep_alive=SECONDS,is_host=0 or 1"
_RANGE = "expected N, or MIN:MAX with 1 <= MIN <= MAX"


def parser() -> argparse.ArgumentParser:
    """Returns torchrun's, with a help text for each option that differs."""
    found = get_args_parser()
    found.prog = "python -m meshcast.elastic.run"
    found.description = (
        "Starts a job whose ranks may die and join: survivors continue in their processes (docs/elastic.md). "
        "On several hosts, start the same command on each."
    )
    if "--shutdown-timeout" not in found._option_string_actions:  # torch 2.11's has none
        found.add_argument(
            *("--shutdown-timeout", "--shutdown_timeout"),
            action=env,
            type=int,
            help="Seconds that workers get to end before SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30).",
        )
    helps = {
        "--nproc-per-node": "Number of workers of a host, or MIN:MAX: starts MAX; the job continues while as "
        "many live as MIN on each of the least number of hosts. An int, or auto, cpu, gpu, xpu for MAX.",
        "--max-restarts": "How many workers, in all, are started to replace dead ones, on their host.",
        "--nnodes": "Number of hosts, or MIN:MAX.",
        "--rdzv-endpoint": "HOST[:PORT] of the job's store, the same on all hosts; its host must live.",
        "--rdzv-conf": "join_timeout=SECONDS (600): for hosts to come; a worker that has not come to a "
        "rendezvous by then is killed. last_call_timeout=SECONDS (5): that a worker waits to join together "
        "with others. keep_alive=SECONDS (6): a host that is silent for so long is given up. is_host=0 or "
        "1: whether the endpoint is this host, where its name does not show it.",
    }
    for action in found._actions:
        for option in helps.keys() & set(action.option_strings):
            action.help = helps[option]
        if action.dest in (*_BY_ENDPOINT, *_OTHERS, "rdzv_backend"):
            action.help = argparse.SUPPRESS
    return found


def read(arguments: Sequence[str]) -> Config:
    """Reads the command line. Ends the program, with one line on stderr, for options that are wrong."""
    options = parser()
    args = options.parse_args(list(arguments))
    for name in (*_BY_ENDPOINT, *_OTHERS):
        if getattr(args, name) != options.get_default(name):
            why = "give --rdzv-endpoint in its place" if name in _BY_ENDPOINT else "only torchrun has it"
            options.error(f"--{name.replace('_', '-')}: {why}")
    if args.rdzv_backend not in ("static", "c10d"):
        options.error(f"--rdzv-backend {args.rdzv_backend}: the agent has a store of its own; leave it out")
    hosts = _range(options, "--nnodes", args.nnodes, int)
    endpoint = None
    if args.rdzv_endpoint:
        try:
            endpoint = parse_rendezvous_endpoint(args.rdzv_endpoint, _DEFAULT_PORT)
        except ValueError as error:
            options.error(f"--rdzv-endpoint: {error}")
        if not endpoint[1]:
            options.error(f"--rdzv-endpoint {args.rdzv_endpoint}: give a port that all hosts know")
    elif hosts[1] > 1:
        options.error(
            f"--nnodes {args.nnodes}: give --rdzv-endpoint HOST:PORT as well, the same on all hosts"
        )
    least, most = _range(options, "--nproc-per-node", args.nproc_per_node, determine_local_world_size)
    if args.max_restarts < 0:
        options.error(f"--max-restarts {args.max_restarts}: expected 0 or more")
    if not args.monitor_interval > 0:
        options.error(f"--monitor-interval {args.monitor_interval}: expected seconds above 0")
    try:
        times = _parse_rendezvous_config(args.rdzv_conf)
        join = float(times.pop("join_timeout", 600))
        last_call = float(times.pop("last_call_timeout", 5))
        keep_alive = float(times.pop("keep_alive", 6))
        leads = _LEADS[times.pop("is_host", "").lower()]
        if times or not (join > 0 and last_call >= 0 and keep_alive > 0):
            raise ValueError(f"expected {_CONF}")
        redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
        shown = frozenset(map(int, args.local_ranks_filter.split(","))) if args.local_ranks_filter else None
    except KeyError as error:
        options.error(f"is_host={error.args[0]}: expected {_CONF}")
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
        least=least * hosts[0],
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
        hosts=hosts,
        endpoint=endpoint,
        leads=leads,
        keep_alive=keep_alive,
    )


def _range(
    options: argparse.ArgumentParser, option: str, text: str, number: Callable[[str], int]
) -> tuple[int, int]:
    """Returns MIN and MAX. number: reads MAX, or raises ValueError."""
    least, colon, most = text.rpartition(":")
    try:
        high = number(most)
        low = int(least) if colon else high
    except ValueError as error:
        options.error(f"{option} {text}: {_RANGE if number is int else error}")
    if not 1 <= low <= high:
        options.error(f"{option} {text}: {_RANGE}")
    return low, high


def run(config: Config) -> int:
    """Runs the agent of this host and returns its exit status. Raises as Agent and Follower do."""
    if config.endpoint is None or _leads(config):
        try:
            Agent(config).run()
            return 0
        except OSError as error:
            # Another agent of this machine may lead the job already.
            if error.errno != errno.EADDRINUSE or config.endpoint is None or config.leads:
                at = "" if config.endpoint is None else " at {}:{}".format(*config.endpoint)
                raise JobGoneError(f"the job's store cannot listen{at}: {error}") from None
    return Follower(config).run()


def _leads(config: Config) -> bool:
    assert config.endpoint is not None
    return _matches_machine_hostname(config.endpoint[0]) if config.leads is None else config.leads


def main(arguments: Sequence[str] | None = None) -> int:
    config = read(sys.argv[1:] if arguments is None else arguments)
    if config.most > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
    try:
        return run(config)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
    except JobGoneError as error:
        print(f"meshcast.elastic.run: {error}; the workers of this host have ended", file=sys.stderr)
    except SignalException as error:
        print(f"{error}; the workers have ended", file=sys.stderr)
        return 128 + error.sigval
    except KeyboardInterrupt:  # while it looks for the leading agent; else SignalException
        print("meshcast.elastic.run: interrupted before it had workers", file=sys.stderr)
        return 128 + signal.SIGINT
    return 1


if __name__ == "__main__":
    sys.exit(main())
