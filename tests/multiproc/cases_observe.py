"""The log, the flight record and profiler ranges, in two processes; see test_observe.py for the variables."""

from __future__ import annotations

import json
import os
import signal
import time
import weakref
from pathlib import Path

import meshcast
import torch
import torch.distributed as dist
from meshcast.base.observe import FORMAT, Flight, Members
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 30.0
RECORD = os.environ["MESHCAST_FLIGHT_RECORD"]
FULL = torch.arange(12.0).reshape(4, 3)


def send(context, group=None, **options):
    x = sharded(FULL, quiet_mesh([0]), [Shard(0)], context.rank)
    return meshcast.reshard(x, quiet_mesh([1]), [Replicate()], group=group, **options)


def written(rank: int) -> list[dict]:
    return json.loads(Path(f"{RECORD}.rank{rank}").read_text())["calls"]


def recorded(context) -> None:
    before = len(meshcast.flight_record())
    for _ in range(3):
        send(context)
    handle = send(context, async_op=True)
    while not handle.is_completed():
        time.sleep(0.001)
    *ended, last = meshcast.flight_record()[before:]
    assert [call["op"] for call in ended] == ["reshard"] * 3
    assert [call["state"] for call in ended] == ["ended"] * 3
    assert [call["run"] for call in ended] == [0, 1, 2]
    assert last["state"] == "not waited for"
    assert [call["position"] for call in ended] == list(range(ended[0]["position"], ended[0]["position"] + 3))
    assert {call["lane"] for call in ended} == {0}
    assert {call["ranks"] for call in ended} == {(0, 1)}
    assert {call["what"].split(":")[0] for call in ended} == {"float32 (4, 3)"}
    line = send.__code__.co_firstlineno + 2
    assert {call["site"] for call in ended} == {f"{__file__}:{line} in send"}
    sent, received = (48, 0) if context.rank == 0 else (0, 48)
    for call in ended:
        assert (call["bytes_sent"], call["bytes_received"]) == (sent, received)
        assert call["seconds"] > 0
        assert abs(call["ratio"] - call["seconds"] / call["bound"]) < 1e-9
    handle.wait()
    assert meshcast.flight_record()[-1]["state"] == "ended"


def keeps_nothing_alive(context) -> None:
    """The record outlives its calls, but keeps neither their handles nor their tensors, and is bounded."""
    handle = send(context, async_op=True)
    result = weakref.ref(handle.wait())
    handle = weakref.ref(handle)
    context.wait_until_freed(handle, "the handle")
    context.wait_until_freed(result, "the result")
    assert meshcast.flight_record()[-1]["state"] == "ended"
    for _ in range(2500):
        Flight("filler", Members("nobody"), context.rank)
    assert len(meshcast.flight_record()) == 2000


def on_signal(context) -> None:
    """SIGUSR1 writes the record of a rank whose main thread waits in a call."""
    send(context)  # the plan is known from here on
    context.store.set(f"process {context.rank}", str(os.getpid()))
    context.wait_for_all("ready")
    if context.rank == 1:
        assert torch.equal(send(context).to_local(), FULL)
        return
    time.sleep(0.3)  # rank 1 waits by now
    os.kill(int(context.store.get("process 1")), signal.SIGUSR1)
    deadline = time.monotonic() + 20
    while not Path(f"{RECORD}.rank1").exists():
        assert time.monotonic() < deadline, "no record was written"
        time.sleep(0.01)
    last = written(1)[-1]
    assert (last["op"], last["state"], last["rank"]) == ("reshard", "unfinished", 1)
    record = json.loads(Path(f"{RECORD}.rank1").read_text())
    assert (record["format"], record["rank"], record["world"]) == (FORMAT, 1, 2)
    assert record["at"].endswith(" in send")  # where the main thread waits
    send(context)


def on_error(context) -> None:
    group = dist.new_group([0, 1])
    send(context, group)
    if context.rank == 1:
        try:
            send(context, group, timeout=0.5)
        except meshcast.DeadlineExceededError as error:
            last = written(1)[-1]
            assert last["state"] == "failed"
            assert last["error"] == f"DeadlineExceededError: {error}"
        else:
            raise AssertionError("nobody sent anything")
    context.wait_for_all("failed")


def profiled(context) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        send(context)
    names = {event.name for event in profile.events()}
    assert {"meshcast::reshard launch", "meshcast::reshard wait"} <= names


CASES = [recorded, keeps_nothing_alive, on_signal, on_error, profiled]
