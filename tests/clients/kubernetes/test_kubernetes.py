"""examples/launching/kubernetes.yaml against the schemas of Kubernetes' API, which allow no unknown fields.
tests/multiproc/test_launching.py runs what its pods run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

MANIFEST = Path(__file__).resolve().parents[3] / "examples/launching/kubernetes.yaml"
VERSIONS = sorted(set(kubernetes_validate.utils.all_versions()))


def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def accept(resources: list[dict[str, Any]], version: str) -> None:
    """Raises where one is not of this version's schema, or where an older one was taken instead."""
    for resource in resources:
        assert version.startswith(kubernetes_validate.validate(resource, version, strict=True))


def test_there_are_versions() -> None:
    assert len(VERSIONS) > 5
    assert [each["kind"] for each in manifest()] == ["Service", "Job"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schema_accepts_it(version: str) -> None:
    accept(manifest(), version)


RANKS = ["spec", "template", "spec", "containers", 0]
# Of which resource, where, what is there instead.
WRONG = {
    "a misspelt field": (1, ["spec", "completionmode"], "Indexed"),
    "a field of another resource": (0, ["spec", "parallelism"], 3),
    "text for a number": (1, ["spec", "completions"], "3"),
    "a number for text": (1, [*RANKS, "env", -1, "value"], 600),
    "no name": (1, [*RANKS, "name"], None),
    "a word for a port": (0, ["spec", "ports", 0, "port"], "rendezvous"),
}


@pytest.mark.parametrize("which", WRONG)
def test_the_schema_refuses_what_is_wrong(which: str) -> None:
    resources = manifest()
    number, (*path, last), value = WRONG[which]
    at: Any = resources[number]
    for step in path:
        at = at[step]
    at[last] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        accept(resources, VERSIONS[-1])
