"""The embedding of a model as integers or codes, and its output head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import patches
from ..errors import VQConfigError
from ..fit import fit_weight, fixed_tensors
from ..formats.catalog import linear_scheme
from ..formats.coded_rows import row_shapes, scheme_of, stored_rows
from ..formats.integers import encode_rows
from ..nn.dense_head import DenseHead
from ..nn.embedding import VQEmbedding, VQTiedHead
from ..nn.linear import VQLinear
from .left_dense import weights_read
from .tensor_parallel import ranks

_ROWS = 8192  # of the vocabulary, in batches of which integers are made
_LARGE = 0.2  # of a model: a dense head that `advice` speaks of
_HEAD = "turboquant-6"  # the scheme that it names
_DIVISOR = 16  # of the length of a row that has codes


def embeddings_of(model: nn.Module) -> dict[str, nn.Module]:
    """The quantized embeddings of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, VQEmbedding)}


def replace_embedding(model: Any, kind: str, seed: int = 0) -> None:
    """Store a model's embedding as `kind` says; one on the meta device becomes an empty one.

    Raises:
        VQConfigError: the embedding is not a plain one, is offloaded, or a tied head has a bias; or
            other modules than the head have its weight.
        VQSchemeError: its rows cannot be stored.
        VQFormatError: it is not finite.
    """
    old, head, new = _stored(model, kind, seed)
    put_module(model, old, new)
    if head is not None:
        tied = VQTiedHead(new)
        put_module(model, head, tied)
        _tie(model, new, tied)


def check_embedding(model: Any, kind: str) -> None:
    """Raise what `replace_embedding` would, values aside, for a model on the meta device."""
    _stored(model, kind, seed=0)


def speed_up_head(model: Any) -> None:
    """Make the output head of a model a `DenseHead` if it is an nn.Linear."""
    head = _part(model, "get_output_embeddings")
    if type(head) is nn.Linear:
        head.__class__ = DenseHead


def _part(model: Any, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # it has none, or Transformers does not know
        return None


def restore_embedding(model: Any, dtype: torch.dtype) -> None:
    """Restore the dense embedding, the output head if it is tied, and the class of a dense one."""
    head = _part(model, "get_output_embeddings")
    if type(head) is DenseHead:
        head.__class__ = nn.Linear  # type: ignore[assignment]
    old = next((m for m in model.modules() if isinstance(m, VQEmbedding)), None)
    if old is None:  # a model may have no input embeddings at all
        return
    weight = nn.Parameter(old.decoded(dtype))
    with torch.device("meta"):
        new = nn.Embedding(old.num_embeddings, old.embedding_dim, old.padding_idx)
        heads = [m for m in model.modules() if isinstance(m, VQTiedHead)]
        dense = [nn.Linear(head.in_features, head.out_features, bias=False) for head in heads]
    places = [_name(model, module) for module in (old, *heads)]
    for module, taken in zip([old, *heads], [new, *dense], strict=True):
        taken.weight = weight
        put_module(model, module, taken.train(module.training))
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in [f"{place}.{key}" for place in places for key in old.keys]:
        tied.pop(name, None)


def _tie(model: Any, embedding: VQEmbedding, head: VQTiedHead) -> None:
    """Have Transformers tie all tensors of a head, as it ties `weight`."""
    tied = getattr(model, "all_tied_weights_keys", {})
    names = {_name(model, module) for module in (embedding, head)}
    for target, source in list(tied.items()):
        pair = [name.removesuffix(".weight") for name in (target, source)]
        if set(pair) == names:
            for key in embedding.keys:
                tied[f"{pair[0]}.{key}"] = f"{pair[1]}.{key}"


def put_module(model: Any, old: nn.Module, new: nn.Module) -> None:
    """Replace a module, and move accelerate's hook to the new one."""
    hook = getattr(old, "_hf_hook", None)
    model.set_submodule(_name(model, old), new)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def advice(model: Any) -> str:
    """A sentence on an output head that is dense and a large part of the model, or ""."""
    embedding, head = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings")
    if type(embedding) is not nn.Embedding or type(head) not in (nn.Linear, DenseHead):
        return ""
    tensors = [*model.parameters(), *model.buffers()]
    is_tied = head.weight is embedding.weight
    if (is_tied and head.bias is not None) or any(tensor.is_meta for tensor in tensors):
        return ""
    own, whole = head.weight.nbytes, sum(tensor.nbytes for tensor in tensors)
    if own < _LARGE * whole:
        return ""
    rows, columns = head.weight.shape
    option, size = 'embeddings="int8"', float(rows * (columns + 2))
    if not is_tied:
        name, scheme = _name(model, head), linear_scheme(_HEAD)
        if name in weights_read(model) or columns & -columns < _DIVISOR:
            return ""
        option = f"layers={{{name!r}: {_HEAD!r}}}".replace("'", '"')
        size = scheme.bits(columns, rows) * rows * columns / 8
    return (
        f"output head: dense, {own / 1e6:.3g} of the model's {whole / 1e6:.3g} MB, and every token "
        f"reads it; VQConfig({option}) stores it in {size / 1e6:.3g}."
    )


def resizing_no_codes(before: Any) -> Any:
    """`PreTrainedModel.resize_token_embeddings` that knows models of codes."""
    return patches.of_codes(_resize_token_embeddings, before)


def _resize_token_embeddings(
    before: Any,
    self: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Accept only the present size of an embedding of codes.

    Raises:
        VQConfigError: another size is requested.
    """
    embedding, head = self.get_input_embeddings(), _part(self, "get_output_embeddings")
    coded = embedding is not None and any(isinstance(m, VQEmbedding) for m in embedding.modules())
    if coded or isinstance(head, VQLinear):
        rows = embedding.num_embeddings
        requested = rows if new_num_tokens is None else new_num_tokens
        requested += -requested % (pad_to_multiple_of or 1)
        if requested != rows:
            raise VQConfigError(
                f"a quantized embedding or output head of {rows} rows cannot be resized to "
                f"{requested}: resize the dense model and quantize that, or dequantize this one "
                "first."
            )
    found = before(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    speed_up_head(self)  # Transformers makes another one
    return found


def _stored(model: Any, kind: str, seed: int) -> tuple[nn.Module, Any, VQEmbedding]:
    """A model's embedding, the head that is tied to it or None, and the embedding as codes."""
    if ranks(model) > 1:
        raise VQConfigError(
            "a quantized embedding cannot be split over devices: load the model on one."
        )
    old, head = model.get_input_embeddings(), model.get_output_embeddings()
    where = _name(model, old)
    sharing = _sharing(model, old)
    head = head if head in sharing.values() else None
    if others := [name for name, module in sharing.items() if module is not head]:
        raise VQConfigError(
            f"cannot quantize {where}: {', '.join(others)} of {type(model).__name__} have the same "
            "weight, and need it dense. Leave embeddings out."
        )
    if hasattr(old, "_hf_hook") and old.weight.is_meta:
        raise VQConfigError(
            f"cannot quantize {where}: it is offloaded. Quantize and save the model without "
            "offloading first."
        )
    if head is not None and (type(head) is not nn.Linear or head.bias is not None):
        raise VQConfigError(
            f"the output head that is tied to {where} is no plain matrix product, and needs it "
            "dense. Leave embeddings out."
        )
    return old, head, VQEmbedding(old, kind, encode(old.weight, kind, where, seed), where)


@torch.no_grad()
def encode(dense: Tensor, kind: str, where: str, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of an embedding by key, codes first; empty ones of one on the meta device.

    Args:
        seed: of the rotation of codes.

    Raises:
        VQSchemeError: its rows cannot be stored.
        VQFormatError: it is not finite.
    """
    shapes = row_shapes(kind, len(dense), dense.shape[1], where)
    if dense.is_meta:
        return {k: torch.empty(s, dtype=torch.uint8, device="meta") for k, s in shapes.items()}
    if (scheme := scheme_of(kind)) is None:
        return {"codes": torch.cat([encode_rows(x, kind, where) for x in dense.split(_ROWS)])}
    fixed = fixed_tensors(scheme, dense.shape[1], seed, device=dense.device)
    return stored_rows({**fixed, **fit_weight(dense, scheme, where=where).tensors})


def _sharing(model: Any, embedding: nn.Module) -> dict[str, nn.Module]:
    """Modules whose weight is the embedding's, or will be once loaded; the embedding is not one."""
    own = f"{_name(model, embedding)}.weight"
    tied = getattr(model, "all_tied_weights_keys", {})  # every target, and the source of all
    source = tied.get(own, own)
    names = {source, *(target for target, of in tied.items() if of == source)}
    parameters = model.named_parameters(remove_duplicate=False)
    names |= {name for name, parameter in parameters if parameter is embedding.weight}
    modules = {name.rpartition(".")[0] for name in names - {own}}
    return {name: model.get_submodule(name) for name in sorted(modules)}


def _name(model: Any, module: nn.Module) -> str:
    return next(name for name, found in model.named_modules() if found is module)
