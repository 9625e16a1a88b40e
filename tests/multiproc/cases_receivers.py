"""What a rank that only receives a state dict does not import."""

from __future__ import annotations

import sys

import meshcast
import torch
from multiproc.meshes import quiet_mesh
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 30.0
SLOW_TO_IMPORT = "torch._dynamo"  # half a second, which a first call would take longer


def nothing_slow_is_imported(context) -> None:
    """By reshard_state_dict and WeightSync; torch imports it for DTensor(...) and DTensor.from_local."""
    assert SLOW_TO_IMPORT not in sys.modules, "something else has imported it: this test would see nothing"
    full = torch.arange(15.0).reshape(5, 3)
    held = {"w": full} if context.rank == 0 else None
    where = {"w": (quiet_mesh([1, 2]), [Shard(0)])}
    got = meshcast.reshard_state_dict(held, where)
    sync = meshcast.WeightSync(held, where)
    if context.rank == 0:
        sync.push(1)
    else:
        assert sync.pull() == 1
        rows = slice(0, 3) if context.rank == 1 else slice(3, 5)
        for state in (got, sync.state):
            assert torch.equal(state["w"].to_local(), full[rows])
            assert state["w"].shape == (5, 3)
            assert state["w"].placements == (Shard(0),)
    assert SLOW_TO_IMPORT not in sys.modules
    context.wait_for_all("close")
    sync.close()


CASES = [nothing_slow_is_imported]
