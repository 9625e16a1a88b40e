"""Every name of torch.distributed.pipelining is here too: those of the installed release, found by dir(), and
those of later releases, by a list."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
from meshcast import pipelining
from meshcast.pipelining import schedules, stage

MODULES = ("", "schedules", "stage", "microbatch", "_utils", "_backward")
# Modules of torch's package that are none of ours, by reason. Their names are attributes of the package here.
EXCEPTIONS = {
    "_IR": "the tracer, which is torch's; what it makes of a model is in meshcast.pipelining",
    "_debug": "how torch's stages print values",
    "_p2p": "torch's own groups for transfers, which do not run here",
    "_recv_buffers": "torch's buffers of receives, which do not run here",
    "_schedule_visualizer": "draws torch's orders; `draw` of a schedule and `simulate` are here",
    "_unflatten": "a part of the tracer",
}

# Classes of ours that do not stand on torch's of that name, by reason.
NOT_BELOW = {
    "_PipelineStage": "traced stages run like all others here: it stands on PipelineStage",
    "PipelineActivationLiveness": "own code under releases that do not have it",
}
# Attributes that are theirs alone: what a traced stage of torch prepares for torch's transfers.
MISSING = {
    "_PipelineStage": {"_create_act_recv_info", "_create_act_send_info"},
    "PipelineActivationLiveness": {"__init__"},  # one argument is private
}

# Names and arguments that came after torch 2.13, until 2.15.
LATER = {
    "": (
        "PipelineActivationLiveness PipelineStageInfo analyze_pipeline_activation_liveness Pipe "
        "PipelineStage Schedule1F1B ScheduleDualPipeV ScheduleGPipe ScheduleInterleaved1F1B "
        "ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble SplitPoint build_stage "
        "pipe_split pipeline"
    ),
    "schedules": (
        "PipelineActivationLiveness PipelineStageInfo analyze_pipeline_activation_liveness WAIT_REDUCE_GRAD "
        "get_schedule_class PipelineScheduleSingle PipelineScheduleMulti _PipelineScheduleRuntime"
    ),
    "stage": "PipelineStage PipelineStageInfo build_stage",
}
OF_LOOPS = "defer_pp_recv max_active_stages unshard_lookahead defer_reduce_grad_wait max_outstanding_sends"
OF_STEP = "arg_mbs kwarg_mbs target_mbs finalize_gradients return_outputs loss_kwargs"
ARGUMENTS: dict[Any, str] = {
    pipelining.ScheduleInterleaved1F1B: OF_LOOPS,
    pipelining.ScheduleLoopedBFS: OF_LOOPS,
    pipelining.ScheduleInterleavedZeroBubble: OF_LOOPS,
    pipelining.ScheduleZBVZeroBubble: OF_LOOPS,
    pipelining.ScheduleDualPipeV: OF_LOOPS,
    schedules._PipelineScheduleRuntime: OF_LOOPS,
    schedules.PipelineScheduleMulti: OF_LOOPS,
    pipelining.Schedule1F1B.step: OF_STEP,
    pipelining.ScheduleGPipe.step: OF_STEP,
    pipelining.ScheduleInterleaved1F1B.step: OF_STEP,
    pipelining.ScheduleGPipe._step_microbatches: "arg_mbs kwarg_mbs target_mbs losses return_outputs",
    pipelining.PipelineStage: "output_grads input_grads group dw_builder get_mesh",
    pipelining.PipelineStage.register_forward_context: "context_factory",
    pipelining.PipelineStageInfo: "stage_index microbatch_index is_metadata_inference",
    pipelining.analyze_pipeline_activation_liveness: "schedule pp_rank stage_indices granularity",
}


def _both(module: str) -> tuple[ModuleType, ModuleType]:
    path = f".{module}" if module else ""
    return tuple(  # type: ignore[return-value]
        importlib.import_module(f"{root}.pipelining{path}") for root in ("torch.distributed", "meshcast")
    )


@pytest.mark.parametrize("module", MODULES)
def test_names_of_the_installed_torch(module: str) -> None:
    """Private ones and what torch imports there included."""
    theirs, ours = _both(module)
    assert set(dir(theirs)) - set(dir(ours)) == set()
    assert [name for name in dir(theirs) if not hasattr(ours, name)] == []
    if module == "":
        assert set(theirs.__all__) <= set(ours.__all__)


def test_modules_of_the_installed_torch() -> None:
    theirs, ours = _both("")
    there, here = ({each.name for each in iter_modules(package.__path__)} for package in (theirs, ours))
    assert there - here - set(EXCEPTIONS) == set()
    assert not here & set(EXCEPTIONS), "no exception any more"


def _classes() -> list[tuple[str, str]]:
    """Those that torch defines in its modules: module and name."""
    found = []
    for module in ("schedules", "stage"):
        theirs, _ = _both(module)
        for name, value in vars(theirs).items():
            if inspect.isclass(value) and value.__module__ == theirs.__name__ and not issubclass(value, Enum):
                found.append((module, name))
    return found


@pytest.mark.parametrize(("module", "name"), _classes())
def test_classes_are_those_of_torch_or_stand_on_them(module: str, name: str) -> None:
    """With all of their attributes, and methods that take what torch's take."""
    theirs, ours = (getattr(each, name) for each in _both(module))
    assert ours is theirs or issubclass(ours, theirs) or name in NOT_BELOW
    assert set(dir(theirs)) - set(dir(ours)) - MISSING.get(name, set()) == set()
    for method, value in vars(theirs).items():
        private = method.startswith("__") and method != "__init__"
        if private or not inspect.isfunction(value) or method in MISSING.get(name, ()):
            continue
        mine = inspect.signature(getattr(ours, method)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in mine.values()):
            continue
        missing = {
            each.name
            for each in inspect.signature(value).parameters.values()
            if each.name not in mine and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        assert not missing, f"{name}.{method} does not take {missing}"


@pytest.mark.parametrize("module", LATER)
def test_names_of_later_releases(module: str) -> None:
    _, ours = _both(module)
    for name in LATER[module].split():
        assert name in dir(ours), name
        assert getattr(ours, name) is not None


@pytest.mark.parametrize("call", ARGUMENTS, ids=lambda call: getattr(call, "__qualname__", str(call)))
def test_arguments_of_later_releases(call: Any) -> None:
    known = set(inspect.signature(call).parameters) | _options_of(call)
    assert set(ARGUMENTS[call].split()) - known == set()


def _options_of(call: Any) -> set[str]:
    """What ``**options`` takes."""
    from meshcast.pipelining.schedules import MultiScheduleOptions

    return set(MultiScheduleOptions.__annotations__) if inspect.isclass(call) else set()


@pytest.mark.parametrize("module", MODULES)
def test_unknown_names_are_missed_as_elsewhere(module: str) -> None:
    _, ours = _both(module)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = ours.no_such_name


def test_classes_are_at_one_place() -> None:
    assert schedules.PipelineStageInfo is stage.PipelineStageInfo is pipelining.PipelineStageInfo
    assert schedules.ScheduleGPipe is pipelining.ScheduleGPipe
