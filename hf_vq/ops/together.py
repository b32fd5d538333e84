"""`hf_vq::linears`: several weights times one input in one launch, and the pass that finds them.

A model computes queries, keys and values of the same hidden states, and so the two halves of a
gated MLP. Eager code asks for one after the other, but a compiled graph knows all of them: there
`fuse` makes one op of those that share an input, in whatever model they are.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .. import env
from . import dispatch
from .library import define, parse, problem

MOST = 4  # weights of a launch
_SLOTS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")  # of torch._inductor.config


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
    """What multiplies all of them at once, where the table has one row for each that can."""
    found = {dispatch.select(problem("linear", x, scheme, count)).together for count in rows}
    return found.pop() if len(found) == 1 else None


# Made by `fuse`, after autograd: a graph that has gradients computes them with other nodes.
define(
    "linears",
    "(Tensor x, Tensor[] codes, Tensor[] codebook, Tensor[] scale, Tensor?[] rotation, "
    "Tensor?[] bias, str scheme) -> Tensor[]",
    _linears,
    _fake_linears,
)


def fuse(graph: fx.Graph) -> None:
    """Make one node of all `hf_vq::linear` that share input and scheme, where the kernels that
    would run them can do so in one launch.

    It stands where the first of them was; one that needs what is computed later is left alone.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.hf_vq.linear.default):
        x, *stored, _, scheme = node.args
        found = alike.setdefault((x, scheme), [])
        first = found[0] if found else node
        if stored[4:] == [None] * 4 and all(place[i] < place[first] for i in node.all_input_nodes):
            found.append(node)
    for (_, scheme), found in alike.items():
        for begin in range(0, len(found), MOST):
            nodes = found[begin : begin + MOST]
            if len(nodes) > 1 and _can(nodes, scheme):
                _replace(graph, nodes, scheme)


def _input(nodes: list[fx.Node]) -> Any:
    return nodes[0].args[0]  # as it is now: it may itself be one of those that were replaced


def _can(nodes: list[fx.Node], scheme: str) -> bool:
    x = _input(nodes).meta["val"]
    if not all(isinstance(size, int) for size in x.shape):
        return False
    return _together(x, [node.meta["val"].shape[-1] for node in nodes], scheme) is not None


def _replace(graph: fx.Graph, nodes: list[fx.Node], scheme: str) -> None:
    stored = ([node.args[i] for node in nodes] for i in (1, 2, 3, 4, 9))
    with graph.inserting_before(nodes[0]):
        fused = graph.call_function(
            torch.ops.hf_vq.linears.default, (_input(nodes), *stored, scheme)
        )
        fused.meta["val"] = [node.meta["val"] for node in nodes]
        items = [graph.call_function(operator.getitem, (fused, i)) for i in range(len(nodes))]
    for node, item in zip(nodes, items, strict=True):
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item)
        graph.erase_node(node)


@functools.cache
def _pass() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Fuse(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:  # what a compiled graph on disk depends on
            return get_hash_for_files((__file__,)), env.BACKEND.get()

    return Fuse()


def install() -> None:
    """Have torch's compiler call `fuse`, where a slot for a pass is free.

    For when `hf_vq::linear` is traced: importing the compiler takes seconds.
    """
    config = sys.modules.get("torch._inductor.config")
    slots = [] if config is None else [getattr(config, slot) for slot in _SLOTS]
    if None in slots and _pass() not in slots:
        setattr(config, _SLOTS[slots.index(None)], _pass())
