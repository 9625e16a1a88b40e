"""A rank dies or freezes while others exchange messages with it on a group of backend meshcast: what waits
for it ends with an error that names it, what does not goes on, and the process group can be destroyed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, DeadlineExceededError, PeerLostError

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

FAULT = os.environ["FAULT"]  # "none", "kill", "freeze", or "orphan": a kill that leaves a forked child behind
VICTIM = 2
SMALL, LARGE = 100, 16 << 20  # floats
LIMIT = 3.0  # seconds, of the group in which a rank freezes


def exchange(rank: int, group, peer: int, value: float) -> None:
    """Both ways."""
    got = torch.zeros(SMALL)
    works = [
        dist.isend(torch.full((SMALL,), value), peer, group=group, tag=7),
        dist.irecv(got, peer, group=group, tag=7),
    ]
    for work in works:
        work.wait()
    assert bool((got == value).all()), rank


def messages_with_a_lost_rank(context) -> dict[str, float]:
    rank = context.rank
    limit = timedelta(seconds=LIMIT if FAULT == "freeze" else 60.0)
    group = dist.new_group(timeout=limit)
    if rank == VICTIM:
        for peer in (0, 1):
            dist.send(torch.ones(SMALL), peer, group=group)
        works = [
            dist.isend(torch.ones(LARGE), 0, group=group, tag=1),
            dist.irecv(torch.ones(LARGE), 0, group=group),
        ]
        context.store.set("victim", str(os.getpid()))
        context.wait_for_all("ready", limit=60.0)
        if FAULT == "none":
            dist.send(torch.ones(SMALL), 1, group=group, tag=3)
            dist.send(torch.ones(SMALL), 1, group=group, tag=4)
            for work in works:
                work.wait()
            context.wait_for_all("through", limit=60.0)
            dist.destroy_process_group()
            return {}
        if FAULT == "orphan":
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            context.store.set("orphan", str(child))
        os.kill(os.getpid(), signal.SIGSTOP if FAULT == "freeze" else signal.SIGKILL)
        time.sleep(600)
    dist.recv(torch.zeros(SMALL), VICTIM, group=group)
    tensors = [torch.zeros(LARGE), torch.zeros(SMALL), torch.zeros(SMALL), torch.zeros(SMALL)]
    if rank == 0:
        works = [dist.isend(tensors[0], VICTIM, group=group)]  # the victim has called its other end
        context.wait_for_all("ready", limit=60.0)
        works.append(dist.irecv(tensors[0].clone(), VICTIM, group=group, tag=1))
    else:
        works = [dist.irecv(tensors[i], VICTIM, group=group, tag=2 + i) for i in (1, 2)]
        context.wait_for_all("ready", limit=60.0)
        anybody = dist.irecv(tensors[3], group=group, tag=9)
    begin = time.monotonic()
    exchange(rank, group, 1 - rank, 5.0)
    errors = []
    for work in works:
        try:
            work.wait()
        except (PeerLostError, DeadlineExceededError, AbortedError) as error:
            errors.append(error)
            assert f"rank {VICTIM}" in str(error) and error.peer == VICTIM, error
    elapsed = time.monotonic() - begin
    if FAULT == "none":
        assert not errors, errors
    else:
        kind = DeadlineExceededError if FAULT == "freeze" else PeerLostError
        assert len(errors) >= len(works) - 1, errors  # one may have been nearly through
        assert isinstance(errors[0], kind), errors
        assert not [error for error in errors[1:] if not isinstance(error, (kind, AbortedError))], errors
        with pytest.raises((PeerLostError, AbortedError), match=f"rank {VICTIM}"):
            dist.send(torch.zeros(LARGE), VICTIM, group=group, tag=5)
    exchange(rank, group, 1 - rank, 6.0)  # the others go on
    if rank == 0:
        dist.send(torch.full((SMALL,), 8.0), 1, group=group, tag=9)
    else:
        anybody.wait()
        assert anybody._source_rank() == 0 and bool((tensors[3] == 8.0).all())
    context.wait_for_all("through", [0, 1] if FAULT != "none" else None, limit=60.0)
    if FAULT == "freeze" and rank == 0:
        os.kill(int(context.store.get("victim")), signal.SIGKILL)
    if FAULT == "orphan" and rank == 0:
        os.kill(int(context.store.get("orphan")), signal.SIGKILL)
    begin = time.monotonic()
    dist.destroy_process_group()
    return {"elapsed": elapsed, "destroyed": time.monotonic() - begin}


CASES = [messages_with_a_lost_rank]
