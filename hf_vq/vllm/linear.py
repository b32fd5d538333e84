"""Linear layers of vLLM whose weights are codes.

vLLM stacks matrices that read one input (Q, K, V; gate, up) in one layer, and splits layers over
ranks. Two matrices may have different schemes, scales and rotations, so each becomes one
`VQLinear`; neighbours that agree are joined.

    q_proj.weight .vq_scale .vq_signs -> VQLinear |
    k_proj ..                         -> VQLinear |-> one VQLinear, if they agree
    v_proj ..                         -> VQLinear |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import linear as layers

from ..errors import VQConfigError, VQFormatError
from ..hf.checkpoint.headers import CURE, check_recorded, check_values, packaged
from ..hf.config import VQConfig
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from ..nn.replace import linear_class
from .matrix import Ranks, StoredMatrix, join, pieces

_QKV = {"q": 0, "k": 1, "v": 2}


class VQLinearMethod(layers.LinearMethodBase):
    """Loads and runs one linear layer of vLLM; each layer has a separate method.

    Args:
        config: gives the scheme of each stored layer.
        coded: the stored matrices that make up the layer, in order; False for a dense one.
    """

    def __init__(self, config: VQConfig, coded: Mapping[str, bool]) -> None:
        self.config, self.coded = config, coded
        self.matrices: list[StoredMatrix] = []
        self.dummy = get_current_vllm_config().load_config.load_format == "dummy"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make an empty module for each matrix, and what vLLM loads into: parameters without
        elements, by the names of the stored tensors.

        Raises:
            VQConfigError: the codes of a matrix cannot be split over the ranks.
        """
        ranks = Ranks(layer.tp_rank, layer.tp_size, input_size_per_partition != input_size)
        own, whole = output_partition_sizes, _stored_rows(layer, output_size)
        groups = [([size], [total]) for size, total in zip(own, whole, strict=True)]
        if len(self.coded) == 1:  # the checkpoint stacks the matrices as vLLM does
            groups = [(own, whole)]
        for name, (sizes, totals) in zip(self.coded, groups, strict=True):
            module = self._module(name, sum(sizes), input_size_per_partition, params_dtype)
            with torch.device("meta"):
                stored = self._module(name, sum(totals), input_size, params_dtype)
            if ranks.by_column or sizes != totals:
                ranks.check(stored, name)
            rows = pieces(sizes, totals, ranks)
            self.matrices.append(StoredMatrix(name, module, stored, rows, ranks))
        layer.vq_parts = nn.ModuleList([matrix.module for matrix in self.matrices])
        for matrix in self.matrices:
            for attribute in sorted(matrix.missing - set(layer._parameters)):
                like: Tensor = getattr(matrix.module, attribute)
                empty: Any = nn.Parameter(like.new_empty(0), requires_grad=False)
                empty.weight_loader = partial(self._load, attribute)
                layer.register_parameter(attribute, empty)

    def _module(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> nn.Linear:
        if not self.coded[name]:
            return nn.Linear(columns, rows, bias=False, dtype=dtype).requires_grad_(False)
        layout = self.config.published_layouts.get(name)
        if layout is not None:
            return PublishedLinear(layout, (rows, columns), False, dtype=dtype, where=name)
        scheme, seed = self.config.stored_scheme(name), self.config.seed
        return linear_class(scheme)(columns, rows, False, scheme, seed=seed, where=name)

    def _load(self, attribute: str, _: nn.Parameter, stored: Tensor, shard: Any = None) -> None:
        """Take a stored tensor; vLLM says of which matrix by "q", "k", "v" or a number."""
        shard = getattr(stored, "shard_id", None) if shard is None else shard
        index = 0 if len(self.matrices) == 1 else _QKV.get(shard, shard)
        if not isinstance(index, int):
            raise VQConfigError(
                f"{', '.join(self.coded)}: vLLM loads them as one ({shard!r}), and the checkpoint "
                "stores codes of each."
            )
        self.matrices[index].take(attribute, stored)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, add the tensors that layers share, and join what agrees.

        Raises:
            VQFormatError: a tensor is missing, or not finite.
        """
        modules: dict[str, nn.Linear] = {}
        for matrix in self.matrices:
            if matrix.missing and not self.dummy:
                raise VQFormatError(
                    f"the checkpoint lacks {', '.join(sorted(matrix.missing))} of {matrix.name}. "
                    f"{CURE}"
                )
            modules[matrix.name] = matrix.module
            for attribute in matrix.module._parameters:
                if attribute not in ("bias", "weight"):  # vLLM's adapters ask a weight's device
                    layer._parameters.pop(attribute, None)
        self.matrices = []
        coded = {name: part for name, part in modules.items() if isinstance(part, VQLinear)}
        shared = shared_tensors(coded.values(), self.config)
        for name, part in coded.items():
            part.set_shared(shared)
            if not self.dummy:
                check_values(part, name)
        layer.vq_parts = nn.ModuleList(join(list(modules.values()), shared, self.config.seed))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features of all matrices], in the dtype of `x`."""
        parts = [part(x) for part in layer.vq_parts]
        y: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias


def shared_tensors(modules: Iterable[Any], config: VQConfig) -> dict[str, Tensor]:
    """The tensors that layers share, which the package has.

    Raises:
        VQFormatError: one is not that of the config's checkpoint.
    """
    found = packaged(modules, config.seed)
    check_recorded(found, config.provenance or {})
    return found


def _stored_rows(layer: Any, output_size: int) -> list[int]:
    """Rows of each matrix of a layer as a checkpoint has them."""
    if isinstance(layer, layers.QKVParallelLinear):
        queries, kv = layer.total_num_heads, layer.total_num_kv_heads
        return [queries * layer.head_size, kv * layer.head_size, kv * layer.v_head_size]
    return list(getattr(layer, "output_sizes", [output_size]))
