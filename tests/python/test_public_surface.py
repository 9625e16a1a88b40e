"""What users can call: names, commands, options, variables and operators may be added, but none may go."""

from __future__ import annotations

import inspect

import meshcast
import pytest
import torch
from meshcast import elastic, pipelining
from meshcast.base import settings
from meshcast.cli import parser_of
from meshcast.integrations import dcp

MESHCAST = (
    "AbortedError DeadlineExceededError Layout LayoutError MeshcastError PeerLostError Plan "
    "PlanMismatchError Resharder TensorSpec Topology __version__ backward dump_flight_record "
    "enable_dtensor_redistribute flight_record measure_topology plan plan_cache_clear plan_cache_info "
    "plan_many prepare reshard reshard_ reshard_local reshard_many reshard_state_dict StateResharder "
    "TensorMap WeightSync Handle Host LocalCopy Nic PlanCacheInfo Problem ReshardedState Task Transfer "
    "TransferStats WeightProgress WeightStats CallCounters Counters PairCounters counters "
    "RecordedDestinations record_destinations"
)
PIPELINING = (
    "Action ActionKind Choice Edge GradScaler Layer Partition Pipe PipelineActivationLiveness PipelineStage "
    "PipelineStageInfo Schedule1F1B ScheduleAuto ScheduleDualPipeV ScheduleEager1F1B ScheduleError "
    "ScheduleGPipe ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBH1 "
    "ScheduleZBH2 ScheduleZBV ScheduleZBVZeroBubble SimulationReport SplitPoint Value "
    "analyze_pipeline_activation_liveness build_stage choose clip_grad_norm_ dump_csv get_schedule_class "
    "grad_norm load load_csv lower microbatch_seed partition pipe_split pipeline save simulate validate "
    "Candidate MultiScheduleOptions PipelineSchedule PipelineScheduleMulti PipelineScheduleSingle "
    "ScheduleOptions StageTimes Times"
)
ELASTIC = "Rebalanced Replicas rebalance remesh"
COMMANDS = {
    "bench": "--methods --seconds --repeats",
    "doctor": "--json",
    "plan": "--shape --dtype --src --dst --topology --ranks-per-host --nic-gbps --nics-per-host --local-gbps"
    " --latency-us --strategy --balance --chunk-bytes --seed --draw --json --compare",
    "simulate": "--schedule --stages --microbatches --ranks --warmup --memory-budget --delay-weight-grad"
    " --forward --backward --weight --transfer --send-model --shared-links --buffers --compare --draw",
    "timeline": "--output",
}
VARIABLES = (
    "MESHCAST_BROADCAST_BYTES MESHCAST_CUDA_TRANSPORT MESHCAST_FLIGHT_RECORD MESHCAST_HOST_ID"
    " MESHCAST_IFNAMES MESHCAST_LOG MESHCAST_SHM MESHCAST_SHM_MB"
)
OPERATORS = (
    "meshcast::reshard(Tensor local, Tensor(a!) token, int call) -> Tensor",
    "meshcast::reshard_backward(Tensor grad, Tensor(a!) number, int call) -> Tensor",
    "meshcast::reshard_number(Tensor token) -> Tensor",
)


@pytest.mark.parametrize(
    ("package", "names"), [(meshcast, MESHCAST), (pipelining, PIPELINING), (elastic, ELASTIC)], ids=str
)
def test_no_name_is_gone(package: object, names: str) -> None:
    for name in names.split():
        assert name in package.__all__, name  # type: ignore[attr-defined]
        assert getattr(package, name) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_gone(command: str) -> None:
    assert set(COMMANDS[command].split()) <= set(parser_of(command)._option_string_actions)


@pytest.mark.parametrize("package", [meshcast, pipelining, elastic, dcp], ids=str)
def test_objects_say_what_they_are(package: object) -> None:
    classes = [getattr(package, name) for name in package.__all__]  # type: ignore[attr-defined]
    silent = [
        each.__name__
        for each in classes
        if inspect.isclass(each)
        and not issubclass(each, BaseException)
        and not getattr(each, "_is_protocol", False)
        and each.__repr__ is object.__repr__
    ]
    assert not silent


def test_no_variable_is_gone() -> None:
    assert set(VARIABLES.split()) <= {each.name for each in settings.ALL}


def test_no_operator_is_gone() -> None:
    assert set(OPERATORS) <= {str(schema) for schema in torch._C._jit_get_all_schemas()}
