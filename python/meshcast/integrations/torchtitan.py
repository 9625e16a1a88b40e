"""torchtitan with the pipelines of meshcast:
``--experimental.custom_import=meshcast.integrations.torchtitan``.

Importing this module is all. Stages and schedules that torchtitan makes from then on are those of
meshcast.pipelining, and ``--parallelism.pipeline_parallel_schedule`` takes its schedules too, such as
Eager1F1B, ZBH1 or auto. It changes names in torchtitan's modules, and nothing in torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torchtitan.distributed import dual_pipe_v, pipeline_parallel

__all__: list[str] = []

_THEIRS, _OURS = "torch.distributed.pipelining", "meshcast.pipelining"


def _exchange(module: ModuleType) -> None:
    """What the module has imported of torch's pipelining becomes that of the same name and place here."""
    for name, value in list(vars(module).items()):
        home = str(getattr(value, "__module__", None) or type(value).__module__)
        if home == _THEIRS or home.startswith(_THEIRS + "."):
            ours = importlib.import_module(_OURS + home.removeprefix(_THEIRS))
            setattr(module, name, getattr(ours, name))


_exchange(pipeline_parallel)
_exchange(dual_pipe_v)
