"""What Kubernetes makes of the Job in examples/launching/kubernetes.yaml: a command and variables for each
pod, and a name that leads to its address. Run on the hosts of an emulated cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from benchmarks.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "launching" / "kubernetes.yaml"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """Service and Job."""
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    return service, job


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def pod(job: dict[str, Any], index: int, address: str) -> tuple[list[str], dict[str, str]]:
    """Command and variables of pod `index`. Raises KeyError at what Kubernetes does not know."""
    fields = {INDEX: str(index), "status.podIP": address}
    only = container(job)
    variables = {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in only["env"]
    }
    words = [*only["command"], *only["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words], variables


def names(service: dict[str, Any], job: dict[str, Any], addresses: list[str]) -> str:
    """/etc/hosts of the pods: a headless service gives names to the pods that it selects and whose subdomain
    it is."""
    template = job["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    known = (
        service["spec"]["selector"].items() <= labels
        and template["spec"]["subdomain"] == service["metadata"]["name"]
        and service["spec"]["clusterIP"] == "None"
    )
    name, subdomain = job["metadata"]["name"], template["spec"]["subdomain"]
    pods = [f"{address} {name}-{index}.{subdomain}\n" for index, address in enumerate(addresses)]
    return "127.0.0.1 localhost\n" + "".join(pods if known else [])


def run_pods(
    cluster: Cluster, service: dict[str, Any], job: dict[str, Any], limit: float
) -> list[tuple[int, str]]:
    """Status and output of each pod, all of which run at once; `limit` is in seconds. Of this process's
    variables a pod sees only where Python and its modules are."""
    addresses = [cluster.address(index) for index in range(job["spec"]["parallelism"])]
    hosts = cluster.folder / "hosts"
    hosts.write_text(names(service, job, addresses))
    kept = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "python"),
        "RES_OPTIONS": "attempts:0",
    }
    # `ip netns exec` gives its command a mount namespace of its own.
    enter = ["bash", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    pods = []
    outputs = [cluster.folder / f"pod{index}.out" for index in range(len(addresses))]
    end = time.monotonic() + limit
    try:
        for index, address in enumerate(addresses):
            command, variables = pod(job, index, address)
            with outputs[index].open("wb") as output:
                pods.append(
                    subprocess.Popen(
                        [*cluster.enter(index), *enter, *command],
                        cwd=ROOT,
                        env={**kept, **variables},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for each in pods:
            each.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # its status is that of the signal below
    finally:
        for each in pods:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    return [
        (each.returncode, path.read_text(errors="replace")) for each, path in zip(pods, outputs, strict=True)
    ]
