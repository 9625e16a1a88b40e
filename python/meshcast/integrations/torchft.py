"""A checkpoint transport for torchft: one that is ahead sends to all that join as one multicast."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten
from torchft.checkpointing.transport import CheckpointTransport

from ..base.observe import log
from ..base.wire import pack, unpack
from ..errors import Caller, DeadlineExceededError
from ..groups.store import within
from ..layout import Layout
from ..resharding.compiled import as_dtensor
from ..resharding.meeting import Meeting
from ..resharding.state_background import behind, own_stream

__all__ = ["MeshcastTransport"]

T = TypeVar("T")

_OP = "MeshcastTransport"
_OFFER = f"{_OP} offer"  # in the store of a sender: an `_OpenCheckpoint`
_PAUSE = 0.02  # seconds between two checks for a checkpoint


class _OpenCheckpoint(NamedTuple):
    """A checkpoint that receivers may join; without a step there is none. number, size: of the meeting."""

    step: int | None = None
    number: int = 0
    size: int = 0


class MeshcastTransport(CheckpointTransport[T]):
    """For ``Manager(..., checkpoint_transport=MeshcastTransport())``.

    Replica groups share no process group, and their members change: the sender and those that it sends to
    meet in a store of the sender for each checkpoint, and part after it. Tensors are read where they are.
    DTensors travel as the shard of this rank, to the rank of the same place in the other replica group.

    Args:
        state_dict: of this replica as it is; what it has arrives in place, and DTensors keep its mesh.
            Otherwise tensors arrive in new memory of the CPU, DTensors on the sender's mesh.
        hostname: of this rank, as others reach it; its own name by default.

    Raises, from recv_checkpoint: DeadlineExceededError where no checkpoint was offered, or the others did
    not come, within the timeout; PeerLostError where one is lost in the middle. torchft's Manager reports
    them, and tries again with the next quorum. For a sender that is no failure of its own: it is logged,
    and `error` has it until the next checkpoint.
    """

    def __init__(
        self, state_dict: Callable[[], object] | None = None, *, hostname: str | None = None
    ) -> None:
        self._state_dict = state_dict
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._address = f"{hostname or socket.gethostname()}:{self._store.port}"
        self._store.set(_OFFER, pack(_OpenCheckpoint()))
        self._sent = 0
        self._meeting: Meeting | None = None
        self._sending: threading.Thread | None = None
        self.error: Exception | None = None

    def metadata(self) -> str:
        return self._address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Returns at once. The tensors must not change before disallow_checkpoint has returned."""
        self.disallow_checkpoint()
        self.error = None
        if not dst_ranks:
            return
        limit = timeout.total_seconds()
        deadline = time.monotonic() + limit
        leaves, tree = tree_flatten_with_path(state_dict)
        # Leaves and the tree are objects of the user, whatever pickle can send.
        said = [_Tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        described = pickle.dumps((tree, said))
        tensors = {
            str(index): _local(leaf)
            for index, (_, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        self._sent += 1
        number, size, stream = self._sent, 1 + len(dst_ranks), own_stream()
        meeting = self._meeting = Meeting(self._store, _name(number), range(size), 0, limit)
        self._store.set(_OFFER, pack(_OpenCheckpoint(step, number, size)))

        def send() -> None:
            try:
                with behind(stream):
                    meeting.move({"checkpoint": described}, None, deadline=deadline)
                    if tensors:
                        meeting.move(tensors, None, deadline=deadline)
            except Exception as error:
                self.error = error
                log.warning(
                    "%s: the checkpoint of step %d did not reach replicas %s: %s", _OP, step, dst_ranks, error
                )
            self._store.set(_OFFER, pack(_OpenCheckpoint()))
            self._store.delete_key(_seats(number))
            meeting.close()

        self._sending = threading.Thread(target=send, name="meshcast-checkpoint", daemon=True)
        self._sending.start()

    def disallow_checkpoint(self) -> None:
        """Waits until the checkpoint has arrived or failed, not longer than the timeout that it got."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def shutdown(self, wait: bool = True) -> None:
        """Ends a checkpoint that is in flight."""
        if self._meeting is not None:
            self._meeting.close()
        if wait:
            self.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        begin = time.monotonic()
        deadline = begin + timeout.total_seconds()
        host, port = metadata.rsplit(":", 1)
        store = within(
            max(deadline - time.monotonic(), 1e-3),
            lambda: dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout),
            f"connecting with replica {src_rank}",
            Caller(_OP, phase="agree"),
        )
        meeting = self._joined(store, step, deadline)
        if meeting is None:
            raise Caller(_OP, phase="wait").error(
                DeadlineExceededError,
                f"timed out after {time.monotonic() - begin:.1f} s: replica {src_rank} ({metadata}) has not "
                f"offered a checkpoint of step {step}",
                limit=timeout.total_seconds(),
            )
        try:
            tree, described = pickle.loads(meeting.move({}, None, deadline=deadline)["checkpoint"])
            paths = [path for path, _ in tree_flatten_with_path(tree_unflatten(described, tree))[0]]
            mine = self._state_dict() if self._state_dict is not None else None
            own: dict[Any, Any] = dict(tree_flatten_with_path(mine)[0])
            kept, where = {}, {}
            receivers = Layout(list(range(1, meeting.size)), [Replicate()])
            for index, (path, leaf) in enumerate(zip(paths, described, strict=True)):
                if isinstance(leaf, _Tensor):
                    if leaf.fits(own.get(path)):
                        kept[str(index)] = _local(own[path])
                    on_gpu = str(index) in kept and kept[str(index)].is_cuda
                    where[str(index)] = (receivers, "cuda") if on_gpu else receivers
            arrived = meeting.move({}, where, kept, deadline=deadline) if where else {}
        finally:
            meeting.close()
        leaves = [
            leaf.made(arrived[str(index)], own.get(path)) if isinstance(leaf, _Tensor) else leaf
            for index, (path, leaf) in enumerate(zip(paths, described, strict=True))
        ]
        return tree_unflatten(leaves, tree)

    @staticmethod
    def _joined(store: dist.Store, step: int, deadline: float) -> Meeting | None:
        """The meeting for the checkpoint of that step, in which this rank takes a seat; None where there is
        none by the deadline."""
        tried = 0  # number of a meeting whose seats are taken
        while True:
            offer = unpack(_OpenCheckpoint, store.get(_OFFER).decode())
            if offer.step == step and offer.number != tried:
                tried = offer.number
                seat = store.add(_seats(tried), 1)
                if seat < offer.size:
                    limit = max(deadline - time.monotonic(), 1e-3)
                    return Meeting(store, _name(tried), range(offer.size), seat, limit)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE)


class _Tensor:
    """A leaf that is a tensor, without its elements. spec: of a DTensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        local = _local(tensor)
        self.shape, self.dtype = local.shape, local.dtype
        self.spec = tensor._spec if isinstance(tensor, DTensor) else None

    def fits(self, own: object) -> bool:
        """Returns whether this tensor can arrive in `own`."""
        if not isinstance(own, torch.Tensor) or isinstance(own, DTensor) != (self.spec is not None):
            return False
        local = _local(own)
        return local.shape == self.shape and local.dtype == self.dtype

    def made(self, local: torch.Tensor, own: Any) -> torch.Tensor:
        if self.fits(own):
            assert isinstance(own, torch.Tensor)
            return own
        return local if self.spec is None else as_dtensor(local, self.spec)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _name(number: int) -> str:
    return f"{_OP} {number}"


def _seats(number: int) -> str:
    return f"{_name(number)} seats"
