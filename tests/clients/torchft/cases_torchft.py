"""torchft's Manager with MeshcastTransport: two replica groups of two ranks, each with FSDP2 over its own
and uneven shards; and the transport by itself, with a rank lost in the middle."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast.integrations.torchft import MeshcastTransport
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case loses a rank
VICTIM = 3
LIMIT = timedelta(seconds=30)


def said_by_rank_0(context, name: str, value: str | None = None) -> str:
    if context.rank == 0:
        context.store.set(name, value)
    return context.store.get(name).decode()


def a_replica_heals(context) -> None:
    """The replicas have other weights, and the first quorum makes them alike: torchft chooses who sends, for
    each place in a replica group. The state of the optimiser and plain values come along."""
    replica, place = divmod(context.rank, 2)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if context.rank == 0 else None
    address = said_by_rank_0(context, "lighthouse", lighthouse and lighthouse.address())
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "shard"))["shard"]
    torch.manual_seed(replica)
    module = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * (1 + replica))
    module(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert {p.to_local().shape[0] for p in module.parameters()} == ({3, 2} if place == 0 else {2, 1})

    def state() -> dict:
        return {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "seen": [replica, "x"]}

    def load(given: dict) -> None:
        module.load_state_dict(given["module"])
        optimizer.load_state_dict(given["optimizer"])
        loaded.append(given["seen"])

    def now() -> tuple:
        moments = [optimizer.state[p]["exp_avg"] for p in module.parameters()]
        tensors = [each.to_local().clone() for each in (*module.parameters(), *moments)]
        return tensors, optimizer.param_groups[0]["lr"], [replica, "x"]

    loaded: list = []
    before = now()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if place == 0 else None
    port = store.port if store is not None else 0
    context.store.set(f"port {context.rank}", str(port))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica_{replica}",
        store_addr="127.0.0.1",
        store_port=int(context.store.get(f"port {2 * replica}")),
        rank=place,
        world_size=2,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        timeout=LIMIT,
        use_async_quorum=False,
        checkpoint_transport=MeshcastTransport(lambda: {"user": {"default": state()}}, hostname="127.0.0.1"),
    )
    try:
        manager.start_quorum()
        assert manager.should_commit()
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, (before, now(), loaded))
        pair = everyone[place], everyone[2 + place]
        assert sorted(len(each[2]) for each in pair) == [0, 1]
        source, healed = pair if pair[1][2] else pair[::-1]
        assert healed[2] == [source[0][2]]
        assert healed[1][1] == source[0][1] != healed[0][1]
        for had, has, old in zip(source[0][0], healed[1][0], healed[0][0], strict=True):
            assert torch.equal(has, had)
            assert not torch.equal(has, old)
        assert all(torch.equal(a, b) for a, b in zip(source[0][0], source[1][0], strict=True))
    finally:
        context.wait_for_all("healed", limit=60.0)
        manager.shutdown(wait=False)


def one_to_three(context) -> None:
    """Rank 0 sends to all others: plain, strided, empty and scalar tensors, DTensors, tied ones, values."""
    transport = MeshcastTransport(hostname="127.0.0.1")
    where = said_by_rank_0(context, "one to three", transport.metadata())
    mesh = DeviceMesh("cpu", [context.rank], _init_backend=False, _rank=context.rank)
    x = torch.arange(12.0).view(3, 4)
    sent = {
        "plain": x,
        "strided": x.t()[:, 1:],
        "bf16": torch.randn(7, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "list": [x, {"deep": DTensor.from_local(x, mesh, [], run_check=False)}, 1.5, None, "text", LIMIT],
    }
    for step in (1, 2):
        if context.rank == 0:
            transport.send_checkpoint([1, 2, 3], step, sent, LIMIT)
            transport.disallow_checkpoint()
            assert transport.error is None
            continue
        got = transport.recv_checkpoint(0, where, step, LIMIT)
        assert list(got) == list(sent)
        for name in ("plain", "strided", "bf16", "scalar", "empty"):
            assert got[name].dtype == sent[name].dtype
            assert torch.equal(got[name], sent[name]), name
        assert torch.equal(got["list"][0], x)
        assert torch.equal(got["list"][1]["deep"].to_local(), x)
        assert got["list"][2:] == sent["list"][2:]


def nobody_sends(context) -> None:  # noqa: ARG001
    transport = MeshcastTransport(hostname="127.0.0.1")
    begin = time.monotonic()
    with pytest.raises(meshcast.DeadlineExceededError, match="timed out"):
        transport.recv_checkpoint(0, transport.metadata(), 3, timedelta(seconds=0.5))
    transport.send_checkpoint([1], 4, {"x": torch.ones(2)}, timedelta(seconds=1))
    transport.disallow_checkpoint()
    assert isinstance(transport.error, meshcast.DeadlineExceededError)
    transport.send_checkpoint([1], 4, {"x": torch.ones(2)}, timedelta(seconds=60))
    transport.shutdown()
    assert time.monotonic() - begin < 10


def send_or_receive(context, transport, where: str, receivers: list[int]) -> dict | None:
    """Rank 0 sends to all others that are left; its error is raised as theirs."""
    if context.rank:
        return transport.recv_checkpoint(0, where, 1, LIMIT)
    transport.send_checkpoint(receivers, 1, {"x": torch.ones(1 << 20)}, LIMIT)
    transport.disallow_checkpoint()
    if transport.error is not None:
        raise transport.error
    return None


def a_rank_is_lost(context) -> dict:
    """After it has heard what is to come, and before the tensors move."""
    dies = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if context.rank == VICTIM else None
    transport = MeshcastTransport(dies, hostname="127.0.0.1")
    where = said_by_rank_0(context, "lost", transport.metadata())
    begin = time.monotonic()
    with pytest.raises((meshcast.PeerLostError, meshcast.AbortedError)) as caught:
        send_or_receive(context, transport, where, [1, 2, 3])
    assert time.monotonic() - begin < 20
    context.wait_for_all("heard", [0, 1, 2], limit=60.0)
    # The others go on without it.
    where = said_by_rank_0(context, "again", transport.metadata())
    got = send_or_receive(context, transport, where, [1, 2])
    assert context.rank == 0 or bool((got["x"] == 1).all())
    context.wait_for_all("done", [0, 1, 2], limit=60.0)
    dist.destroy_process_group()
    return {"text": str(caught.value)}


CASES = [a_replica_heals, one_to_three, nobody_sends, a_rank_is_lost]
