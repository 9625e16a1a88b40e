"""Calls that the ranks of a job make together, under the name of the operation that they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MeshcastError
from ..resharding.state_arguments import Given
from ..resharding.state_results import ReshardedState
from ..resharding.state_run import Conversation, Prepared
from ..resharding.state_specs import OP as MOVE

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup

__all__ = ["call_by", "run"]


def run(parent: ParentGroup, talk: Conversation, deadline: float, given: Given | Exception) -> ReshardedState:
    """One call among all ranks. An error in place of arguments is raised here, and told to the others."""
    wrong = given if isinstance(given, Exception) else None
    arguments = Given(None, None) if isinstance(given, Exception) else given
    result = ReshardedState()
    talk.run(Prepared(parent.rank, arguments, None, wrong=wrong), deadline, result)
    return result


def call_by(op: str, error: MeshcastError) -> None:
    """Makes the error of a call inside one of `op`."""
    text = str(error).replace(MOVE, op)
    error.args = (text if text.startswith(op) else f"{op}: {text}",)
    error.op = op if error.op in (None, MOVE) else error.op
