"""One rank of Megatron Core: a GPT of tensor-parallel degree 2, twice on four hosts, into another layout by
`swap_model_weights`, with its own service for the CPU and with meshcast's. Values are checked bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.refit import swap_model_weights
from megatron.core.transformer.transformer_config import TransformerConfig
from meshcast.integrations.megatron import MeshcastCopyService

from ..harness import Found
from ..ranks import Report
from .clients import in_turns

DTYPE = torch.bfloat16
# The service over gloo makes a stream of a GPU, only to wait for it; some releases also wait for the GPU.
torch.cuda.Stream = lambda *_: None  # type: ignore[assignment, misc]
torch.cuda.synchronize = lambda *_: None
HIDDEN, FFN, HEADS, LAYERS, VOCABULARY = 512, 1408, 8, 4, 4096


def model(degree: int) -> GPTModel:
    """On `degree` ranks, with replicas on the others."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(degree, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        use_cpu_initialization=True, tensor_model_parallel_size=degree, params_dtype=DTYPE,
        pipeline_dtype=DTYPE, gated_linear_unit=True,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=64,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip


def part(parameter: torch.Tensor, degree: int, rank: int, start: int) -> torch.Tensor:
    """What this rank holds of a tensor whose elements are numbered, from `start`."""
    shape = list(parameter.shape)
    cut = getattr(parameter, "tensor_model_parallel", False)
    if cut:
        shape[parameter.partition_dim] *= degree
    size = torch.Size(shape).numel()
    whole = (torch.arange(size, dtype=torch.int32) * 7 + start).remainder(251).to(DTYPE).view(shape)
    if not cut:
        return whole
    stride = parameter.partition_stride  # 2: gate and up are cut each by itself
    pieces = whole.chunk(degree * stride, parameter.partition_dim)
    return torch.cat([pieces[k * degree + rank % degree] for k in range(stride)], parameter.partition_dim)


class Messages(MeshcastCopyService):
    """Counts what Megatron's plan sends, which names a source for each part of each rank's target, and moves
    nothing: the first calls of both services are yet to come."""

    def __init__(self) -> None:
        super().__init__(timeout=100)
        self.taken_in = 0  # bytes
        # Address, shape and bytes of a part of a parameter, whoever gets it: a multicast sends it once.
        self.sent: set[tuple[int, tuple[int, ...], int]] = set()

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        if src_rank != self.rank:
            self.taken_in += dest_tensor.nbytes
        super().submit_recv(dest_tensor, src_rank, task_id)

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        if dest_rank != self.rank:
            self.sent.add((src_tensor.data_ptr(), tuple(src_tensor.shape), src_tensor.nbytes))
        super().submit_send(src_tensor, dest_rank, task_id)

    def run(self) -> None:
        """In place of moving them."""

    def bound(self, rate: float) -> tuple[float, int]:
        """Seconds that nothing beats which carries these messages, and bytes of the busiest link.

        rate: of a link, bytes/s."""
        out = sum(nbytes for *_, nbytes in self.sent)
        busiest = torch.tensor([max(out, self.taken_in)], dtype=torch.float64)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        return float(busiest) / rate, int(busiest)


def rank(job: Found, report: Report) -> None:
    here, degree = dist.get_rank(), job["degree"]
    source, target = model(2), model(degree)
    told = Messages()
    swap_model_weights(source, target, refit_method=told)
    bound, nbytes = told.bound(job["mbit"] * 1e6 / 8)
    ours = MeshcastCopyService(timeout=100)
    state: dict[str, Any] = {"number": 0}

    def start(index: int) -> int:
        return 31 * index + 13 * state["number"]  # parameters of one shape differ, and rounds do

    def fill() -> None:
        with torch.no_grad():
            for index, parameter in enumerate(source.parameters()):
                parameter.copy_(part(parameter, 2, here, start(index)))
            for parameter in target.parameters():
                parameter.fill_(-1)

    def seen() -> int:
        wrong = 0
        for index, parameter in enumerate(target.parameters()):
            wanted = part(parameter, degree, here, start(index))
            wrong += int((parameter.detach() != wanted).sum()) * DTYPE.itemsize
        state["number"] += 1
        fill()
        return wrong

    fill()
    ways = in_turns(
        {
            "Megatron's service over gloo": lambda _: swap_model_weights(source, target, refit_method="gloo"),
            "`MeshcastCopyService`": lambda _: swap_model_weights(source, target, refit_method=ours),
        },
        job["rounds"],
        seen,
    )
    report("found", {"nbytes": nbytes, "bound": bound, "ways": ways})
