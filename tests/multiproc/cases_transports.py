"""Which transport hosts use, what all ranks say where it cannot be used, and what it costs a process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from unittest import mock

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout, LayoutError, MeshcastError
from meshcast.base.wire import pack, unpack
from meshcast.groups import network
from multiproc.cases_shared_memory import environment
from multiproc.threads import lasting_threads
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
_MISSING = "/nonexistent/libucp.so.0"
_GROUPS = 12


def move(
    rank: int, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32, rows: int = 300
) -> torch.Tensor:
    """Rows of ranks 0 and 1 become columns of 1, 2 and 3, so that no box is contiguous. The result."""
    full = torch.arange(rows * 7).reshape(rows, 7).to(dtype)
    mine = full.chunk(2)[rank] if rank < 2 else None
    out = meshcast.reshard_local(
        mine,
        Layout([0, 1], [Shard(0)]),
        None,
        Layout([1, 2, 3], [Shard(1)]),
        shape=full.shape,
        dtype=dtype,
        group=group,
    )
    if rank == 0:
        return torch.empty(0, dtype=dtype)
    assert out is not None
    assert torch.equal(out, full.chunk(3, dim=1)[rank - 1])
    return out


def refused(context, match: str, **values: str) -> None:
    """A new group cannot come up with these variables on this rank; another one can."""
    group = dist.new_group(list(range(4)))
    with environment(**values), pytest.raises(MeshcastError, match=match):
        move(context.rank, group)
    context.wait_for_all(f"refused {match}")
    move(context.rank, dist.new_group(list(range(4))))


def a_device_that_does_not_exist(context) -> None:
    """First of all cases: the process then has no plane yet, which keeps its devices."""
    group = dist.new_group(list(range(4)))
    device = "nope7" if context.rank == 3 else os.environ.get("UCX_NET_DEVICES", "lo")
    with (
        environment(UCX_NET_DEVICES=device, MESHCAST_TRANSPORT="ucx"),
        pytest.raises(LayoutError, match=r"rank 3: UCX.*nope7"),
    ):
        move(context.rank, group)
    context.wait_for_all("refused")
    move(context.rank, dist.new_group(list(range(4))))


def both_give_the_same_bytes(context) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (2, 300, 60_000):
            found = []
            for transport in ("ucx", "gloo"):
                group = dist.new_group(list(range(4)))
                with environment(MESHCAST_TRANSPORT=transport):
                    found.append(move(context.rank, group, dtype, rows))
                dist.destroy_process_group(group)
            assert torch.equal(*(each.contiguous().view(torch.uint8) for each in found))


def ranks_with_unlike_transports(context) -> None:
    kind = "gloo" if context.rank == 2 else "ucx"
    refused(context, r"one transport, found ucx on rank 0.*gloo on rank 2", MESHCAST_TRANSPORT=kind)


def a_rank_without_the_library(context) -> None:
    library = _MISSING if context.rank == 1 else "auto"
    refused(context, f"rank 1: MESHCAST_UCX is .{_MISSING}", MESHCAST_UCX=library, MESHCAST_TRANSPORT="ucx")


def a_rank_of_another_version(context) -> None:
    """Its messages have another form: nobody sends any."""
    group = dist.new_group(list(range(4)))
    offer = network.Network.offer

    def with_form(self: network.Network) -> str:
        return pack(unpack(network._NetworkOffer, offer(self))._replace(form=99))

    other = mock.patch.object(network.Network, "offer", with_form)
    with (
        environment(MESHCAST_TRANSPORT="ucx"),
        other if context.rank == 2 else contextlib.nullcontext(),
        pytest.raises(LayoutError, match=r"one version of meshcast.*99 on rank 2.*install the same version"),
    ):
        move(context.rank, group)
    context.wait_for_all("refused")
    move(context.rank, dist.new_group(list(range(4))))


def without_the_library_all_take_gloo(context) -> None:
    """And say so once."""
    messages = []
    with environment(MESHCAST_UCX=_MISSING), said(messages):
        for _ in range(2):
            group = dist.new_group(list(range(4)))
            move(context.rank, group)
            dist.destroy_process_group(group)
    assert sum("over gloo, since UCX cannot be used" in text for text in messages) == 1, messages


def bad_values(context) -> None:
    refused(context, "MESHCAST_TRANSPORT.*tcp", MESHCAST_TRANSPORT="tcp")


def groups_share_threads_and_connections(context) -> None:
    """With one group and with many, small calls and large ones: a thread for messages, one for deadlines and
    copies, one that answers who asks for the flight record, UCX's own."""
    groups = [dist.new_group(list(range(4))) for _ in range(_GROUPS)]
    move(context.rank, groups[0])
    assert lasting_threads() == ["async", "mc-progress", "mc-record", "mc-work"]
    sockets = open_sockets()
    for group in groups[1:]:
        move(context.rank, group)
    move(context.rank, groups[0], rows=300_000)
    assert lasting_threads() == ["async", "mc-progress", "mc-record", "mc-work"]
    # Each process group that private groups are made from has a connection to the store.
    assert open_sockets() <= sockets + len(groups) - 1, (open_sockets(), sockets)


def strangers_change_nothing(context) -> None:
    """They connect to every port that this process listens on, talk, and go, while tensors move."""
    group = dist.new_group(list(range(4)))
    move(context.rank, group)
    draw = random.Random(context.rank)
    ports = listening_ports()
    assert ports
    for turn in range(20):
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as stranger:
                stranger.sendall(draw.randbytes(draw.choice([1, 8, 64, 5000])))
        move(context.rank, group, rows=(2, 300, 60_000)[turn % 3])


def open_sockets() -> int:
    return sum("socket" in each for each in _descriptors())


def listening_ports() -> set[int]:
    """TCP ports of this process."""
    own = {text.partition("[")[2].rstrip("]") for text in _descriptors() if text.startswith("socket:")}
    found = set()
    for line in open("/proc/self/net/tcp").readlines()[1:]:  # noqa: SIM115
        fields = line.split()
        if fields[3] == "0A" and fields[9] in own:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _descriptors() -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


@contextlib.contextmanager
def said(messages: list[str]):
    """What meshcast logs meanwhile."""
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    keep = Keep()
    logging.getLogger("meshcast").addHandler(keep)
    try:
        yield
    finally:
        logging.getLogger("meshcast").removeHandler(keep)


CASES = [
    a_device_that_does_not_exist,
    both_give_the_same_bytes,
    ranks_with_unlike_transports,
    a_rank_without_the_library,
    a_rank_of_another_version,
    without_the_library_all_take_gloo,
    bad_values,
    groups_share_threads_and_connections,
    strangers_change_nothing,
]
