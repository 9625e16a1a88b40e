"""Start of every training program."""

import os

from training.command_line import config_errors_exit
from training.job import JobType
from training.options import parse


def main(job_type: JobType, argv: list[str]) -> int:
    """Exit status: 0 done, 1 --verify found too large a difference, 2 a command line that cannot run."""
    with config_errors_exit():
        ranks = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
        options = parse(job_type, argv, ranks)
    # Only now, so that a wrong command line is answered at once.
    from training.loop import run

    return run(options)
