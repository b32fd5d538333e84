"""Every weight scheme of the catalogue is fitted without data, as well as theory says."""

import itertools

import pytest
import torch

from hf_vq.errors import VQConfigError, VQFormatError, VQSchemeError
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import (
    WEIGHT_SCHEMES,
    VQScheme,
    pack_bits,
    stored_bits,
    tensor_specs,
    unpack_bits,
    weight_scheme,
)
from hf_vq.formats.shared import second_universal_tensor
from hf_vq.formats.spec import validate_tensor
from hf_vq.ops import decode_weight
from hf_vq.ops.reference.encode_weight import Assigner

# Relative squared error on Gaussian weights with the searched scale, group 128, and the number of
# weights used here: their mean varies by about 2 / sqrt(weights) of itself.
GAUSSIAN = {
    "vq-4": 0.00669,
    "vq-3": 0.02715,
    "turboquant-2": 0.1143,
    "turboquant-3": 0.0316,
    "turboquant-4": 0.00779,
}


def decoded(fitted, scheme, in_features, seed=0):
    tensors = {**fixed_tensors(scheme, in_features, seed), **fitted.tensors}
    return decode_weight(tensors, scheme, in_features)


def relative_error(weight, approximation):
    return float((weight - approximation).square().sum() / weight.square().sum())


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_catalogue(name):
    scheme = weight_scheme(name)
    weight = torch.randn(48, 256) * 0.02
    fitted = fit_weight(weight, scheme)
    specs = tensor_specs(scheme, 48, 256)
    assert set(fitted.tensors) == {key for key, spec in specs.items() if not spec.shared_name}
    for key, tensor in fitted.tensors.items():
        validate_tensor(key, tensor, specs[key], name)
    assert fitted.relative_error == pytest.approx(
        relative_error(weight, decoded(fitted, scheme, 256)), rel=1e-4
    )
    # 4^-bits is Shannon's limit for Gaussian data; no scheme is 3 times worse.
    code_bits = scheme.streams * scheme.entry_bits / scheme.vector_size + scheme.second_bits
    assert fitted.relative_error < 3 * 4**-code_bits


@pytest.mark.slow
@pytest.mark.parametrize("name", GAUSSIAN)
def test_gaussian_error(name):
    weight = torch.randn(256, 512)
    fitted = fit_weight(weight, weight_scheme(name))
    assert fitted.relative_error == pytest.approx(GAUSSIAN[name], rel=0.015)


@pytest.mark.slow
def test_residual_beats_one_stage_and_e8p_beats_its_bound():
    weight = torch.randn(64, 512)
    two = fit_weight(weight, weight_scheme("quip-sharp-2")).relative_error
    four = fit_weight(weight, weight_scheme("quip-sharp-4")).relative_error
    assert two < 0.0914  # E8P on N(0, 1) with one fixed scale; the searched scale gains
    assert four < 0.0088  # QuIP#'s own residual stage, 1 / 3.45 of the first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "search", "most"),
    [
        ("turboquant-4", "norm", 0.0094),
        ("turboquant-4", "search", 0.0078),
        ("turboquant-3", "search", 0.0317),
        ("turboquant-2", "search", 0.1145),
        ("turboquant-4+4", "norm", 4.4e-5),
        ("turboquant-4+4", "search", 3.3e-5),
        ("turboquant-4+2", "norm", 6.7e-4),
        ("turboquant-4+2", "search", 5.1e-4),
    ],
)
def test_gaussian_bars_of_turboquant(name, search, most):
    """In groups of 128. Their means vary by 2 / sqrt(weights), 0.14 % here."""
    torch.manual_seed(7)
    fitted = fit_weight(torch.randn(2048, 1024), weight_scheme(name), search=search)
    assert fitted.relative_error <= most


@pytest.mark.parametrize("second", [1, 2, 4])
def test_a_first_pass_stands_alone(second):
    """Nested codes are found together, the scale too: the first pass alone is worse than that of
    `turboquant-4`, .0078, and about that of Lloyd-Max with one scale for all, .0095."""
    weight = torch.randn(64, 512)
    both = weight_scheme(f"turboquant-4+{second}")
    fitted = fit_weight(weight, both)
    only = {key: t for key, t in fitted.tensors.items() if not key.endswith("_2")}
    one = both.first_pass()
    specs = tensor_specs(one, 64, 512)
    assert set(only) == {key for key, spec in specs.items() if not spec.shared_name}
    alone = decode_weight({**fixed_tensors(one, 512, 0), **only}, one, 512)
    assert 0.0078 < relative_error(weight, alone) < 1.05 * 0.0095


@pytest.mark.usefixtures("reference_kernels")
def test_nested_codes_are_those_of_the_merged_scheme():
    weight = torch.randn(16, 256)
    scheme = weight_scheme("turboquant-3+2")
    fitted = fit_weight(weight, scheme).tensors
    pair = (unpack_bits(fitted["codes"], 3, 256) << 2) | unpack_bits(fitted["codes_2"], 2, 256)
    merged = {
        "codes": pack_bits(pair, 5),
        "codebook": second_universal_tensor(scheme),
        **{key: fitted[key] for key in ("scale", "signs")},
    }
    expected = decoded(fit_weight(weight, scheme), scheme, 256)
    assert torch.equal(decode_weight(merged, scheme.merged(), 256), expected)


@pytest.mark.slow
def test_nested_beats_rerotated_beats_shared():
    """Of passes with one rotation, the second sees what the first one's cells look like; of a
    turned residual nothing is left but its variance."""
    weight = torch.randn(128, 512)
    errors = {
        stages: fit_weight(
            weight, VQScheme(1, 4, residuals=2, stages=stages), search="norm"
        ).relative_error
        for stages in ("nested", "rerotated", "shared")
    }
    assert errors["nested"] == pytest.approx(4.13e-5, rel=0.02)
    assert 2 * errors["nested"] < errors["rerotated"] < errors["shared"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["random_hadamard", "qr"])
def test_rerotated_passes_multiply_their_errors(rotation):
    scheme = VQScheme(1, 4, residuals=2, rotation=rotation, stages="rerotated")
    weight = torch.randn(64, 512)
    fitted = fit_weight(weight, scheme, search="norm")
    # Upstream's re-rotated 4+4: .0093^2 = 8.7e-5. A QR matrix is stored in fp16, whose rounding
    # (2^-12 per entry, relative) adds about 2e-7.
    assert fitted.relative_error == pytest.approx(0.00933**2, rel=0.06)


@pytest.mark.slow
def test_search_beats_least_squares_beats_norm():
    weight = torch.randn(128, 512)
    errors = [
        fit_weight(weight, weight_scheme("vq-4"), search=how).relative_error
        for how in ("search", "least_squares", "norm")
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.9 * errors[2]  # .00669 and .00767 in theory


@pytest.mark.parametrize(
    ("name", "in_features"),
    [
        *itertools.product(["vq-4", "vq-3", "vq-2", "turboquant-3"], [288, 80, 13696, 48]),
        *itertools.product(["aqlm-2", "gptvq-2"], [288, 80, 48]),
        *itertools.product(["turboquant-4", "turboquant-4+2"], [320, 272, 48]),
    ],
)
def test_dimensions_without_a_tail(name, in_features):
    """`turboquant-model` crashes on 320 columns, or scales the last 64 as if they were 128."""
    scheme = weight_scheme(name)
    weight = torch.randn(5, in_features)
    fitted = fit_weight(weight, scheme)
    approximation = decoded(fitted, scheme, in_features)
    # No column is worse than the rest: a wrong tail would have an error of the order of one.
    columns = (weight - approximation).square().reshape(5, -1, 16).mean((0, 2))
    assert columns.max() < 0.5
    assert fitted.relative_error < 0.15


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_stored_bits_are_nominal(name):
    """`turboquant-model` fails with 1 and 2 bits, and stores 3 as 4 and 4+2 as 8."""
    scheme = weight_scheme(name)
    fitted = fit_weight(torch.randn(128, 512), scheme)
    assert stored_bits(fitted.tensors) / (128 * 512) == pytest.approx(
        scheme.bits(512, 128), rel=0.01
    )


def test_chunks_do_not_change_the_result(monkeypatch):
    from hf_vq.fit import weight as module

    weight = torch.randn(37, 256)
    shared = "vq1x4+2r2-universal-g64-hadamard64-shared"
    rerotated = "vq1x3r2-universal-g128-qr64-rerotated"
    for name in ("vq-4", "turboquant-4+4", "aqlm-2", rerotated, shared):
        whole = fit_weight(weight, weight_scheme(name))
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CHUNK", 256 * 5)
            parts = fit_weight(weight, weight_scheme(name))
        assert all(torch.equal(whole.tensors[key], parts.tensors[key]) for key in whole.tensors)
        assert whole.relative_error == pytest.approx(parts.relative_error, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_read_exactly(dtype):
    weight = torch.randn(16, 256).to(dtype)
    low, full = (fit_weight(w, weight_scheme("vq-4")) for w in (weight, weight.float()))
    assert all(torch.equal(low.tensors[key], full.tensors[key]) for key in full.tensors)


def test_hard_weights():
    scheme = weight_scheme("vq-4")
    zero = fit_weight(torch.zeros(4, 128), scheme)
    assert zero.relative_error == 0
    assert torch.equal(decoded(zero, scheme, 128), torch.zeros(4, 128))
    constant = fit_weight(torch.ones(4, 128), scheme)
    assert constant.relative_error < 0.02  # without signs: one spike per group
    outlier = torch.randn(64, 256)
    outlier[:, 5] *= 50
    assert fit_weight(outlier, scheme).relative_error < 0.02
    no_steps = fit_weight(torch.zeros(4, 128), weight_scheme("vq4x4r2-tensor-int7-g0-none"))
    assert no_steps.relative_error == 0
    tiny = fit_weight(torch.randn(16, 128) * 1e-3, scheme)
    assert tiny.relative_error < 0.01


def test_weights_that_cannot_be_stored():
    scheme = weight_scheme("vq-4")
    bad = torch.randn(4, 128)
    bad[1, 3] = float("nan")
    for name in ("vq-4", "aqlm-2", "gptvq-2"):
        with pytest.raises(VQFormatError, match=r"q_proj holds NaN.*modules_to_not_convert"):
            fit_weight(bad, weight_scheme(name), where="q_proj")
    with pytest.raises(VQFormatError, match="too large for fp16"):
        fit_weight(torch.randn(4, 128) * 1e6, scheme)
    with pytest.raises(VQFormatError, match="too small for fp16"):
        fit_weight(torch.randn(4, 128) * 1e-9, scheme)
    with pytest.raises(VQFormatError, match="float matrix"):
        fit_weight(torch.zeros(0, 128), scheme)
    with pytest.raises(VQSchemeError, match="q_proj has"):
        fit_weight(torch.randn(4, 129), scheme, where="q_proj")
    with pytest.raises(VQConfigError, match="search must be one of"):
        fit_weight(torch.randn(4, 128), scheme, search="best")
    with pytest.raises(VQFormatError, match="float matrix"):
        fit_weight(torch.zeros(4, 128, dtype=torch.int8), scheme)


LEARNED = [n for n in WEIGHT_SCHEMES if weight_scheme(n).codebook in ("tensor", "tile")]


@pytest.mark.parametrize("name", [*LEARNED, "vq-4"])
def test_weights_of_any_size_fit_or_say_why_they_cannot(name):
    """Learned codebooks are of rows over their scales, and tiny rows have none in fp16."""
    weight, scheme = torch.randn(16, 128), weight_scheme(name)
    for size in (1e-38, 1e-30, 1e-20, 1e-10, 1e-8):
        with pytest.raises(VQFormatError, match=r"q_proj has weights too small for fp16.*modules"):
            fit_weight(weight * size, scheme, where="q_proj")
    for size in (1e6, 1e20, 1e37):
        with pytest.raises(VQFormatError, match=r"q_proj has weights too large for fp16.*modules"):
            fit_weight(weight * size, scheme, where="q_proj")
    mixed = weight.clone()
    mixed[::2] *= 1e-10  # rows without a scale are zeros; the others do not suffer
    found = fit_weight(mixed, scheme, where="q_proj")
    assert all(t.isfinite().all() for t in found.tensors.values() if t.is_floating_point())
    assert found.relative_error < 0.1


@pytest.mark.parametrize("tails", [0, 4])
def test_integer_entries_cost_little(tails):
    """A stage is learned on what rounding the one before it has left."""
    weight = torch.randn(128, 256)
    if tails:  # Student's t
        weight /= torch.distributions.Chi2(tails).sample(weight.shape).div(tails).sqrt()
    floats, integers = (
        fit_weight(weight, VQScheme.parse(f"vq4x6r2-tensor{bits}-g0-none"))
        for bits in ("", "-int7")
    )
    assert integers.relative_error < 1.01 * floats.relative_error
    codebook = integers.tensors["codebook"]
    assert codebook.dtype == torch.int8 and codebook.abs().max() == 63
    plain = [
        fit_weight(weight, VQScheme.parse(f"vq4x6r2-tensor{bits}-g0-none"), search="norm")
        for bits in ("", "-int7")
    ]
    assert plain[1].relative_error < 1.01 * plain[0].relative_error


@pytest.mark.slow
def test_beam_finds_what_greedy_misses():
    codebook = torch.randn(2, 64, 4).half()
    vectors = torch.randn(500, 4)
    assigner = Assigner(codebook, VQScheme(4, 6, 2, "tensor"), learned=True)
    error = (vectors - assigner.entries(assigner.codes(vectors))).square().sum(1)
    first = assigner.searches[0].index(vectors)
    second = assigner.searches[1].index(vectors - codebook[0].float()[first])
    greedy = (vectors - assigner.entries(torch.stack([first, second], 1))).square().sum(1)
    assert (error <= greedy + 1e-5).all()
    assert error.mean() < 0.95 * greedy.mean()
