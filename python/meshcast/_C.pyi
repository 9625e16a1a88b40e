# ruff: noqa: N999 (the module is named so)
"""Types of the C++ module. Boxes are ((lo, hi), ...) per dimension; times are nanoseconds, rates bytes/s."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import Tensor, dtype
from torch._C._distributed_c10d import Backend, Store, Work

from .errors import MeshcastError

_Box = tuple[tuple[int, int], ...]
_Piece = tuple[_Box, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # box, local index, axes, steps
_Placement = tuple[str, int, int, str]  # kind, dim, split factor, reduce op
_Host = tuple[list[int], list[tuple[int, int]], int]  # ranks, (out rate, in rate) of each NIC, local rate

cuda: Any  # the kernels, for kernels.py; only builds with CUDA code have it

STRATEGIES: tuple[str, ...]  # "auto" first
BALANCES: tuple[str, ...]
ELEMENT_TYPES: tuple[tuple[str, tuple[str, ...], bool], ...]  # dtype, its reductions, whether kernels cast it

class Layout:
    def __init__(
        self,
        mesh_shape: list[int],
        ranks: bytes,
        placements: list[_Placement],
        by_boxes: Sequence[tuple[tuple[int, ...], tuple[_Piece, ...]]] = ...,
    ) -> None: ...
    def shards(
        self, shape: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...], list[tuple[_Box, tuple[int, ...]]]]]: ...
    def tiles(self, shape: Sequence[int]) -> list[tuple[_Box, list[int]]]: ...
    def check_holds(self, destination: Layout, shape: Sequence[int]) -> None: ...
    def counted(
        self, destination: Layout, shape: Sequence[int], rank: int
    ) -> list[tuple[_Box, int, int]]: ...
    def describe(self) -> str: ...

class Topology:
    def __init__(self, hosts: list[_Host], latency_ns: int) -> None: ...
    @staticmethod
    def uniform(
        max_rank: int,
        ranks_per_host: int,
        nic_rate: int,
        nics_per_host: int,
        local_rate: int,
        latency_ns: int,
    ) -> Topology: ...
    @property
    def hosts(self) -> list[_Host]: ...
    @property
    def latency_ns(self) -> int: ...
    def host_index(self, ranks: list[int]) -> dict[int, int]: ...

class Column:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Plan:
    def __init__(
        self,
        problems: list[tuple[list[int], int, Layout, Layout]],
        topology: Topology,
        strategy: str,
        balance: str,
        chunk_bytes: int,
        seed: int,
    ) -> None: ...
    @property
    def strategy(self) -> str: ...
    @property
    def hash(self) -> str: ...
    @property
    def makespan_ns(self) -> int: ...
    @property
    def lower_bound_ns(self) -> int: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def num_tasks(self) -> int: ...
    @property
    def num_hops(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def num_local_copies(self) -> int: ...
    def task(
        self, index: int
    ) -> tuple[int, _Box, int, tuple[int, ...], tuple[int, ...], str | None, tuple[int, ...]]: ...
    def hop(self, index: int) -> tuple[int, int, int, int, str | None, bool, int, int]: ...
    def piece(self, index: int) -> tuple[int, int, _Box, int]: ...
    def local_copy(self, index: int) -> tuple[int, int, _Box]: ...
    def column(self, name: str) -> Column: ...
    def rank_traffic(self) -> list[tuple[int, int]]: ...
    def nic_traffic(self) -> list[tuple[int, int]]: ...
    def peak_staging(self) -> list[int]: ...
    def filling_bound_ns(self) -> int: ...

class WorkThread:
    """Keeps the thread of this process for deadlines and copies. Raises MeshcastError if none can start."""

    def __init__(self) -> None: ...

def run_callback(function: Callable[[], None]) -> None:
    """Calls it soon on a thread that may wait for what it likes. What it raises is printed."""

def finish_callbacks(seconds: float) -> None:
    """Waits until no callback is left, at most so long; later ones are not called. For the end of the
    process."""

def fresh_tensor(shape: Sequence[int], dtype: dtype) -> Tensor:
    """Returns a dense tensor on the CPU whose values are not set; see csrc/c10d/fresh_tensor.h."""

def use_large_blocks(use: bool) -> None:
    """Decides whether large ones keep their memory for the next; see csrc/core/memory/large_blocks.h."""

def kept_large_bytes() -> int:
    """Bytes that this process keeps for the next ones."""

def digest(
    part: Tensor,
    low: Sequence[int],
    shape: Sequence[int],
    value_bytes: int,
    magnitude: int,
    limit: int,
) -> int:
    """Digest of a part, on the CPU, of a tensor of this shape; it begins at low. Unsigned; see digest.h."""

def block_amax(part: Tensor, low: Sequence[int], block: Sequence[int], out: Tensor) -> None:
    """Fills out, float32, with the largest magnitude of each block that a part touches; it begins at low. See
    csrc/core/memory/block_quantize.h."""

def block_scales(kind: str, amax: Tensor, tensor_amax: float, out: Tensor) -> None:
    """Fills out with the scales of blocks. kind: "fp8_e4m3", "mxfp8" or "nvfp4"."""

def block_values(
    kind: str,
    part: Tensor,
    low: Sequence[int],
    block: Sequence[int],
    amax: Tensor,
    tensor_amax: float,
    out: Tensor,
) -> None:
    """Fills out with the values of a part. amax: of the blocks that it touches, over the whole tensor."""

def nvfp4_tensor_scale(tensor_amax: float) -> float:
    """The scale of all blocks of a tensor."""

STREAM_HEAD: int
"""Bytes of a stream of changes for each box, in addition to those of the box."""

def keep_boxes(boxes: Sequence[Tensor], kept: Tensor) -> None:
    """Copies boxes, one after the other, into dense memory of as many bytes."""

def encode_changes(boxes: Sequence[Tensor], earlier: Tensor, stream: Tensor) -> int:
    """Writes the changes of boxes since an earlier version, which becomes this one. Returns the bytes of the
    stream, 0 where nothing has changed; see csrc/core/memory/changes.h."""

def apply_changes(stream: Tensor, boxes: Sequence[Sequence[Tensor]]) -> None:
    """Makes the changes in boxes, each with its places. Raises MeshcastError, before it writes, for a stream
    that is not one of such boxes."""

def cut_edges(node: Any, numbers: Sequence[int]) -> None:
    """The edges with these numbers of a node of autograd's graph lead nowhere from now on."""

def release_saved(nodes: list[Any]) -> None:
    """Lets go of what nodes of autograd's graph, those of C++, have saved for their backward."""

    """Why a group is broken, for the ranks that wait for this one. store: of its core."""

class Conversation:
    """Texts that ranks exchange through a store, by topic and rank; see csrc/core/group/conversation.h. Its
    waits let other threads run, and a handler of a signal ends them. Deadlines are by time.monotonic(), None
    for none."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        """ranks: how many may ask the store at once."""
    @property
    def rank(self) -> int: ...
    def say(self, topic: str, text: str) -> None: ...
    def forget(self, topic: str) -> None:
        """Erases what this rank said."""

    def heard(self, topic: str, rank: int) -> str | None: ...
    def silent(self, topic: str, ranks: Sequence[int]) -> list[int]: ...
    def hear(
        self,
        topic: str,
        ranks: Sequence[int],
        deadline: float | None,
        late: str,
        op: str,
        phase: str,
        check: Callable[[], None] | None = None,
        every: float = 0.0,
    ) -> dict[int, str]:
        """Waits until all these ranks have said something.

        check: called between two questions, at most once in `every` seconds; raises to end the wait. late,
        op, phase: for the DeadlineExceededError, in whose text {missing}, {first} and {elapsed} are filled
        in."""

    def count(self, topic: str, more: int) -> int: ...
    def verdict(self, topic: str, proposal: str = "") -> str:
        """Returns the first proposal for the topic; "" where there is none."""

    def await_verdict(
        self,
        topic: str,
        deadline: float | None,
        check: Callable[[], None] | None = None,
        every: float = 0.0,
    ) -> str:
        """Returns "" at the deadline. check, every: as for hear()."""

    def erase(self, topic: str) -> None:
        """Erases a count or a verdict."""

class Watches:
    """Looks after ranks that wait for each other; see csrc/core/group/meeting.h."""

    def __init__(self, known: KnownOffers, watch: Callable[[str], Callable[[], str] | None]) -> None:
        """watch: from what a rank said, what tells why it is lost, "" as far as that is not known."""

    def lost(
        self, conversation: Conversation, topic: str, ranks: Sequence[int], each: bool = False
    ) -> tuple[int, str] | None: ...
    def lost_soon(self, ranks: Sequence[int], rank: int) -> tuple[int, str] | None: ...

class HostMemory:
    """The shared memory of a host; see csrc/core/group/host_memory.h. lost: returns a rank that is lost, and
    why."""

    def __init__(self, ranks: int, off: str) -> None: ...
    @property
    def offer(self) -> str: ...
    @property
    def obstacle(self) -> str: ...
    def meet(
        self,
        conversation: Conversation,
        group: Sequence[int],
        offers: Mapping[int, str],
        deadline: float,
        lost: Callable[[], tuple[int, str] | None],
    ) -> None: ...
    def settle(
        self, conversation: Conversation, deadline: float, lost: Callable[[], tuple[int, str] | None]
    ) -> None: ...
    @staticmethod
    def set_budget(nbytes: int) -> None: ...

class AgreedPlan:
    """A plan that all ranks of a group have agreed on, with that of its backward. Its slot is free again when
    this is dropped."""

    REVERSE_LANE: int
    @property
    def slot(self) -> int: ...
    @property
    def descriptor(self) -> str: ...
    def next_run(self) -> int:
        """Number of times that it had run before, the same on all ranks."""

class Transport:
    """Messages between the hosts of a private group."""

    def lost(self, peer: int) -> str:
        """Why nothing comes from a peer (its position in the group) any more; "" as far as this is not
        known."""

class ProbingTransport(Transport):
    """One that can tell of a message before there is memory for it."""

def gloo_transport(rails: Sequence[Backend], first_rail: Sequence[int], rank: int) -> Transport: ...

class UcxPlane:
    """UCX in this process, shared by all private groups: the first makes it."""

    WIRE: int
    """Number of the form in which messages travel; that of all ranks has to be the same."""

    def __init__(self, library: str, devices: list[str], peer_seconds: float, rdma: bool) -> None: ...
    @property
    def version(self) -> str: ...
    def address(self) -> tuple[int, list[bytes], dict[int, int]]:
        """This process, its address on each rail, and by process how often a connection broke."""

    def join(
        self,
        number: int,
        members: Sequence[tuple[int, Sequence[bytes], Mapping[int, int]]],
        rank: int,
        first_rail: list[int],
    ) -> ProbingTransport: ...
    def watch(self, member: tuple[int, Sequence[bytes], Mapping[int, int]]) -> Callable[[], str]:
        """Tells, whenever it is called, why a process cannot be reached any more; "" as far as this is not
        known."""

class GroupCore:
    """A private group: the ranks of a transfer with connections of their own."""

    def __init__(
        self,
        network: Transport,
        store: Store,
        ranks: list[int],
        rank: int,
        name: str,
        memory: HostMemory | None = None,
    ) -> None: ...
    @property
    def slots_taken(self) -> int: ...
    def start(
        self,
        agreed: AgreedPlan,
        ordinal: int,
        reverse: bool,
        src: Sequence[Tensor | None],
        dst: Sequence[Tensor | None],
        timeout: float,
    ) -> Work: ...
    def stats(self, work: Work) -> dict[str, float]: ...
    def traffic(self, work: Work) -> list[tuple[int, bool, int, int]]:
        """Traffic of one run: peer (its position in the group), whether it is sent there, messages, bytes."""

    def abort(self, reason: str) -> None: ...
    def error(self) -> str | None: ...
    def shutdown(self) -> None: ...

CHANGED: str
"""In the text of a refusal: the call has run, maybe to its end."""

def stats(work: Work) -> dict[str, float]: ...
def traffic(work: Work) -> list[tuple[int, bool, int, int]]:
    """Returns, of one run: peer (its position in the group), whether it is sent there, messages, bytes."""

class KnownOffers:
    """Offers that ranks made when they met, in all groups of one process group."""

    def __init__(self) -> None: ...
    def add(self, offers: Mapping[int, str]) -> None: ...

class Refusal:
    """A call that this rank refused; the other ranks are told in the background."""

    def wait(self) -> None:
        """Returns once all ranks can know of it, or after a moment."""

class OpenRefusals:
    """Calls that this rank refused without knowing of which group they were, in one process group: see
    csrc/core/group/open_refusals.h."""

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        store: Callable[[], Store],
        group_of: Callable[[list[int]], Group],
    ) -> None:
        """group_of: makes the group of these ranks where there is none."""

    @staticmethod
    def refuse(why: str, known: list[int], prepares: bool, timeout: float, where: list[OpenRefusals]) -> None:
        """Opens a refusal in each of these process groups; returns once other ranks can know of it, or
        soon. known: ranks that are in the call."""

    def close(self) -> None: ...

class Group:
    """The ranks of a private group, over all generations: see csrc/core/group/group.h."""

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        name: str,
        connector: object,
        known: KnownOffers,
        kept: int,
        refusals: OpenRefusals,
    ) -> None:
        """connector: see groups/private.py. kept: agreements that a generation remembers. refusals: of the
        process group."""

    def connect(self, timeout: float) -> None: ...
    def give_up_if_stuck(self) -> None: ...
    def refuse(self, lane: int, ordinal: int | None, why: str, timeout: float) -> Refusal: ...
    def next_ordinal(self, lane: int) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def core(self) -> GroupCore | None: ...
    def attached(self, key: str) -> Any: ...
    def attach(self, key: str, thing: Any) -> None: ...
    def cause(self) -> str | None: ...
    def posted_cause(self) -> str | None: ...
    def abort(self, reason: str) -> None: ...
    def close(self, limit: float) -> None:
        """limit: by time.monotonic()."""

class CallNumber:
    """Names one call, the same on all its ranks: its position in the lane and, once it has been started, how
    often its plan had run before. agreed: that plan, where a backward may come; core: that made it."""

    def __init__(
        self,
        ordinal: int = -1,
        run: int = -1,
        agreed: AgreedPlan | None = None,
        core: GroupCore | None = None,
    ) -> None: ...
    ordinal: int
    run: int
    agreed: AgreedPlan | None
    @property
    def failed(self) -> bool: ...  # it has no result
    @property
    def core(self) -> GroupCore | None: ...

class Transfer:
    """The moves of a call, compiled once and agreed on in each generation of the group."""

    def __init__(
        self,
        group: Group,
        lane: int,
        is_shared: bool,
        plans: Callable[[], tuple[str, str, Plan, Plan | None, Mapping[str, Any], Mapping[str, Any] | None]],
        op: str,
        what: str,
        members: Members,
        medium: object | None,
        source: list[tuple[tuple[int, ...] | None, dtype]],
        destination: list[tuple[tuple[int, ...] | None, dtype]],
    ) -> None:
        """is_shared: with other transfers of the same descriptor. plans: compiles the op, the descriptor, the
        plan and that of the backward, and what the flight record shows of both. what: moves, in words.
        medium: moves what is not on CPUs. source, destination: shapes of this rank's shards, None where it is
        in no mesh of that side, and their types."""

    def agree_ahead(self, timeout: float, keep: object) -> None:
        """keep: lives at least until then."""

    def close(self, error: MeshcastError) -> None: ...
    def wait_until_tried(self, seconds: float) -> bool:
        """Returns whether a start or an agreement has ended, well or not, by then."""

    def failure(self) -> Exception | None: ...
    def new_flight(self, reverse: bool) -> Flight: ...

class Call:
    """One call of a transfer. driven: who makes it waits at once."""

    def give(self, src: Sequence[Tensor | None], dst: Sequence[Tensor | None]) -> None:
        """The tensors to be moved. Before submit()."""

    def submit(self) -> None:
        """Counts the call and begins it behind all earlier ones of its lane."""

    def wait(self) -> None:
        """Blocks until the transfer has ended; raises its typed error, each time it is called. What a handler
        of a signal raises ends the wait, and the group."""

    def is_completed(self) -> bool: ...
    def watch(self, sources: Iterable[object], out: object = None) -> None:
        """Notes the versions of the tensors among the sources, and of the local ones of DTensors. One in the
        storage of `out`, where the call itself writes, is not watched."""

    def wait_unchanged(self) -> bool:
        """wait(); False where a watched tensor was changed before it began, or before it ended."""

    def changed(self) -> tuple[list[int], int, int] | None:
        """Returns the shape of the first watched tensor that was changed, its version when it was given, and
        now."""

    ended_unchanged: bool
    """True once is_completed() has found that the call ended before any source was changed."""

    def is_settled(self) -> bool:
        """Returns whether it runs, or has failed."""

    def make_final(self) -> None:
        """From here on it does not begin once more in another generation of its group."""

    def when_settled(self, call: Callable[[], None]) -> None: ...
    def retract(self, why: str) -> Refusal | None:
        """Tells the other ranks that the source was changed while the call may have travelled; None where it
        could not have mattered."""

    def copy_at_end(self, to: Tensor, source: Tensor) -> None:
        """The first successful wait() copies `source` to `to`. Given before anybody can wait."""

    def wrote(self, tensor: Tensor) -> None:
        """The first successful wait() lets autograd know that `tensor` was written. Given likewise."""

    def figures(self) -> dict[str, Any] | None:
        """As GroupCore.stats; None before the transfer was started."""

    def remaining(self) -> float:
        """Returns the seconds until the limit."""

    op: str
    driven: bool
    flight: Flight
    number: CallNumber
    timeout: float
    deadline: float  # by time.monotonic()
    @property
    def work(self) -> Any: ...
    @property
    def error(self) -> Exception | None: ...

class HostCall(Call):
    """A call whose tensors are on CPUs. The group itself moves them."""

    def __init__(
        self, transfer: Transfer, number: CallNumber, timeout: float, driven: bool, reverse: bool
    ) -> None: ...
    @staticmethod
    def of_fitting(
        transfer: Transfer,
        timeout: float,
        driven: bool,
        src: Sequence[Tensor | None],
        dst: Sequence[Tensor | None],
    ) -> HostCall | None:
        """Returns a call with its tensors; None unless they are plain ones of the expected shapes and
        types."""

    @staticmethod
    def started(
        transfer: Transfer,
        sources: Sequence[object],
        results: Sequence[object],
        are_given: bool,
        timeout: float,
        driven: bool,
    ) -> HostCall | None:
        """Begins a call of DTensors, one source and result for each tensor of the transfer; what is no
        DTensor is passed over. None, and nothing has begun, where a tensor needs more than to be moved.
        are_given: the results are a caller's. A call that is not driven watches its sources."""

    def take_digests(self, nans: Sequence[tuple[int, int, int]]) -> None:
        """Takes digests of what arrives. nans: of each tensor, as `digest` has them. Before submit()."""

    def digests(self) -> list[int | None] | None:
        """Returns the digests of what arrived on this rank, unsigned; None for a tensor of which some comes
        from another host. Once wait() has returned. None where none were to be taken."""

class MediumCall(Call):
    """A call whose tensors the medium of its transfer moves, or brings to where they are moved."""

    def __init__(
        self, transfer: Transfer, number: CallNumber, timeout: float, driven: bool, reverse: bool
    ) -> None: ...
    brought: Any  # what the medium keeps for it, until it has ended

class Members:
    """A private group as the flight record shows it. ranks: global ones; within: the process group that it
    was made in, the same text on all of them."""

    def __init__(self, name: str, ranks: Sequence[int] = (), within: str = "") -> None: ...
    name: str
    within: str
    @property
    def ranks(self) -> tuple[int, ...]: ...

class Traffic:
    """Sums over the calls that carry the same messages: see csrc/core/group/record.h."""

    def __init__(
        self, op: str, bound: float = 0.0, rank: int = -1, moved: Sequence[tuple[int, int, int, int]] = ()
    ) -> None:
        """moved: sender, receiver, messages and bytes of each call."""

    def ended(self, seconds: float, waited: float) -> None: ...
    def failed(self) -> None: ...
    def again(self) -> None: ...
    def text(self) -> str: ...

class Flight:
    """One call in the flight record. It outlives the call and keeps no tensor alive."""

    def __init__(
        self,
        op: str,
        group: Members,
        rank: int,
        what: str = "",
        lane: int | None = None,
        position: int = 0,
        site: tuple[CodeType, int] | None = None,
    ) -> None:
        """what: moves, in words that are the same on all ranks. site: of the program; None: the innermost
        line outside of meshcast and torch."""

    def ended(self) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def again(self) -> None:
        """It begins once more."""

    op: str
    group: Members
    rank: int
    begun: float  # seconds since the epoch
    @property
    def what(self) -> str: ...
    @property
    def site(self) -> tuple[CodeType, int] | None: ...
    def progress(self) -> dict[str, Any]: ...

def observe_by(observer: object) -> None:
    """observer: see base/observe.py."""

def flights() -> list[Flight]:
    """Returns the last 2,000, the oldest first."""

def notify_of_long_waits(seconds: float) -> None:
    """From now on the observer's waits() is called for each wait that lasts for so long; 0: never."""

def also_catch(signal: int) -> bool:
    """See base/observe.py."""

def count_signals_by(eventfd: int) -> None: ...
def calls_begun() -> int: ...
def counted() -> tuple[dict[str, dict[str, Any]], dict[tuple[int, int], dict[str, Any]]]:
    """Returns the sums over all calls, by operation and by (sender, receiver)."""

def nccl_version() -> str: ...
def nccl_unique_id() -> bytes: ...
def nccl_blocks_left(device: int) -> int: ...
def cuda_ipc_obstacle(device: int) -> str: ...
def limit_cuda_staging(device: int, nbytes: int) -> None: ...
def cuda_staging(device: int) -> dict[str, int]: ...

class IpcMeeting:
    """Socket at which a rank awaits the others of its host, for one lane. Only builds with CUDA have it."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> str: ...

class IpcProof:
    """Memory and an event of this process that others try to open. Only builds with CUDA have it."""

    def __init__(self, device: int) -> None: ...
    @property
    def card(self) -> bytes: ...
    def check(self, card: bytes, timeout: float) -> str:
        """Why this process cannot open what another's card names; empty where it can."""

class GpuGroupCore:
    """The GPU side of a private group, over NCCL or CUDA IPC; only builds with CUDA code have it."""

    def __init__(
        self, control: GroupCore, store: Store, ranks: list[int], rank: int, name: str, device: int
    ) -> None: ...
    def connect(
        self,
        lane: int,
        unique_id: bytes,
        blocks: int,
        staging: int,
        link_rate: int,  # bytes/s inside a host, and
        round_ns: int,  # of a round apart from its bytes; 0 where they are not known
        timeout: float,
    ) -> None: ...
    def connect_ipc(
        self,
        lane: int,
        meeting: IpcMeeting,
        addresses: list[str],
        staging: int,
        link_rate: int,
        round_ns: int,
        timeout: float,
    ) -> None: ...
    def start(
        self,
        agreed: AgreedPlan,
        ordinal: int,
        reverse: bool,
        src: Sequence[Tensor | None],
        dst: Sequence[Tensor | None],
        timeout: float,
        types: Sequence[tuple[dtype, dtype, dtype]],  # source, on the way, destination
        after: int,
        hop_by_hop: bool,  # a round for each message of a rank
    ) -> Work: ...
    def stats(self, work: Work) -> dict[str, float]: ...
    def traffic(self, work: Work) -> list[tuple[int, bool, int, int]]:
        """Traffic of one run: peer (its position in the group), whether it is sent there, messages, bytes."""

    def abort(self, reason: str) -> None: ...
    def error(self) -> str | None: ...
    def shutdown(self) -> None: ...

class PendingWork(Work):
    """The Work of a collective that a reshard carries out, which may start later."""

    def settle(self, work: Work) -> None: ...
    def fail(self, error: Exception) -> None: ...

class PointToPoint:
    """The point-to-point messages of a group on the CPU. Ranks are those of the group; `ranks` has the global
    ones, `rank` is this one."""

    def __init__(self, ranks: list[int], rank: int) -> None: ...
    def meet_by(self, meet: Callable[[int], None]) -> None: ...
    def connect(self, peer: int, transport: ProbingTransport) -> None: ...
    def refuse(self, peer: int, error: Exception) -> None: ...
    def awaits(self) -> bool:
        """Returns whether a call waits for a rank that has not been met."""

    def shutdown(self) -> None: ...

class PairMemory:
    """Shared memory of this rank for messages to one other of its host. Raises RuntimeError with the reason
    where there is none."""

    @property
    def address(self) -> str: ...
    def meet(
        self, messages: PointToPoint, rank: int, peer: int, address: str, deadline: float
    ) -> ProbingTransport:
        """Connects with `peer`, which calls likewise, given its address; both by their numbers in the group.
        Blocks to `deadline`, by time.monotonic(), or until `messages` end. To be called once."""

class ProcessGroupMeshcast(Backend):
    """The c10d backend "meshcast" over inner ones: `inner` on the CPU, what `cuda` makes on GPUs. `multicast`
    starts broadcasts of `at_least` bytes on the CPU."""

    def __init__(
        self,
        inner: Backend,
        rank: int,
        size: int,
        multicast: Callable[[PendingWork, Tensor, int, float], None],
        at_least: int,
        point_to_point: PointToPoint | None,  # None: gloo carries the messages
        cuda: Any,  # InnerNccl: has possible() and make(op)
        split: Callable[
            [Any, list[int], Any], ProcessGroupMeshcast | None
        ],  # store, ranks of the group, pg_options
    ) -> None: ...
    @property
    def key(self) -> int:
        """Tells it from all others that exist."""

    @property
    def inner(self) -> Backend: ...
    @property
    def point_to_point(self) -> PointToPoint | None: ...
    @property
    def inner_cuda(self) -> Backend | None:
        """None until a tensor on a GPU needed it."""
