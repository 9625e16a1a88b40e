"""The tensors of a transfer on one rank: what their elements are, whether they fit, where a call that changes
their type converts them, and what moves those that are not all on CPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .. import _C
from ..base.checks import dtype_name
from ..errors import Caller, LayoutError

__all__ = [
    "DeviceTypes",
    "device_types_of",
    "CASTS",
    "Casts",
    "Ends",
    "Medium",
    "REDUCTIONS",
    "STREAM_HEAD",
    "Shards",
    "Started",
    "Statistics",
    "Types",
    "apply_changes",
    "check_shards",
    "encode_changes",
    "ends_of",
    "filled",
    "fresh",
    "gpu_obstacle",
    "keep_boxes",
    "own_obstacle",
    "require_gpu",
    "resolved",
    "settled",
    "tensor_text",
    "types_of",
    "types_text",
]

REDUCTIONS: dict[torch.dtype, frozenset[str]] = {
    getattr(torch, name): frozenset(reductions) for name, reductions, _ in _C.ELEMENT_TYPES if reductions
}
"""The operations by which partial values of a type can be reduced; some types lack some: truth values have no
mean, complex numbers no order."""

DeviceTypes = tuple[str, str]  # of the source and the destination of a call: "cpu" or "cuda" each
CASTS = frozenset(getattr(torch, name) for name, _, casts in _C.ELEMENT_TYPES if casts)
"""Between these, kernels cast while they pack and unpack."""


Shards = Sequence[torch.Tensor | None]


def check_shards(
    shards: Shards,
    shapes: Sequence[tuple[int, ...] | None],
    dtypes: Sequence[torch.dtype],
    *,
    side: str,
    on_cpu: bool,
) -> None:
    """Raises LayoutError unless the shards are as their layouts say. shapes: None where this rank is not in
    the mesh. side: "source" or "destination"."""
    if len(shards) != len(shapes):
        raise LayoutError(f"expected {len(shapes)} {side} shards, one per tensor, found {len(shards)}")
    for index, (shard, shape, dtype) in enumerate(zip(shards, shapes, dtypes, strict=True)):
        what = f"the {side} shard of tensor {index}"
        if shard is None:
            if shape is not None and 0 not in shape:
                raise LayoutError(
                    f"this rank is in the {side} mesh and must give its shard of tensor {index}: "
                    f"expected {tensor_text(shape, dtype)}, found None"
                )
            continue
        found = tensor_text(shard.shape, shard.dtype)
        if shape is None:
            if shard.numel():
                raise LayoutError(
                    f"this rank is not in the {side} mesh and holds nothing of tensor {index}: expected "
                    f"None, found {found}"
                )
        elif shard.shape != shape or shard.dtype != dtype or shard.is_cpu is not on_cpu:
            raise LayoutError(
                f"{what} does not fit its layout: expected {tensor_text(shape, dtype)} on "
                f"{'cpu' if on_cpu else 'cuda'}, found {found} on {shard.device}"
            )
        elif side == "destination" and _is_lazy(shard):
            raise LayoutError(
                f"{what} is a view that conjugates or negates its memory when it is read ({found}): expected "
                "memory that holds the values themselves; give the tensor behind the view, or a clone()"
            )


def filled(shards: Shards) -> list[torch.Tensor | None]:
    return [None if shard is None or shard.numel() == 0 else settled(shard) for shard in shards]


def resolved(shards: Shards) -> Shards:
    """The shards with conjugations and negations done that torch has only noted (`x.conj()`, and gradients of
    such): transfers read the memory as it is."""
    if not any(shard is not None and _is_lazy(shard) for shard in shards):
        return shards
    return [None if shard is None else shard.resolve_conj().resolve_neg() for shard in shards]


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind the wrapper in which functional collectives return before they have finished; the
    wrapper has no memory of its own."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def fresh(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device | None = None) -> torch.Tensor:
    """Returns a dense tensor for a call to fill, whose values are not set; without `device` on the CPU.
    There a large one has memory that was freed by the last one of its size, or asks for huge pages."""
    if device is None or str(device) == "cpu":
        return _C.fresh_tensor(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


# Boxes as their changes since an earlier version; see csrc/core/memory/changes.h and _C.pyi.
STREAM_HEAD = _C.STREAM_HEAD
keep_boxes, encode_changes, apply_changes = _C.keep_boxes, _C.encode_changes, _C.apply_changes


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of a tensor: source, on the way, destination


class Ends(NamedTuple):
    """The types that a transfer is given of a tensor, at its source, and fills, at its destination."""

    source: torch.dtype
    destination: torch.dtype


class Casts(NamedTuple):
    """Ends of the tensors of a transfer and of its backward, which has none where there is no gradient; the
    same on all ranks. Their types in flight are those of the problems."""

    forth: tuple[Ends, ...]
    back: tuple[Ends, ...] = ()


def ends_of(
    source: torch.dtype,
    wire: torch.dtype,
    destination: torch.dtype,
    device_types: DeviceTypes,
    scale: float = 1.0,
) -> Ends:
    """Decides what a transfer casts: between GPUs, and between floats of 32 bits or less, all of it, so that
    no tensor is made in between. Elsewhere the ends are what travels, and the caller converts with torch. A
    function of what all ranks know.

    wire: what travels, the type of either end. scale: what the caller multiplies with afterwards, in the type
    that travelled. float16 that becomes bfloat16 only where it arrives, as after a sum in float16, is left to
    torch too: a rank forwards what it has unpacked, and 65504 would become infinite there.
    """
    cast_by_kernels = device_types == ("cuda", "cuda") and CASTS.issuperset({source, destination})
    too_wide = source == wire == torch.float16 and destination == torch.bfloat16
    if not cast_by_kernels or too_wide or scale != 1.0:
        return Ends(wire, wire)
    return Ends(source, destination)


def types_of(wires: Iterable[torch.dtype], ends: Sequence[Ends]) -> tuple[Types, ...]:
    """By tensor; empty where the transfer casts none."""
    if all(end.source == end.destination for end in ends):
        return ()
    return tuple((end.source, wire, end.destination) for wire, end in zip(wires, ends, strict=True))


def types_text(types: Sequence[Types]) -> str:
    """Names the casts, and of which of the tensors they are; equal texts mean equal casts."""
    found: dict[str, list[int]] = {}
    for index, (source, wire, destination) in enumerate(types):
        if source != destination:
            text = f"{dtype_name(source)} to {dtype_name(destination)} as {dtype_name(wire)}"
            found.setdefault(text, []).append(index)
    return "; ".join(f"casts {text}: tensors {_ranges(indices)}" for text, indices in found.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs as "3-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class Statistics:
    """Figures of a work of a core, once it has completed, and its messages, at any time."""

    def __init__(self, work: Any, core: Any = _C) -> None:
        """core: that started it; any may be asked where it is one of C++."""
        self._work, self._core = work, core

    def __call__(self) -> dict[str, Any]:
        return self._core.stats(self._work)

    def traffic(self) -> list[tuple[int, bool, int, int]]:
        """Returns peer, whether it is sent to, messages and bytes of each direction of each peer."""
        return self._core.traffic(self._work)


Started = tuple[Any, Statistics]  # a work, and its statistics


class Medium(ABC):
    """Place of the tensors of a transfer, as its calls need it. One object serves one transfer."""

    by_host: ClassVar[bool]
    """Whether the host moves the bytes, over the interfaces of its group."""

    def check(self, shards: Shards) -> None:  # noqa: B027  most can move all
        """Raises LayoutError for shards it cannot move. In the caller's thread."""

    @abstractmethod
    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        """Returns the shards where they can be moved; in the caller's thread, before the call is counted.
        What it raises is reported to the other ranks."""

    @abstractmethod
    def ready(self, call: _C.MediumCall) -> bool:
        """Returns whether a start would not have to wait. Only while no command of the group is running."""

    def connect(self, core: _C.GroupCore, call: _C.MediumCall, ordinal: int) -> None:  # noqa: B027
        """Makes connections of its own, where some lack, once the ranks have agreed on the call `ordinal`."""

    @abstractmethod
    def start(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        """Starts the plan; the arguments are those of GroupCore.start."""

    def begin(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        """The same for the group; raises typed errors."""
        try:
            return self.start(core, call, agreed, **arguments)
        except Exception as error:
            found = Caller(call.op, call.flight.rank).typed(error)
            raise found from error.__cause__ if found is error else error

    @abstractmethod
    def text(self) -> str:
        """Returns what a descriptor says of it; that of CPUs names no place."""


def device_types_of(source: str, destination: str) -> DeviceTypes:
    """Returns where both ends of a call are, from the device types of their meshes. Raises LayoutError for
    one that is neither "cpu" nor "cuda"."""
    for kind in (source, destination):
        if kind not in ("cpu", "cuda"):
            raise LayoutError(f"the meshes are on {kind}; tensors on cpu and cuda can be moved")
    return source, destination


def require_gpu(*, copies_only: bool = False) -> None:
    """Raises LayoutError where this process can move nothing on GPUs. copies_only: nothing but torch's copies
    between a GPU and the host is needed."""
    reason = own_obstacle(copies_only=copies_only)
    if reason:
        meshes = "one of the meshes is" if copies_only else "the meshes are"
        raise LayoutError(f"{meshes} on cuda, but {reason}")


def own_obstacle(*, copies_only: bool) -> str:
    """Why this process can move nothing on GPUs; empty if it can. copies_only: see require_gpu."""
    built = copies_only or hasattr(_C, "GpuGroupCore")
    return gpu_obstacle(built, torch.version.cuda, torch.cuda.is_available())


def gpu_obstacle(built: bool, torch_cuda: str | None, available: bool) -> str:
    """Why a process cannot use a GPU; empty if it can. built: meshcast has CUDA code; torch_cuda: the CUDA of
    torch."""
    if torch_cuda is None:
        return "torch is a CPU build: install a CUDA build of torch and build meshcast for it"
    if not built:
        return "this build of meshcast has no CUDA code: build it again with MESHCAST_CUDA=ON"
    if not available:
        return "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES and the driver"
    return ""
