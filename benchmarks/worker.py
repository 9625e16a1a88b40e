"""One rank of a benchmark on the emulated cluster. Rank 0 appends one JSON object a line to a file: the
calibration, what begins, and each case."""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from meshcast.bench.cases import find
from meshcast.bench.measure import calibrate, measure
from meshcast.bench.report import overload

_CALIBRATIONS = 3  # attempts: something else may disturb one


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON, see session.py")
    job = json.loads(parser.parse_args().job.read_text())
    faulthandler.enable()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    out = Path(job["folder"], "results.jsonl")

    def report(kind: str, value: Any) -> None:
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")

    per_host = job["ranks_per_host"]
    for _ in range(_CALIBRATIONS):
        links = calibrate(per_host, job["mbit"])
        if not overload(links.facts()):  # the same on all ranks: the times are summed up
            break
    topology = links.topology(per_host, job["nics"]).striped()
    report("calibration", links.facts() | {"topology": topology.to_json()})
    for name in job["cases"]:
        (case,) = find([name])
        methods = [method for method in job["methods"] if method not in job["failed"].get(name, [])]
        measured = measure(
            case.scaled(topology, job["seconds"]), topology, methods, job["repeats"],
            lambda method, name=name: report("begin", [name, method]),
        )  # fmt: skip
        report("case", measured)
        # Peers of another kind run between the cases, while these processes sleep.
        while dist.get_rank() == 0 and not Path(job["folder"], f"go {name}").exists():
            time.sleep(0.05)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
