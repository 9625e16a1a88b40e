"""All programs that run under torch.distributed.pipelining and meshcast.pipelining, in one world."""

from __future__ import annotations

import multiproc.torch_schedule_cases
import multiproc.torch_stage_cases
import multiproc.torch_value_cases  # noqa: F401  each registers its programs
from multiproc.torch_programs import PROGRAMS

CASES = PROGRAMS
GROUP_TIMEOUT = 20.0  # seconds
CASE_LIMIT = 60.0
