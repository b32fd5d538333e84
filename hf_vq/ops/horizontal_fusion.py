"""`hf_vq::linears`: several weights times one input in one launch, and the pass that finds them.

A model computes queries, keys and values of the same hidden states, and so the two halves of a
gated MLP. Eager code asks for one after the other, but a compiled graph knows all of them: there
`fuse` makes one op of those that share an input, in whatever model they are. So it does with other
ops that are joined (`w4a8_linear`, whose input is rounded once then).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .. import dispatch, env
from .library import define, linear_problem, parse

MOST = 4  # weights of a launch


def _linears(
    x: Tensor,
    codes: list[Tensor],
    codebook: list[Tensor],
    scale: list[Tensor],
    rotation: list[Tensor | None],
    bias: list[Tensor | None],
    scheme: str,
) -> list[Tensor]:
    run = _together(x, [len(rows) for rows in codes], scheme)
    if run is not None:
        return run(x, codes, codebook, scale, rotation, bias, parse(scheme))
    return [
        torch.ops.hf_vq.linear.default(x, *stored, *[None] * 4, added, scheme)
        for *stored, added in zip(codes, codebook, scale, rotation, bias, strict=True)
    ]


def _fake_linears(x: Tensor, codes: list[Tensor], *arguments: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], rows.shape[0]) for rows in codes]


def _together(x: Tensor, rows: list[int], scheme: str) -> Callable[..., list[Tensor]] | None:
    """What multiplies all of them at once, where the table has one entry for each that can."""
    problems = [linear_problem("linear", x, scheme, count) for count in rows]
    found = {dispatch.select(problem).implementation.grouped for problem in problems}
    return found.pop() if len(found) == 1 else None


# Made by `fuse`, after autograd: a graph that has gradients computes them with other nodes.
define(
    "linears",
    "(Tensor x, Tensor[] codes, Tensor[] codebook, Tensor[] scale, Tensor?[] rotation, "
    "Tensor?[] bias, str scheme) -> Tensor[]",
    _linears,
    _fake_linears,
)


class Joined(NamedTuple):
    """An op of which several with one input and scheme, its first and last argument, may be one.

    Args:
        several: that op; it returns a list.
        lists: positions of the arguments that it takes as lists; all others are None.
        can: whether it is worth while, for an input, rows of each weight and a scheme.
    """

    several: Any
    lists: Sequence[int]
    can: Callable[[Tensor, list[int], str], bool]


_joined: dict[Any, Joined] = {}


def join(
    alone: Any, several: Any, lists: Sequence[int], can: Callable[[Tensor, list[int], str], bool]
) -> None:
    """Let `fuse` make one `several` of all `alone`; see `Joined`."""
    _joined[alone] = Joined(several, lists, can)


def worth_while(x: Tensor, rows: list[int], scheme: str) -> bool:
    """Whether the kernels that would run all `hf_vq::linear` can do so in one launch."""
    return _together(x, rows, scheme) is not None


def fuse(graph: fx.Graph) -> None:
    """Make one node of all products that share input and scheme, where that is worth while.

    It stands where the first of them was; one that needs what is computed later is left alone.
    """
    for alone, joined in _joined.items():
        _fuse(graph, alone, joined)


def _fuse(graph: fx.Graph, alone: Any, joined: Joined) -> None:
    place = {node: index for index, node in enumerate(graph.nodes)}
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=alone):
        found = alike.setdefault((node.args[0], node.args[-1]), [])
        first = found[0] if found else node
        others = set(range(1, len(node.args) - 1)).difference(joined.lists)
        none = all(node.args[i] is None for i in others)
        if none and all(place[i] < place[first] for i in node.all_input_nodes):
            found.append(node)
    for found in alike.values():
        for begin in range(0, len(found), MOST):
            nodes = found[begin : begin + MOST]
            if len(nodes) > 1 and _can(nodes, joined):
                _replace(graph, nodes, joined)


def _can(nodes: list[fx.Node], joined: Joined) -> bool:
    x, scheme = nodes[0].args[0].meta["val"], nodes[0].args[-1]  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in x.shape):
        return False
    return joined.can(x, [node.meta["val"].shape[-1] for node in nodes], str(scheme))


def _replace(graph: fx.Graph, nodes: list[fx.Node], joined: Joined) -> None:
    x, scheme = nodes[0].args[0], nodes[0].args[-1]  # x as it is now: it may itself be replaced
    lists = ([node.args[i] for node in nodes] for i in joined.lists)
    with graph.inserting_before(nodes[0]):
        fused = graph.call_function(joined.several, (x, *lists, scheme))
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
