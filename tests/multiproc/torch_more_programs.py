"""The programs of torch_order_cases.py and torch_run_cases.py, apart from those of torch_cases.py."""

from __future__ import annotations

import importlib

import multiproc.torch_schedule_cases
import multiproc.torch_stage_cases
import multiproc.torch_value_cases  # noqa: F401  their programs run in the world of torch_cases.py
from multiproc.torch_programs import PROGRAMS

_known = len(PROGRAMS)
for _name in ("torch_order_cases", "torch_run_cases"):
    importlib.import_module(f"multiproc.{_name}")

MORE = PROGRAMS[_known:]
del PROGRAMS[_known:]
