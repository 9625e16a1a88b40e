"""How a draw ended: what its ranks found, compared with one process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from multiproc.gradient_draws import Draw
from multiproc.gradient_modules import Alone, alone, evaluated_on

__all__ = ["Expected", "Result", "judge"]

TOLERANCE = 1e-5  # of float32, of the norm
FLOAT32_TIMES = 2.0  # where one process in float32 is further away: terms that cancel, added in another order
BFLOAT16_TIMES, BFLOAT16_FLOOR = 4.0, 0.05
_SHOWN = 3000  # characters of an error


@dataclass
class Result:
    """How a draw ended: "passed", "refused" or "failed". cause: short, without numbers, to be counted.
    worst: the largest distance from one process, over what is allowed. clean: the world is as before."""

    state: str
    cause: str = ""
    text: str = ""
    worst: float = 0.0
    clean: bool = True
    seconds: float = 0.0


class Expected:
    """One process in double precision and, for bfloat16, in bfloat16; in float32 only where that decides."""

    def __init__(self, drawn: Draw) -> None:
        self.drawn = drawn
        self.low = drawn.dtype == "bfloat16"
        self.exact = alone(drawn, torch.float64)
        self.rough: Alone | None = alone(drawn, torch.bfloat16) if self.low else None
        self._evaluated: dict[int, list[float]] = {}

    def compare(
        self, step: int, found: dict[str, Any], held: Mapping[tuple[int, str], torch.Tensor]
    ) -> list[tuple[float, str]]:
        """The distance of each of a rank's results from one process, over what is allowed. held: parameters
        of all ranks after the step."""
        column = found["column"]
        compared = []
        if found["losses"]:
            rough = self.rough and self.rough.losses[step][column]
            compared += self._losses("losses", found["losses"], self.exact.losses[step][column], rough, step)
        if found.get("evaluated"):
            rough = self.rough and self.rough.evaluated[step]
            if column == 0:
                name, evaluated = "evaluated losses", found["evaluated"]
                judged = self._losses(name, evaluated, self.exact.evaluated[step], rough, step)
                if judged[0][0] > 1 and not self.low:  # AdamW enlarges what is off in small gradients
                    judged = self._losses(name, evaluated, self._evaluated_on(step, held), None, step)
                compared += judged
        for kind in ("gradients", "parameters"):
            exact = getattr(self.exact, kind)[step]
            rough_tensors = getattr(self.rough, kind)[step] if self.rough else {}
            largest = max((each.norm().item() for each in exact.values()), default=0.0)
            for key, value in found[kind].items():
                known = exact[key]
                label = f"{kind[:-1]} {key[1]} of stage {key[0]}"
                if value.shape != known.shape:
                    compared.append((math.inf, f"{label}: shape {tuple(value.shape)}"))
                    continue
                floor = (1e-3 if kind == "gradients" else 0.1) * max(largest, 1e-3)
                if kind == "parameters":
                    # Without a gradient or with one of zeros: AdamW tells them apart, a user may not.
                    if not all(each[key].any() for each in self.exact.gradients[: step + 1]):
                        continue
                    # It enlarges what is off in small gradients.
                    floor = max(floor, known.norm().item() + self.exact.gradients[step][key].norm().item())
                near = rough_tensors[key] if self.rough else None
                judged = self._distance(label, value, known, near, floor, step)
                if judged[0] > 1 and not self.low:
                    near = getattr(self._single, kind)[step][key]
                    judged = self._distance(label, value, known, near, floor, step)
                compared.append(judged)
        return compared

    def _evaluated_on(self, step: int, held: Mapping[tuple[int, str], torch.Tensor]) -> list[float]:
        if step not in self._evaluated:
            self._evaluated[step] = evaluated_on(self.drawn, step, held)
        return self._evaluated[step]

    @cached_property
    def _single(self) -> Alone:
        return alone(self.drawn, torch.float32)

    def _losses(
        self, label: str, found: list[float], exact: list[float], rough: list[float] | None, step: int
    ) -> list[tuple[float, str]]:
        if len(found) != len(exact):
            return [(math.inf, f"{label}: {len(found)} of them, expected {len(exact)}")]
        at = [index for index, value in enumerate(exact) if not math.isnan(value)]  # of no weight: any
        values = [torch.tensor([each[i] for i in at], dtype=torch.float64) for each in (found, exact)]
        near = None if rough is None else torch.tensor([rough[i] for i in at], dtype=torch.float64)
        return [self._distance(f"{label} {found}, expected {exact}", *values, near, 1e-2, step)]

    def _distance(
        self,
        label: str,
        found: torch.Tensor,
        exact: torch.Tensor,
        rough: torch.Tensor | None,
        floor: float,
        step: int,
    ) -> tuple[float, str]:
        scale = max(exact.norm().item(), floor)
        relative = (found.double() - exact).norm().item() / scale
        allowed = TOLERANCE
        if rough is not None and not self.low:
            allowed = max(allowed, FLOAT32_TIMES * (rough.double() - exact).norm().item() / scale)
        elif rough is not None:
            allowed = BFLOAT16_TIMES * (rough.double() - exact).norm().item() / scale + BFLOAT16_FLOOR
        relative = math.inf if math.isnan(relative) else relative
        allowed *= 1 + 2 * step
        ratio = f", {_ratio(found, exact)}" if relative > allowed else ""
        return relative / allowed, f"{label}: {relative:.2e} away, allowed {allowed:.1e}{ratio}"


def _ratio(found: torch.Tensor, exact: torch.Tensor) -> str:
    """A factor that is common to all elements tells more than a distance."""
    norm = (exact * exact).sum().item()
    if not norm:
        return "expected zeros"
    factor = (found.double() * exact).sum().item() / norm
    rest = (found.double() - factor * exact).norm().item() / math.sqrt(norm)
    return f"{factor:.4f} times what is expected" + (f" and {rest:.1e} beside" if rest > 1e-3 else "")


_TYPED_ELSEWHERE = ("AbortedError", "DeadlineExceededError", "PeerLostError")


def judge(outcomes: list[dict[str, Any]], expected: Expected) -> Result:
    """outcomes: of the ranks that the draw needs."""
    errors = {rank: each for rank, each in enumerate(outcomes) if each["state"] in ("refused", "failed")}
    if errors:
        own = {
            rank: each
            for rank, each in errors.items()
            if each["state"] == "failed"
            or not (each["error"].startswith(_TYPED_ELSEWHERE) or " raised " in each["error"])
        }
        rank = min(
            own or errors,
            key=lambda each: (
                errors[each]["state"] != "failed",
                errors[each]["error"].startswith(_TYPED_ELSEWHERE),
                each,
            ),
        )
        cause = _cause(errors[rank]["error"])
        passed = [rank for rank, each in enumerate(outcomes) if each["state"] == "passed"]
        text = f"rank {rank}: {errors[rank]['error'][:_SHOWN]}\n{errors[rank]['trace'][-_SHOWN:]}"
        if errors[rank]["state"] == "failed" or not own:
            clean = not any(each["connected"] for each in outcomes)  # else groups may be in any state
            return Result("failed", cause, text, math.inf, clean=clean)
        if passed:
            return Result(
                "failed", f"only some ranks: {cause}", f"{text}\nranks {passed} passed", math.inf, clean=False
            )
        return Result("refused", cause, text)
    compared: list[tuple[float, str]] = []
    steps = range(max(len(outcome["steps"]) for outcome in outcomes))
    held = [
        {key: value for each in outcomes for key, value in each["steps"][step]["parameters"].items()}
        for step in steps
    ]
    for rank, outcome in enumerate(outcomes):
        for step, found in enumerate(outcome["steps"]):
            of_rank = expected.compare(step, found, held[step])
            compared += [(distance, f"step {step}, rank {rank}: {text}") for distance, text in of_rank]
    worst = max(compared, default=(0.0, ""))
    wrong = [each for each in compared if each[0] > 1]
    if not wrong:
        return Result("passed", worst=worst[0])
    text = "\n".join(text for _, text in wrong[:12]) + (f"\n... {len(wrong)} in all" if wrong[12:] else "")
    return Result("failed", "wrong " + ", ".join(sorted(_wrong(wrong))), text, worst[0])


def _wrong(wrong: list[tuple[float, str]]) -> set[str]:
    words = ("evaluated losses", "losses", "gradient", "parameter")
    return {next(word for word in words if word in text) for _, text in wrong}


def _cause(error: str) -> str:
    return re.sub(r"\d+", "#", error.split("\n")[0])[:160]
