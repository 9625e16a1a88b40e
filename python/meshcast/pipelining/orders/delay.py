"""Backward weight delaying: the gradient of a stage's inputs first, so that it leaves early, that of its
weights after it.

Eager 1F1B of three stages, delayed; forward, input and weight gradient take one unit each, as does a
transfer::

    rank 0  F0 F1 F2 F3 F4 .  .  .  .  I0 W0 F5 I1 W1 .  I2 W2 .  I3 W3 .  I4 W4 .  I5 W5
    rank 1  .  .  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 .  I4 W4 .  I5 W5
    rank 2  .  .  .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5

- every B becomes I W; the transfer of the input gradient travels beside W
- makespan of delayed Eager1F1B: (m + n - 1)(F + B) - (n - 1) W + 2 (n - 1) c while c <= (F + B + W) / 2: in
  the drain each stage waits for I of the next, no longer for its whole B
- peak activations: those of the schedule that is delayed, since W follows at once

W stands right after its I. Moving it further back fills bubbles at the cost of activations: that is what
zero-bubble schedules do (`zero_bubble`, `zb_v`). Source: Zhuang et al., 2022, section 4 (an order inside one
backward program there); Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for I and W as actions.
"""

from __future__ import annotations

from meshcast.pipelining.action import Action, ActionKind, Actions


def delay_weights(actions: Actions) -> Actions:
    """The same compute actions with every B split into I, W. A backward that is split already stays."""
    return {rank: [part for action in row for part in _parts(action)] for rank, row in actions.items()}


def _parts(action: Action) -> list[Action]:
    if action.kind is not ActionKind.B:
        return [action]
    return [Action(action.stage, kind, action.microbatch) for kind in (ActionKind.I, ActionKind.W)]
