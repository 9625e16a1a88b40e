"""One rank of a benchmark on the emulated cluster. Rank 0 appends one JSON object per case to a file."""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from meshcast.bench.calibrate import calibrate
from meshcast.bench.cases import RANKS_PER_HOST, find
from meshcast.bench.measure import measure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON, see __main__.py")
    job = json.loads(parser.parse_args().job.read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    out = Path(job["folder"], "results.jsonl")

    def report(kind: str, value: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")

    links = calibrate(RANKS_PER_HOST, job["mbit"])
    topology = links.topology(RANKS_PER_HOST, job["nics"])
    report("calibration", links.facts() | {"topology": topology.to_json()})
    for name in job["cases"]:
        (case,) = find([name])
        measured = measure(case.scaled(topology, job["seconds"]), topology, job["methods"], job["repeats"])
        report("case", measured)
        # Peers of another kind run between the cases, while these processes sleep.
        while dist.get_rank() == 0 and job["peers"] and not Path(job["folder"], f"go {case.name}").exists():
            time.sleep(0.05)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
