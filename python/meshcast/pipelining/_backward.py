"""A backward in two parts, on any autograd graph: gradients of the inputs first, those of the weights later.

Nodes of the graph are of two kinds: those on a way to an input, and those that lead to parameters only. A
*boundary* node is of the first kind and has edges to the second: the backward of a matrix product, say. The
first part runs autograd towards the inputs alone; the engine asks each node only for the gradients that are
on the way, so no weight gradient is computed, and the gradients that reach boundary nodes are kept. Then the
edges between the boundary nodes are cut, so that each is a graph of its own, and what the nodes between them
have saved is released. The second part runs all boundary nodes once more, towards their parameters, from
what was kept. Each kernel thus sees the same operands as in the whole backward, and each parameter adds up
the same terms in the same order: gradients are equal to the last bit.

Work that cannot be done twice is done completely in the first part, parameter by parameter:
- parameters that several boundary nodes lead to (shared weights): the engine adds up their terms;
- parameters behind a root that depends on no input, a position bias for one: the root is no boundary;
- boundary nodes written in Python (custom functions), which compute all their gradients at once, and nodes
  under saved-tensor hooks (activation checkpointing), which would recompute.
And everything, if the forward put hooks on values (they would fire twice), uses reentrant checkpointing or
runs compiled parts.

Source: the split into I and W is that of Qi et al., "Zero Bubble Pipeline Parallelism", 2023.

Other names of torch.distributed.pipelining._backward are found here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from .. import _C
from ._utils import names_of_torch

__all__ = ["FixedScale", "SplitBackward", "children_first", "hooks_made", "saved_values"]


# Nodes that allow neither a second run nor to be kept for one.
_UNSPLIT = {
    "CheckpointFunctionBackward": "it uses reentrant activation checkpointing",
    "CompiledFunctionBackward": "a part of it is compiled",
}

Node = Any  # torch.autograd.graph.Node; the classes that the engine makes do not derive from it


def hooks_made() -> int:
    """Number of hooks that this process has registered on tensors, nodes or modules. If it grows during a
    forward, values of that forward carry hooks."""
    return RemovableHandle.next_id


@dataclass(slots=True)
class _Boundary:
    """A node on a way to an input, and the parameters that only it leads to. across: its edges that are on
    the way."""

    node: Node
    across: list[int] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    late: bool = True


@dataclass(slots=True)
class SplitBackward:
    """The backward from `roots`, with gradients `seeds`, of one micro-batch.

    Call `input_gradients`, then `weight_gradients`, once each. The first accumulates into ``grad`` of
    `inputs`, the second into those of the parameters (some of them earlier, as the module explains). hooked:
    the forward registered hooks on its values. Afterwards `whole` says why the backward was not split, if it
    was not.
    """

    roots: Sequence[torch.Tensor]
    seeds: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    hooked: bool = False
    whole: str | None = None
    _kept: list[tuple[_Boundary, tuple[torch.Tensor | None, ...]]] = field(default_factory=list)
    _between: list[Node] = field(default_factory=list)  # on a way to an input, and not needed for W

    def input_gradients(self) -> None:
        """I: returns as soon as the gradients of the inputs are there. Without inputs there is nothing to
        do."""
        if not self.inputs:
            return
        if self.hooked:
            self.whole = "its forward puts hooks on values"
        elif any(root.grad_fn is None for root in self.roots):
            self.whole = "it returns an input as it is"
        boundaries = [] if self.whole else self._boundaries()
        late = [boundary for boundary in boundaries if boundary.late]
        if not late:
            self.whole = self.whole or "no weight gradient can be computed apart"
            torch.autograd.backward(self.roots, self.seeds)
            self.roots = self.seeds = ()
            return
        early = [parameter for each in boundaries if not each.late for parameter in each.parameters]
        handles = [each.node.register_prehook(self._keeper(each)) for each in late]
        try:
            torch.autograd.backward(
                self.roots, self.seeds, retain_graph=True, inputs=[*self.inputs, *_distinct(early)]
            )
        finally:
            for handle in handles:
                handle.remove()
        # W starts at the nodes that were kept. The engine walks through all that it could reach from where it
        # starts, so without the cuts W would walk through the graph once for each of them.
        for boundary in late:
            _C.cut_edges(boundary.node, boundary.across)
        _C.release_saved(self._between)
        self._between.clear()
        self.roots = self.seeds = ()

    def weight_gradients(self) -> None:
        """W."""
        if not self.inputs:
            if self.roots:
                torch.autograd.backward(self.roots, self.seeds)
        else:
            edges, given, parameters = [], [], []
            for boundary, gradients in self._kept:
                for number, gradient in enumerate(gradients):
                    if gradient is not None:
                        edges.append(GradientEdge(boundary.node, number))
                        given.append(gradient)
                if any(gradient is not None for gradient in gradients):
                    parameters += boundary.parameters
            if edges:
                torch.autograd.backward(edges, given, inputs=parameters)
        self._kept.clear()
        self.roots = self.seeds = self.inputs = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the gradients that the second part starts from."""
        return sum(each.nbytes for _, gradients in self._kept for each in gradients if each is not None)

    def _keeper(self, boundary: _Boundary) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._kept.append((boundary, gradients))

        return keep

    def _boundaries(self) -> list[_Boundary]:
        """All boundary nodes; `whole` is set if the graph must not be split at all."""
        targets = {torch.autograd.graph.get_gradient_edge(value).node for value in self.inputs}
        graph = children_first(root.grad_fn for root in self.roots)
        leads = set(targets)  # nodes on a way to an input
        for node, children in graph.items():
            if type(node).__name__ in _UNSPLIT:
                self.whole = _UNSPLIT[type(node).__name__]
                return []
            if not leads.isdisjoint(children):
                leads.add(node)
        owner: dict[Node, _Boundary] = {}
        found = []
        apart = [root.grad_fn for root in self.roots if root.grad_fn not in leads]
        if apart:
            alone = _Boundary(None, late=False)
            _claim(alone, apart, graph, owner)
            if alone.parameters:
                found.append(alone)
        for node, children in graph.items():
            if node not in leads or node in targets:
                continue
            below = [child for child in children if child is not None and child not in leads]
            if below:
                across = [number for number, child in enumerate(children) if child in leads]
                boundary = _Boundary(node, across)
                _claim(boundary, below, graph, owner)
                if boundary.parameters:
                    boundary.late = boundary.late and _runs_twice(node)
                    found.append(boundary)
        late = {each.node for each in found if each.late}
        self._between = [node for node in graph if node in leads and node not in late and node not in targets]
        return found


_Graph = dict[Node, list[Node | None]]  # the next node of each edge of a node


def children_first(roots: Iterable[Node]) -> _Graph:
    """All nodes, each behind those that it leads to. Asking a node for its edges makes objects: once."""
    found: _Graph = {}
    edges: _Graph = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in found:
            stack.pop()
        elif node in edges:
            found[node] = edges[node]
            stack.pop()
        else:
            edges[node] = [child for child, _ in node.next_functions]
            stack.extend(child for child in edges[node] if child is not None and child not in edges)
    return found


def _own_functions(roots: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Names of the custom functions behind the roots, except torch's and meshcast's own."""
    kinds: Any = {type(node) for node in children_first(root.grad_fn for root in roots if root.grad_fn)}
    written = {kind._forward_cls for kind in kinds if hasattr(kind, "_forward_cls")}
    return tuple(
        sorted(each.__name__ for each in written if not each.__module__.startswith(("torch.", "meshcast.")))
    )


@dataclass(slots=True)
class FixedScale:
    """The gradients of a stage that keep the scale that they got in the backward, also where the weight of a
    loss's pairs turns out to be another when the step ends.

    functions: names of the custom autograd functions of users; None until a backward ran. others: there are
    gradients of arguments of the step, or of parameters of the loss function.
    """

    functions: tuple[str, ...] | None = None
    others: bool = False
    _warned: bool = False

    def learn(self, roots: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        """Before a backward from these roots."""
        if self.functions is None:
            self.functions = _own_functions(roots)
        self.others = self.others or bool(others)

    def warn(self, factor: float, what: str) -> None:
        """Warns, once, that the weight was taken to be `factor` times what it is. what: names the stage."""
        found = [f"autograd functions of its own ({', '.join(self.functions)})"] if self.functions else []
        if self.others:
            found.append("gradients of arguments, or of parameters of the loss function")
        if found and not self._warned and abs(factor - 1) > 1e-6:
            self._warned = True
            warnings.warn(
                f"{what} has {' and '.join(found)}. Such gradients, and auxiliary losses, were scaled as if "
                f"the weight of the loss's pairs were {factor:.3g} times what it turned out to be in this "
                "step. Make the schedule with weight_fn=, so that it is known before the step",
                stacklevel=3,
            )


def _claim(boundary: _Boundary, below: list[Node], graph: _Graph, owner: dict[Node, _Boundary]) -> None:
    """Gives the boundary all nodes below it. One that another boundary has makes both early."""
    seen: set[Node] = set()
    while below:
        node = below.pop()
        if node in seen:
            continue
        seen.add(node)
        other = owner.setdefault(node, boundary)
        if other is not boundary:
            other.late = boundary.late = False
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            boundary.parameters.append(parameter)
        below.extend(child for child in graph[node] if child is not None)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved_names(node: Node) -> tuple[str, ...]:
    kind: Any = type(node)
    return _names_of(kind)


def _saved(node: Node, name: str) -> Sequence[Any]:
    found = getattr(node, name)
    return found if isinstance(found, (tuple, list)) else (found,)


def _under_hooks(node: Node, name: str) -> bool:
    """Returns whether what the node has saved by this name is made again when it is requested."""
    return any(getattr(each, "unpack_hook", None) is not None for each in _saved(node, name))


def saved_values(node: Node) -> list[torch.Tensor]:
    """The tensors that the node has saved for its backward, except those that hooks would make again."""
    raw = "_raw_" if isinstance(node, BackwardCFunction) else "_raw"
    names = [name for name in _saved_names(node) if not _under_hooks(node, name)]
    found = [each for name in names for each in _saved(node, name.removeprefix(raw))]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _runs_twice(node: Node) -> bool:
    """Returns whether two runs of a node for different gradients give the same as one run for all of them."""
    if isinstance(node, BackwardCFunction):
        return False
    return not any(_under_hooks(node, name) for name in _saved_names(node))


def _distinct(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


__getattr__, __dir__ = names_of_torch("_backward", globals())
