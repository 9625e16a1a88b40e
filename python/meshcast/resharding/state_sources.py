"""Sources and destinations of the tensors of a call, from what all ranks say. Every rank has the same sides,
so that all raise the same error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from ..base import checks
from ..errors import LayoutError
from ..layout import Layout
from .meshes import check_not_wanted, everywhere, joined, separate, survivors
from .state_entries import Held
from .state_layouts import copies_on, positive, together
from .state_loaded import with_boxes
from .state_specs import OP, Side, held_text, mismatch, names_text, wanted_text

__all__ = ["Goal", "Origin", "Said"]


class Origin(NamedTuple):
    """A tensor at its source. had: with ranks that are lost, where such are in it; it is `layout` itself
    where no other rank is. twins: the layouts that `layout` is made of, where several meshes hold the tensor,
    if their values are equal."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    had: Layout | None = None
    twins: tuple[Layout, ...] = ()


class Goal(NamedTuple):
    """A tensor at its destination. dtype: asked for, None as the source; floats: for floating-point tensors
    alone."""

    layout: Layout
    device_type: str
    dtype: str | None
    floats: bool


class Said:
    """Everything that the ranks said. rank: this one, for errors."""

    def __init__(self, sides: Mapping[int, Side], rank: int) -> None:
        self.sides = sides
        self.rank = rank
        self.ranks = sorted(sides)
        self._origins: dict[str, Origin] = {}
        self.own = frozenset(name for side in sides.values() for name in side.own)
        self._holders: dict[str, dict[int, Held]] = {}
        for other in self.ranks:
            for name, held in sides[other].held.items():
                holders = self._holders.setdefault(name, {})
                if not (holders and name in self.own):  # of a rank's own, the lowest rank's
                    holders[other] = held

    @property
    def first(self) -> Side:
        return self.sides[self.ranks[0]]

    @cached_property
    def lost(self) -> dict[int, int]:
        """Ranks that hold nothing any more, each with what messages call it."""
        return dict(self.first.options["lost"])

    def names(self) -> list[str]:
        """Returns the names of all destinations, in the order in which the ranks say them."""
        found: dict[str, None] = {}
        for rank in self.ranks:
            found.update(dict.fromkeys(self.sides[rank].wanted))
        return list(found)

    def holders(self, name: str) -> dict[int, Held]:
        """Returns what each rank that has a tensor says of it, by ascending rank."""
        return self._holders.get(name, {})

    def goal(self, name: str) -> Goal:
        """Raises PlanMismatchError where ranks name different destinations, or one inside names none. A rank
        inside of a sub-mesh names that; one outside may name the whole mesh that these make up."""
        said = {rank: self.sides[rank].wanted[name] for rank in self.ranks if name in self.sides[rank].wanted}
        first_rank, first = next(iter(said.items()))
        layout: Layout | None = first.layout
        if any(other is not first and other != first for other in said.values()):
            inside = {rank: each for rank, each in said.items() if rank in each.layout.ranks} or said
            first_rank, first = next(iter(inside.items()))
            layout = joined({rank: (each.layout, each.family) for rank, each in inside.items()})
            known = {first.layout} if layout is None else {each.layout for each in inside.values()}
            for rank, other in said.items():
                there = other.layout in known or (layout and everywhere(other.layout) == everywhere(layout))
                rest = other._replace(layout=first.layout, family=first.family, plain=first.plain)
                if there and rest == first:
                    continue
                raise mismatch(
                    f"the destination of {name!r} is {wanted_text(first)} on rank {first_rank}, but "
                    f"{wanted_text(other)} on rank {rank}",
                    self.rank,
                )
        assert layout is not None
        check_not_wanted(name, layout, self.lost, self.rank, OP)
        for rank in layout.ranks:
            if rank not in self.sides:
                raise self._outside(f"the destination of {name!r}", rank)
            if rank not in said:
                raise mismatch(
                    f"ranks {first_rank} and {rank} ask for different tensors: rank {rank} is in the "
                    f"destination of {name!r}, {layout}, but names none for it",
                    self.rank,
                )
        return Goal(layout, first.device_type, first.dtype, first.floats)

    def origin(self, name: str) -> Origin:
        """Raises LayoutError where nobody, or not every rank that should, has it; PlanMismatchError where
        ranks describe it unlike each other."""
        found = self._origins.get(name)
        if found is None:
            found = self._origins[name] = self._origin(name)
        return found

    def check_asked(self, name: str) -> None:
        """Raises unless some rank has a tensor that is asked for by this name."""
        if name in self._holders:
            return
        naming = [rank for rank in self.ranks if name in self.sides[rank].wanted]
        if len(naming) < len(self.ranks):
            other = next(rank for rank in self.ranks if rank not in naming)
            raise mismatch(
                f"ranks {naming[0]} and {other} ask for different tensors: only ranks {naming} name "
                f"{name!r}, which no rank's state_dict has",
                self.rank,
            )
        raise LayoutError(
            f"{OP}: no rank's state_dict has the key {name!r}, for which a destination is given",
            rank=self.rank,
            op=OP,
        )

    def _origin(self, name: str) -> Origin:
        holders = self.holders(name)
        first_rank, first = next(iter(holders.items()))
        for rank, other in holders.items():
            alike = other is first or (
                (other.shape, other.dtype, other.device_type, other.layout is None)
                == (first.shape, first.dtype, first.device_type, first.layout is None)
            )
            if not alike:
                raise self._unlike(name, first_rank, first, rank, other)
        if first.layout is None:
            return Origin(first.shape, first.dtype, copies_on(tuple(sorted(holders))), first.device_type)
        if name in self.own:
            raise LayoutError(
                f"{OP}: own= names {name!r}, a shard under {first.layout}; it is for whole entries of which "
                "each rank has its own",
                rank=self.rank,
                op=OP,
            )
        inside = {r: h for r, h in holders.items() if h.layout is not None and r in h.layout.ranks}
        outside = {r: h for r, h in holders.items() if r not in inside}
        told = inside or outside
        each = {r: (h.layout, h.family) for r, h in told.items() if h.layout is not None}
        one = joined(each)
        layouts = separate(each) if one is None else [one]
        if not layouts:
            rank, other = next(
                (r, h) for r, h in told.items() if h.layout != next(iter(told.values())).layout
            )
            raise self._unlike(name, next(iter(told)), next(iter(told.values())), rank, other)
        for rank, spec in outside.items():  # which may know one of the sub-meshes, or describe all of them
            if spec.layout not in {*layouts, *(h.layout for h in inside.values())}:
                assert spec.layout is not None
                shards = spec.layout.shards(first.shape)
                if all(shards != layout.shards(first.shape) for layout in layouts):
                    raise self._unlike(name, next(iter(told)), next(iter(told.values())), rank, spec)
        for rank in (rank for layout in layouts for rank in layout.ranks):
            if rank in self.lost:
                continue
            if rank not in self.sides:
                raise self._outside(repr(name), rank)
            if rank not in holders:
                raise LayoutError(
                    f"{OP}: rank {rank} is in the mesh of {name!r} but its state_dict has no such key",
                    rank=self.rank,
                    op=OP,
                )
        layouts = [positive(layout, len(first.shape)) for layout in layouts]
        if len(layouts) > 1:
            layouts = [layout for layout in layouts if self._lives(layout, first.shape)] or layouts[:1]
        layout = self._with_loaded(name, together(layouts, first.shape), first)
        left = survivors(layout, first.shape, self.lost, f"{OP}: {name!r}")
        had = None if left is layout else layout
        twins = tuple(layouts) if len(layouts) > 1 else ()
        return Origin(first.shape, first.dtype, left or layout, first.device_type, had, twins)

    def _lives(self, layout: Layout, shape: tuple[int, ...]) -> bool:
        """Returns whether ranks that are not lost hold all of it."""
        return all(
            any(rank not in self.lost for rank in holders) for _, holders in layout._core(shape).tiles(shape)
        )

    def _with_loaded(self, name: str, layout: Layout, first: Held) -> Layout:
        """With the boxes that ranks have loaded."""
        said = {rank: side.loaded[name] for rank, side in self.sides.items() if name in side.loaded}
        if not said:
            return layout
        expected = (checks.dtype_name(first.dtype), first.device_type)
        for rank, (dtype, device, _) in said.items():
            if (dtype, device) != expected:
                raise mismatch(
                    f"{name!r} is {expected[0]} on {expected[1]}, but rank {rank} has loaded {dtype} on "
                    f"{device}",
                    self.rank,
                )
        more = {
            rank: [tuple((lo, hi) for lo, hi in box) for box in boxes] for rank, (*_, boxes) in said.items()
        }
        return with_boxes(layout, first.shape, more, f"{OP}: {name!r}")

    def check_lost(self) -> None:
        """Raises where a lost rank is in no layout of what is held (where all are copies, no layout says),
        and where something was loaded that no layout is for."""
        for rank, side in self.sides.items():
            odd = [name for name in side.loaded if all(h.layout is None for h in self.holders(name).values())]
            if odd:
                raise LayoutError(
                    f"{OP}: rank {rank} has loaded a part of {names_text(odd)}, of which no rank holds a "
                    "shard",
                    rank=self.rank,
                    op=OP,
                )
        said = {held.layout for holders in self._holders.values() for held in holders.values()} - {None}
        layouts = [layout for layout in said if layout is not None]
        known = {rank for layout in layouts for rank in layout.ranks}
        never = sorted(called for number, called in self.lost.items() if number not in known)
        if layouts and never:
            raise LayoutError(
                f"{OP}: lost= names {never}, which are in no layout of what is held, such as "
                f"{min(layouts, key=repr)}; name ranks that held a part",
                rank=self.rank,
                op=OP,
            )

    def check_options(self) -> None:
        """Raises where ranks call otherwise, or a name that one gives is known to none."""
        for other in self.ranks[1:]:
            side = self.sides[other]
            for what in ("options", "maps", "scales"):
                mine, theirs = getattr(self.first, what), getattr(side, what)
                if mine != theirs:
                    raise mismatch(
                        f"the {what} are {_brief(mine)} on rank {self.ranks[0]}, but {_brief(theirs)} on "
                        f"rank {other}",
                        self.rank,
                    )
        new: dict[str, tuple[int, str | None]] = {}
        for rank in self.ranks:
            for old, name in self.sides[rank].renamed.items():
                before, earlier = new.setdefault(old, (rank, name))
                if earlier != name:
                    raise mismatch(
                        f"rename makes {earlier!r} of {old!r} on rank {before}, but {name!r} on rank {rank}",
                        self.rank,
                    )
        wanted = {name for side in self.sides.values() for name in (*side.wanted, *side.carried)}
        for argument, known, what in (
            ("rename", new, "no rank's state_dict has"),
            ("layouts", self._holders, "no rank's state_dict has"),
            ("only", wanted, "no destination is given for"),
            ("dtype", wanted, "no destination is given for"),
        ):
            for rank in self.ranks:
                odd = [name for name in self.sides[rank].unmatched[argument] if name not in known]
                if odd:
                    raise LayoutError(
                        f"{OP}: {argument}= on rank {rank} names what {what}: {names_text(odd)}",
                        rank=self.rank,
                        op=OP,
                    )

    def check_extra(self, used: set[str]) -> None:
        """Raises where a rank holds what nobody asked for."""
        if not self.first.options["strict"] or any(side.selects for side in self.sides.values()):
            return
        for holder in self.ranks:
            extra = [name for name in self.sides[holder].held if name not in used]
            if extra:
                raise LayoutError(
                    f"{OP}: rank {holder} holds {names_text(extra)}, for which no destination is given; add "
                    "one or pass strict=False",
                    rank=self.rank,
                    op=OP,
                )

    def _outside(self, what: str, rank: int) -> LayoutError:
        return LayoutError(
            f"{OP}: {what} is on rank {rank}, which is not in the group; pass group= a group that holds all "
            "meshes",
            rank=self.rank,
            op=OP,
        )

    def _unlike(self, name: str, a: int, first: Held, b: int, second: Held) -> Exception:
        return mismatch(
            f"{name!r} is {held_text(first)} on rank {a}, but {held_text(second)} on rank {b}", self.rank
        )


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
