"""The twins with outliers have what real models have, and plain codes lose on them what they lose
there; taking the outliers off first cures it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_vq.evaluation.kv_stress import SINKS, attention_states
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats.catalog import kv_scheme, linear_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops import decode_kv, decode_weight, encode_kv
from hf_vq.ops.reference.codes import mean_of
from tests.fixtures.models.outlier_twins import MASSIVE, input_energies, text_ids


def load(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def original(tinybooks):
    return load(tinybooks)


@pytest.fixture(scope="module")
def massive(massive_twin):
    return load(massive_twin)


@pytest.fixture(scope="module")
def biased(key_bias_twin):
    return load(key_bias_twin)


@pytest.fixture(scope="module")
def ids(tinybooks):
    return text_ids(tinybooks, 2)


@torch.no_grad()
def test_massive_channels_change_nothing(original, massive, ids):
    assert torch.equal(original(ids).logits, massive(ids).logits)


def test_inputs_are_as_uneven_as_those_of_real_models(original, massive, ids):
    plain, twin = (
        {key: float(e.max() / e.median()) for key, e in input_energies(model, ids).items()}
        for model in (original, massive)
    )
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"):
        assert all(twin[index, kind] > 500 for index in range(4)), kind
    assert max(plain[index, "down_proj"] for index in range(4)) < 100
    assert all(1e4 < twin[index, "down_proj"] < 2e5 for index in MASSIVE)


def output_error(weight: Tensor, energy: Tensor, s: Tensor | None = None) -> float:
    """Squared error of the outputs of `vq-4`, for inputs without correlation, over the outputs'.

    Args:
        weight: [out, in].
        energy: E x_i^2 [in].
        s: factor of each column [in] while it is coded.
    """
    scheme, s = linear_scheme("vq-4"), torch.ones(weight.shape[1]) if s is None else s
    fitted = fit_weight(weight * s, scheme)
    tensors = {**fixed_tensors(scheme, weight.shape[1], seed=0), **fitted.tensors}
    error = decode_weight(tensors, scheme, weight.shape[1]) / s - weight
    wrong, all_of_it = ((x.double().square() * energy).sum() for x in (error, weight))
    return float(wrong / all_of_it)


@torch.no_grad()
def test_codes_of_weights_lose_to_massive_channels_unless_columns_are_scaled(
    original, massive, ids
):
    names = [(1, "mlp", "down_proj"), (3, "mlp", "down_proj"), (0, "self_attn", "o_proj")]
    before, energies = input_energies(original, ids), input_energies(massive, ids)
    for index, part, kind in names:
        weights = [
            getattr(getattr(model.model.layers[index], part), kind).weight.float()
            for model in (original, massive)
        ]
        energy = energies[index, kind]
        plain, twin = (
            output_error(weights[0], before[index, kind]),
            output_error(weights[1], energy),
        )
        s = (energy.sqrt() / weights[1].norm(dim=0)).sqrt().float()
        assert twin > 5 * plain, (index, kind)
        assert output_error(weights[1], energy, s) < 1.2 * plain, (index, kind)


@torch.no_grad()
def keys_of(model: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer keys after RoPE [B, H, T, D], and their mean before RoPE, turned: R_n m."""
    position = torch.arange(ids.shape[1])[None]
    for _, keys, _ in attention_states(model, ids).values():
        cos, sin = model.model.rotary_emb(keys, position)
        turned_back, _ = apply_rotary_pos_emb(keys, keys, cos, -sin)
        mean = mean_of(turned_back[:, :, SINKS:]).expand_as(keys)
        yield keys, apply_rotary_pos_emb(mean, mean, cos, sin)[0]


def coding_error(keys: Tensor, scheme: str) -> float:
    """Mean squared error of keys [B, H, T, D] as codes; the sinks are no codes."""
    part, old = kv_scheme(scheme).key, keys[:, :, SINKS:].flatten(0, 1)
    codebook = universal_tensor(part)
    codes, scale = encode_kv(old, codebook, part)
    decoded = decode_kv(codes, scale, codebook, part, keys.shape[-1])
    return float((decoded - old).double().square().mean())


@pytest.mark.parametrize("scheme", ["u4", "u3", "u2"])
def test_coded_keys_lose_to_a_bias_that_turns_unless_it_is_turned_with(
    scheme, original, biased, ids
):
    for (keys, _), (twin, constant) in zip(
        keys_of(original, ids), keys_of(biased, ids), strict=True
    ):
        plain = coding_error(keys - mean_of(keys[:, :, SINKS:]), scheme)
        assert coding_error(twin - mean_of(twin[:, :, SINKS:]), scheme) > 5 * plain
        assert coding_error(twin - constant, scheme) < 2 * plain


def test_key_channels_stand_out(original, massive, ids):
    """In every head a channel that no mean takes off."""

    def least(model: Any) -> float:
        energies = [
            (k - mean_of(k[:, :, SINKS:])).square().mean((0, 2)) for k, _ in keys_of(model, ids)
        ]
        return min(float((e.amax(1) / e.median(1).values).min()) for e in energies)

    assert least(massive) > 5 * least(original)


def test_the_key_bias_is_far_above_what_changes(original, biased, ids):
    def least(model: Any) -> float:
        parts = [(c.square().sum(), (k - c).square().sum()) for k, c in keys_of(model, ids)]
        return min(float(constant / changing) for constant, changing in parts)

    assert least(biased) > 10 * least(original)


@torch.no_grad()
def test_a_key_bias_leaves_a_language_model(original, biased, ids):
    """Its own function is the reference on it, so it has to be a sensible one."""
    losses = [float(model(ids, labels=ids).loss) for model in (original, biased)]
    assert losses[1] < losses[0] + 0.3
    biases = [block.self_attn.k_proj.bias.abs().max() for block in biased.model.layers]
    assert min(biases) >= 8
    assert max(biases) > 30
