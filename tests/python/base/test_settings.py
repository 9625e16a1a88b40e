"""Environment variables: what is taken, what is refused, and that the documents list them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from meshcast import MeshcastError
from meshcast.base import settings

ROOT = Path(__file__).resolve().parents[3]


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHCAST_SHM_MB", raising=False)
    assert settings.SHM_MB.integer() == 64
    monkeypatch.setenv("MESHCAST_SHM_MB", " ")
    assert settings.SHM_MB.integer() == 64
    monkeypatch.setenv("MESHCAST_SHM_MB", " 7 ")
    assert settings.SHM_MB.integer() == 7


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1MB", "\u0663", str((1 << 20) + 1)])
def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MESHCAST_SHM_MB", value)
    expected = rf"MESHCAST_SHM_MB is '{re.escape(value)}'; expected a number of MiB from 1 to 1048576"
    with pytest.raises(MeshcastError, match=expected) as caught:
        settings.SHM_MB.integer(op="connect")
    assert caught.value.op == "connect"


def test_a_choice_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCAST_CUDA_TRANSPORT", "nccl")
    assert settings.CUDA_TRANSPORT.choice() == "nccl"
    monkeypatch.setenv("MESHCAST_CUDA_TRANSPORT", "tcp")
    with pytest.raises(
        MeshcastError, match="MESHCAST_CUDA_TRANSPORT is 'tcp'; expected auto, nccl or cuda_ipc"
    ):
        settings.CUDA_TRANSPORT.choice()


def test_the_documented_table_is_that_of_the_code() -> None:
    """`PYTHONPATH=python python -m meshcast.base.settings` prints it."""
    assert settings.markdown() in (ROOT / "docs" / "environment.md").read_text()


def test_no_variable_is_read_elsewhere() -> None:
    known = {each.name for each in settings.ALL}
    for path in (ROOT / "python" / "meshcast").rglob("*.py"):
        if path.name != "settings.py":
            read = set(re.findall(r"environ\S*[\[(]\s*[\"'](MESHCAST_\w+)", path.read_text()))
            assert not read, f"{path}: {read}"
    assert len(known) == len(settings.ALL)
