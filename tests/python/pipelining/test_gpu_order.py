"""What the runtime enqueues on a GPU, and in which order: real schedules, stages and modules over transfers
that only write down what they are asked for. No GPU: nothing that was started is ever over, which the host
must not mind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.pipelining import PipelineStage
from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.edge import Delivery
from meshcast.pipelining.parallel import Way
from meshcast.pipelining.recipe import Recipe
from meshcast.pipelining.runtime import Runtime
from meshcast.pipelining.trace import GpuClock, Trace
from meshcast.pipelining.wiring import StageValue, Wiring
from torch import nn
from torch.distributed.tensor import Replicate

pytestmark = pytest.mark.timeout(60)

STAGES, MICROBATCHES = 3, 6
GPU = torch.device("cuda", 0)
ROWS = 2  # samples of a micro-batch


@dataclass
class Stream:
    """The compute stream: what was enqueued, in order. Marks are positions in it."""

    ops: list[str] = field(default_factory=list)

    def position(self, op: str) -> int:
        assert self.ops.count(op) == 1, (op, self.ops)
        return self.ops.index(op)


@dataclass
class Mark:
    at: int

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return float(end.at - self.at)


class Handle:
    """A transfer that never ends while the step runs."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream, self.name, self.over = stream, name, False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.stream.ops.append(f"wait {self.name}")

    def figures(self) -> dict[str, Any]:
        assert self.over, f"{self.name} was asked what it did before it was over"
        return {"bytes_sent": 8, "seconds": 0.5}


class FakeTransfers:
    """Writes down behind what each transfer comes. Buffers are on the CPU."""

    relays = False

    def __init__(self, stream: Stream, consumer: int, kind: str, started: dict[str, int]) -> None:
        self.stream, self.kind, self.started = stream, kind, started
        self.consumers = (consumer,)
        self.deliveries = (Delivery(0, Layout([0], [Replicate()]), {consumer: [0]}),)
        self.sent: list[Handle] = []
        self.counts = {"SEND": 0, "RECV": 0}

    def _start(self, verb: str) -> Handle:
        name = f"{verb}_{self.kind} {self.counts[verb]}"
        self.counts[verb] += 1
        self.started[name] = len(self.stream.ops)
        return Handle(self.stream, name)

    def send(self, tensors: list[torch.Tensor], timeout: float) -> Handle:  # noqa: ARG002
        self.sent.append(self._start("SEND"))
        return self.sent[-1]

    def receive(self, timeout: float) -> tuple[Handle, list[torch.Tensor]]:  # noqa: ARG002
        return self._start("RECV"), [torch.ones(ROWS, 4)]

    def bytes_sent(self, handle: Handle) -> int:  # noqa: ARG002
        return 8


class Logged(nn.Module):
    """A layer whose forward, and both parts of whose backward, are written down."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.layer = nn.Linear(4, 4)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stream.ops.append(f"F {self.forwards}")
        self.forwards += 1
        return self.layer(x)


class Feed:
    def arguments(self, microbatch: int) -> list[Any]:  # noqa: ARG002
        return [torch.ones(ROWS, 4)]

    def keywords(self, microbatch: int) -> dict[str, Any]:  # noqa: ARG002
        return {}

    keep_outputs = False


class Owner:
    """The schedule: the loss of the last stage is the sum of its output."""

    def __init__(self) -> None:
        self.losses: dict[int, torch.Tensor] = {}

    def _maybe_compute_loss(self, stage: Any, output: Any, _targets: Any, number: int) -> None:
        self.losses[number] = output.sum()
        stage.loss_taken(number)

    def _maybe_get_loss(self, stage: Any, number: int) -> Any:
        return self.losses[number] if stage.is_last else None


@dataclass
class Run:
    runtime: Runtime
    stream: Stream
    started: dict[str, int]  # transfer -> how much the compute stream held then
    edges: list[FakeTransfers]
    row: list[Action]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class LoggedStage(PipelineStage):
    """Its backwards are written down: whole, of the inputs, of the weights."""

    stream: Stream

    def backward_one_chunk(
        self, number: int, loss: Any = None, full_backward: bool = True, last: bool = False
    ) -> None:
        self.stream.ops.append(f"{'B' if full_backward else 'I'} {number}")
        super().backward_one_chunk(number, loss, full_backward, last)

    def backward_weight_one_chunk(self, number: int, last: bool = False) -> None:
        self.stream.ops.append(f"W {number}")
        super().backward_weight_one_chunk(number, last)


def step(
    monkeypatch: pytest.MonkeyPatch, schedule: str, index: int, delayed: bool, overlap: bool = True
) -> Run:
    """One step of stage `index` of a pipeline, every transfer of which stays in flight."""
    stream, started = Stream(), {}
    module = Logged(stream)
    stage = LoggedStage(module, index, STAGES, torch.device("cpu"))
    stage.device, stage.stream, stage.has_backward = GPU, stream, True
    monkeypatch.setattr(GpuClock, "mark", lambda _: Mark(len(stream.ops)))
    value = StageValue((ROWS, 4), torch.float32, True, Layout([0], [Replicate()]))
    links = [(each, each + 1) for each in range(STAGES - 1)]
    mine = [link for link in links if index in link]
    forward = {link: FakeTransfers(stream, link[1], "F", started) for link in mine}
    backward = {link: FakeTransfers(stream, link[1], "B", started) for link in mine}
    wiring = Wiring(
        edges=(), links=links, values=[[value]] * (STAGES - 1), inputs={index: {0: value} if index else {}},
        ways={index: Way(None if index == STAGES - 1 else [(value.shape, value.dtype)])},
        forward={link: [each] for link, each in forward.items()}, backward=backward, free_lane=0,
    )  # type: ignore[arg-type]  # fmt: skip
    recipe = Recipe(schedule, STAGES, MICROBATCHES, None, None, None, {}, delayed)
    row = recipe.lowered(STAGES, train=True)[index]
    runtime = Runtime(Owner(), {index: stage}, wiring, 10.0, overlap=overlap)
    runtime.run(row, {index: Feed()}, [wiring] * MICROBATCHES, train=True)
    return Run(runtime, stream, started, [*forward.values(), *backward.values()], row)


CASES = [
    (schedule, index, delayed)
    for schedule, delayed in (
        ("GPipe", False), ("1F1B", False), ("Eager1F1B", False), ("Eager1F1B", True), ("ZBH1", False),
        ("ZBH2", False),
    )
    for index in range(STAGES)
]  # fmt: skip


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("schedule", "index", "delayed"), CASES)
def test_compute_waits_for_what_it_needs_and_sends_for_nothing(
    monkeypatch: pytest.MonkeyPatch, schedule: str, index: int, delayed: bool
) -> None:
    run = step(monkeypatch, schedule, index, delayed)
    ops, at = run.stream.ops, run.stream.position
    first_backward = "I" if any(action.kind is ActionKind.I for action in run.row) else "B"
    last_compute = max(at(op) for op in ops if op[0] in "FBIW" and not op.startswith("wait"))
    for k in range(MICROBATCHES):
        if index > 0:
            # Right before the forward, and only there.
            assert at(f"F {k}") == at(f"wait RECV_F {k}") + 1
            assert run.started[f"RECV_F {k}"] <= at(f"wait RECV_F {k}")
            # The gradient leaves behind what made it and, where weights are late, before they are enqueued.
            sent = run.started[f"SEND_B {k}"]
            assert sent > at(f"{first_backward} {k}")
            if first_backward == "I":
                assert sent <= at(f"W {k}"), "weight gradients could not hide it"
        if index < STAGES - 1:
            assert at(f"{first_backward} {k}") == at(f"wait RECV_B {k}") + 1
            assert run.started[f"SEND_F {k}"] == at(f"F {k}") + 1
    waits = [op for op in ops if op.startswith("wait SEND")]
    assert len(waits) == MICROBATCHES * (2 if 0 < index < STAGES - 1 else 1)
    assert all(at(op) > last_compute for op in waits), "compute waited for a send"
    assert run.runtime.bytes_sent == 8 * len(waits)


@pytest.mark.usefixtures("alone")
def test_without_overlap_compute_waits_for_each_send_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = step(monkeypatch, "1F1B", 1, False, overlap=False)
    for kind, maker in (("F", "F"), ("B", "B")):
        for k in range(MICROBATCHES):
            assert run.stream.position(f"wait SEND_{kind} {k}") == run.stream.position(f"{maker} {k}") + 1


@pytest.mark.usefixtures("alone")
def test_the_trace_tells_when_the_gpu_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are positions in the stream, a millisecond each; waits and compute follow each other in it."""
    run = step(monkeypatch, "1F1B", 1, False)
    for edge in run.edges:
        for handle in edge.sent:
            handle.over = edge.kind == "F"
    trace = run.runtime.trace
    assert trace is run.runtime.trace and len(trace.events) == len(run.runtime.trace.events)
    spans: dict[str, list[tuple[str, float, float]]] = {}
    for action, begin, end in trace.events:
        kind = action.kind
        category = "compute" if kind.is_compute else "wait" if kind.is_recv else "transfer"
        spans.setdefault(category, []).append((str(action), begin, end))
    assert len(spans["compute"]) == len(spans["wait"]) == 2 * MICROBATCHES
    for (_, _, waited), (name, begin, end) in zip(spans["wait"], spans["compute"], strict=True):
        assert begin == pytest.approx(waited, abs=1e-9), "compute begins where the wait ends"
        assert end - begin == pytest.approx(1e-3, abs=1e-9), name
    over = {str(action) for action in run.row if action.kind is ActionKind.SEND_F}
    assert {name for name, _, _ in spans["transfer"]} == over, "those whose end is known"
    assert all(end - begin == pytest.approx(0.5) for _, begin, end in spans["transfer"]), "what they took"


def test_marks_are_read_when_the_gpu_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are timed, and in the compute stream of the stage's own GPU; each is a millisecond behind the one
    before."""
    recorded: list[Any] = []
    passed = [0.0]  # when the GPU was through, by the clock of the host

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.timed, self.at = enable_timing, -1

        def record(self, stream: object) -> None:
            self.at = len(recorded)
            recorded.append(stream)

        def synchronize(self) -> None:
            time.sleep(0.01)
            passed[0] = time.perf_counter()

        def elapsed_time(self, end: Event) -> float:
            assert passed[0], "asked for a time before the GPU had come so far"
            assert self.timed and end.timed
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"current of {device}")
    clock, trace = GpuClock(torch.device("cuda", 2)), Trace()
    marks = [clock.mark() for _ in range(3)]
    clock.add(Action.parse("0F0"), marks[0], marks[1])
    clock.add(Action.parse("0W0"), marks[1], marks[2])
    clock.read_into(trace)
    assert recorded == ["current of cuda:2"] * 4
    (_, began, ended), (_, also_ended, last) = trace.events
    assert ended == also_ended and ended - began == pytest.approx(1e-3)
    assert last >= passed[0] - 1e-3, "the last mark is a millisecond old when the GPU is through"
    # The host was through with the step long before; a step lasts until the GPU is.
    assert trace.seconds == last - trace.began[0]
    longer = Trace(seconds=60.0)
    clock.add(Action.parse("0F0"), marks[0], marks[1])
    clock.read_into(longer)
    assert longer.seconds == 60.0


def test_a_clock_that_saw_nothing_leaves_the_trace_alone() -> None:
    trace = Trace()
    GpuClock(GPU).read_into(trace)
    assert trace.events == [] and trace.seconds == 0.0
