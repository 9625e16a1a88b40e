"""A state dict as one call: the tensors of a GPT with 1.3 billion parameters (24 layers, hidden size 2048),
every dimension but the number of layers divided by 21, from four tensor-parallel ranks with two replicas to
two with four."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard

from meshcast.layout import Layout

from .case import Case, Tensor

_LAYERS = 24
_HIDDEN = 96
_VOCABULARY = 2400
_POSITIONS = 96
_COLUMNS, _ROWS, _WHOLE = Shard(0), Shard(1), Replicate()  # of a weight (outputs, inputs)

_LAYER: list[tuple[tuple[int, ...], Placement]] = [
    ((_HIDDEN,), _WHOLE), ((_HIDDEN,), _WHOLE),  # norm
    ((3 * _HIDDEN, _HIDDEN), _COLUMNS), ((3 * _HIDDEN,), _COLUMNS),  # query, key, value
    ((_HIDDEN, _HIDDEN), _ROWS), ((_HIDDEN,), _WHOLE),  # projection
    ((_HIDDEN,), _WHOLE), ((_HIDDEN,), _WHOLE),  # norm
    ((4 * _HIDDEN, _HIDDEN), _COLUMNS), ((4 * _HIDDEN,), _COLUMNS),
    ((_HIDDEN, 4 * _HIDDEN), _ROWS), ((_HIDDEN,), _WHOLE),
]  # fmt: skip
_OUTSIDE: list[tuple[tuple[int, ...], Placement]] = [
    ((_VOCABULARY, _HIDDEN), _COLUMNS), ((_POSITIONS, _HIDDEN), _WHOLE), ((_HIDDEN,), _WHOLE),
    ((_HIDDEN,), _WHOLE), ((_VOCABULARY, _HIDDEN), _COLUMNS),
]  # fmt: skip


def _tensor(shape: tuple[int, ...], tensor_parallel: Placement) -> Tensor:
    src = Layout([[0, 1, 2, 3], [4, 5, 6, 7]], [Replicate(), tensor_parallel])
    dst = Layout([[8, 9], [10, 11], [12, 13], [14, 15]], [Replicate(), tensor_parallel])
    return Tensor(shape, src, dst)


_FIRST, *_REST = [_tensor(*row) for row in (*_OUTSIDE, *_LAYER * _LAYERS)]

CASES = [
    Case(
        "state dict", "state-dict", *_FIRST, f"{len(_REST) + 1} tensors, 2x4 to 4x2@8, tensor parallel",
        fixed=True, more=tuple(_REST),
    )
]  # fmt: skip
