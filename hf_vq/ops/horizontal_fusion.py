"""`hf_vq::linears`: several weights times one input in one launch, and the pass that finds them.

A model computes queries, keys and values of the same hidden states, and so the two halves of a
gated MLP. Eager code asks for one after the other, but a compiled graph knows all of them: there
`fuse` makes one op of those that share an input, in whatever model they are. So it does with other
ops that are registered (`w4a8_linear`, whose input is rounded once then).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import dispatch, env
from ..formats.stored_weight import FLAT, LISTS_SCHEMA, Pass, StoredWeight
from .library import define, linear_problem, parse

MOST = 4  # weights of a launch


def _linears(x: Tensor, *arguments: Any) -> list[Tensor]:
    *lists, biases, spec = arguments
    each, scheme = list(zip(*lists, strict=True)), parse(spec)
    run = _grouped(x, [len(codes) for codes, *_ in each], spec)
    if run is not None:
        weights = [StoredWeight(Pass(*one), None, scheme, x.shape[-1]) for one in each]
        return run(x, weights, biases)
    rest = [None] * (FLAT - len(lists))
    return [
        torch.ops.hf_vq.linear.default(x, *one, *rest, bias, spec)
        for one, bias in zip(each, biases, strict=True)
    ]


def _fake_linears(x: Tensor, codes: list[Tensor], *arguments: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], rows.shape[0]) for rows in codes]


def _grouped(x: Tensor, rows: list[int], scheme: str) -> Callable[..., list[Tensor]] | None:
    """What multiplies all of them at once, where the table has one entry for each that can."""
    problems = [linear_problem("linear", x, scheme, count) for count in rows]
    found = {dispatch.select(problem).implementation.grouped for problem in problems}
    return found.pop() if len(found) == 1 else None


# Made by `fuse`, after autograd: a graph that has gradients computes them with other nodes.
define(
    "linears",
    f"(Tensor x, {LISTS_SCHEMA}, Tensor?[] bias, str scheme) -> Tensor[]",
    _linears,
    _fake_linears,
)


class Fusible(NamedTuple):
    """An op of which several with one input and scheme, its first and last argument, may be one.

    Args:
        several: that op; it returns a list.
        lists: positions of the arguments that it takes as lists; all others are None.
        can: whether it is worth while, for an input, rows of each weight and a scheme.
    """

    several: Any
    lists: Sequence[int]
    can: Callable[[Tensor, list[int], str], bool]


_fusible: dict[Any, Fusible] = {}


def register(
    alone: Any, several: Any, lists: Sequence[int], can: Callable[[Tensor, list[int], str], bool]
) -> None:
    """Let `fuse` make one `several` of all `alone`; see `Fusible`."""
    _fusible[alone] = Fusible(several, lists, can)


def worth_while(x: Tensor, rows: list[int], scheme: str) -> bool:
    """Whether the kernels that would run all `hf_vq::linear` can do so in one launch."""
    return _grouped(x, rows, scheme) is not None


def fuse(graph: fx.Graph) -> None:
    """Make one node of all products that share input and scheme, where that is worth while.

    It stands where the first of them was; one that needs what is computed later is left alone.
    """
    for alone, fusible in _fusible.items():
        _fuse(graph, alone, fusible)


def _fuse(graph: fx.Graph, alone: Any, fusible: Fusible) -> None:
    place = {node: index for index, node in enumerate(graph.nodes)}
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=alone):
        found = alike.setdefault((node.args[0], node.args[-1]), [])
        first = found[0] if found else node
        others = set(range(1, len(node.args) - 1)).difference(fusible.lists)
        none = all(node.args[i] is None for i in others)
        if none and all(place[i] < place[first] for i in node.all_input_nodes):
            found.append(node)
    for found in alike.values():
        for begin in range(0, len(found), MOST):
            nodes = found[begin : begin + MOST]
            if len(nodes) > 1 and _can(nodes, fusible):
                _replace(graph, nodes, fusible)


def _can(nodes: list[fx.Node], fusible: Fusible) -> bool:
    x, scheme = nodes[0].args[0].meta["val"], nodes[0].args[-1]  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in x.shape):
        return False
    return fusible.can(x, [node.meta["val"].shape[-1] for node in nodes], str(scheme))


def _replace(graph: fx.Graph, nodes: list[fx.Node], fusible: Fusible) -> None:
    x, scheme = nodes[0].args[0], nodes[0].args[-1]  # x as it is now: it may itself be replaced
    lists = ([node.args[i] for node in nodes] for i in fusible.lists)
    with graph.inserting_before(nodes[0]):
        fused = graph.call_function(fusible.several, (x, *lists, scheme))
        fused.meta["val"] = [node.meta["val"] for node in nodes]
        items = [graph.call_function(operator.getitem, (fused, i)) for i in range(len(nodes))]
    for node, item in zip(nodes, items, strict=True):
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item)
        graph.erase_node(node)


@functools.cache
def fusing_pass(before: None) -> Any:
    """The pass that calls `fuse`, for a free slot of torch's compiler (`patches`)."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Fuse(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:  # what a compiled graph on disk depends on
            return get_hash_for_files((__file__,)), env.BACKEND.get()

    return Fuse()
