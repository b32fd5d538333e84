"""QoQ's format: integers of 8 bits whatever the weights, what is stored, what is refused."""

import itertools

import pytest
import torch

from hf_vq.errors import VQError, VQFormatError, VQSchemeError
from hf_vq.formats import (
    QOQ_SCHEMES,
    QoQScheme,
    linear_scheme,
    scheme_name,
    stored_bits,
    tensor_specs,
    unpack_bits,
    validate_tensor,
)
from hf_vq.formats.qoq import PROTECTIVE, check, decode, encode, grid_of, levels

GROUPED, PER_CHANNEL = QoQScheme(128), QoQScheme()


def checked(tensors: dict[str, torch.Tensor], where: str) -> None:
    check({key: key for key in tensors}, tensors.__getitem__, where)


def integers(reach: int, rounded) -> list[int]:
    """What the ends of a group decode to, for every pair of a least and a largest integer of a row
    that reaches to `reach`, with steps found by `rounded`. What lies between stays between."""
    bounds = torch.arange(0, reach + 1)
    low, high = torch.meshgrid(-bounds, bounds, indexing="ij")
    low, high = low.flatten(), high.flatten()
    step = rounded((high - low) / 15).clamp_min(1)
    ends = torch.stack([low, high])
    zero = (-low / step).round().clamp(0, 15)
    papers = ((ends / step).round() + zero).clamp(0, 15)  # its zeros are multiples of the step
    ours = ((ends - low) / step).round().clamp(0, 15)
    values = torch.cat([(papers - zero) * step, ours * step + low])
    return [int(value) for value in values.flatten()]


@pytest.mark.parametrize("rounded", [torch.round, torch.ceil])
def test_protective_range_is_the_largest_that_never_leaves_8_bits(rounded) -> None:
    assert all(-128 <= value <= 127 for value in integers(PROTECTIVE, rounded))
    assert any(value > 127 for value in integers(PROTECTIVE + 1, rounded))


def test_every_group_stays_within_8_bits_with_scales_of_fp16() -> None:
    """Scales are rounded to fp16, the smallest of them by up to a half."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-7, 4, 200)[:, None]
    weight = torch.randn(200, 512, generator=generator).sign() * size  # only the largest
    weight[:, ::3] *= torch.rand(200, 171, generator=generator)
    tensors = encode(weight, GROUPED)
    found = levels(unpack_bits(tensors["codes"], 4, 512), tensors)
    assert int(found.min()) >= -128
    assert 119 <= int(found.max()) <= 127
    checked(tensors, "it")


@pytest.mark.parametrize("name", QOQ_SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 96), (7, 704), (33, 1280)])
def test_stored_tensors_are_those_of_the_specs(name: str, rows: int, columns: int) -> None:
    scheme = linear_scheme(name)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    tensors = encode(weight, scheme)
    specs = tensor_specs(scheme, rows, columns)
    assert tensors.keys() == specs.keys()
    for key, spec in specs.items():
        validate_tensor(key, tensors[key], spec, "it")
    bits = scheme.bits(columns)
    if scheme.group and columns % scheme.group == 0:
        assert scheme.bits() == 4.125
    assert stored_bits(tensors) == pytest.approx(bits * rows * columns)


@pytest.mark.parametrize("name", QOQ_SCHEMES)
def test_every_weight_gets_the_nearest_value_of_its_grid(name: str) -> None:
    scheme = linear_scheme(name)
    weight = torch.randn(9, 256, generator=torch.Generator().manual_seed(2))
    tensors, grid = encode(weight, scheme), grid_of(weight, scheme)
    decoded = decode(tensors, scheme, 256)
    every = [torch.full((9, 256), code, dtype=torch.uint8) for code in range(16)]
    values = [decode(grid.stored(codes), scheme, 256) for codes in every]
    nearest = torch.stack([(value - weight).abs() for value in values]).amin(0)
    assert torch.allclose((decoded - weight).abs(), nearest, rtol=0, atol=1e-6)


def test_groups_are_better_than_one_scale_for_each_row() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    errors = [
        float((decode(encode(weight, scheme), scheme, 1024) - weight).square().mean())
        for scheme in (GROUPED, PER_CHANNEL)
    ]
    assert errors[0] < 0.0103  # 0.01 of a Gaussian; 0.0157 with a scale for each row
    assert 1.4 < errors[1] / errors[0] < 1.8


def test_formula_of_the_paper_is_what_is_stored() -> None:
    """Zeros that are multiples of their steps are stored as what they are."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (5, 256), generator=generator)
    zeros = torch.randint(0, 9, (5, 2), generator=generator)
    steps = torch.randint(1, 9, (5, 2), generator=generator)
    scale = torch.rand(5, 1, generator=generator).half()
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {
        "codes": packed,
        "scale": scale,
        "step": steps.to(torch.uint8),
        "zero": (zeros * steps).to(torch.uint8),
    }
    checked(tensors, "it")
    expected = torch.empty(5, 256)
    for n, k in itertools.product(range(5), range(256)):
        level = (int(codes[n, k]) - int(zeros[n, k // 128])) * int(steps[n, k // 128])
        expected[n, k] = level * float(scale[n])
    assert torch.equal(decode(tensors, GROUPED, 256), expected)
    row = {"codes": packed, "scale": scale, "zero": zeros[:, :1] * scale.float()}
    expected = (codes - zeros[:, :1]) * scale.float()
    assert torch.equal(decode(row, PER_CHANNEL, 256), expected)


def test_zeros_and_constant_rows() -> None:
    weight = torch.zeros(4, 128)
    weight[1], weight[2], weight[3, 5] = 0.5, -0.5, 3.0
    for scheme in (GROUPED, PER_CHANNEL):
        decoded = decode(encode(weight, scheme), scheme, 128)
        assert torch.equal(decoded[0], weight[0])
        assert torch.allclose(decoded, weight, rtol=4.1 / 119, atol=0)  # half a step of 8


def test_effective_group_divides_the_row() -> None:
    assert [GROUPED.group_of(size) for size in (128, 704, 96, 4096)] == [128, 64, 32, 128]
    assert PER_CHANNEL.group_of(101) == 101
    with pytest.raises(VQSchemeError, match=r"divisible by 32; layers\.3\.mlp has 11000"):
        tensor_specs(GROUPED, 16, 11000, where="layers.3.mlp")
    with pytest.raises(VQSchemeError, match=r"'layers\.3\.mlp': 'qoq-w4a8'"):
        tensor_specs(GROUPED, 16, 11000, where="layers.3.mlp")
    assert tensor_specs(PER_CHANNEL, 16, 11000)["codes"].shape == (16, 5500)


def test_odd_rows_without_groups() -> None:
    weight = torch.randn(3, 101, generator=torch.Generator().manual_seed(5))
    tensors = encode(weight, PER_CHANNEL)
    assert tensors["codes"].shape == (3, 51)
    error = (decode(tensors, PER_CHANNEL, 101) - weight).abs()
    assert bool((error <= tensors["scale"].float() * 0.51).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("scheme", [GROUPED, PER_CHANNEL])
def test_weights_that_have_no_scale_are_refused(value: float, scheme: QoQScheme) -> None:
    weight = torch.ones(2, 128)
    weight[1, 3] = value
    with pytest.raises(VQFormatError, match="the_layer holds NaN"):
        encode(weight, scheme, "the_layer")


@pytest.mark.parametrize(
    "wrong",
    [7, -1, 512, True, "128", None, 128.0, [128]],
)
def test_wrong_groups_are_refused(wrong: object) -> None:
    with pytest.raises(VQSchemeError, match="group of QoQ"):
        QoQScheme(wrong)
    with pytest.raises(VQSchemeError, match="group of QoQ"):
        linear_scheme({"format": "qoq-w4a8", "group": wrong})


def test_names_specs_and_dicts_come_back() -> None:
    for name, scheme in QOQ_SCHEMES.items():
        assert linear_scheme(name) == scheme == linear_scheme(scheme.to_dict())
        assert QoQScheme.parse(scheme.spec()) == scheme == linear_scheme(scheme)
        assert scheme_name(scheme) == name == scheme.spec()
    assert linear_scheme("qoq-w4a8-g32") == QoQScheme(32)
    assert linear_scheme("vq-4").spec().startswith("vq2x8")
    for wrong in ("qoq-w4a8-g7", "qoq-w4a8-", "qoq-w4a8-g0x", "qoq-w4a8-g٣٢"):
        with pytest.raises(VQSchemeError):
            linear_scheme(wrong)
    for fields in ({"format": "qoq"}, {"format": "qoq-w4a8", "grup": 0}, {"format": []}):
        with pytest.raises(VQError, match="QoQ"):
            linear_scheme(fields)
    with pytest.raises(VQSchemeError, match="Did you mean 'qoq-w4a8'"):
        linear_scheme("qoq-w4-a8")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [("step", 18, "beyond 17"), ("zero", 128, "beyond 127"), ("scale", torch.inf, "infinity")],
)
def test_values_out_of_range_are_refused(key: str, value: float, problem: str) -> None:
    tensors = encode(torch.randn(4, 256), GROUPED)
    tensors[key][1, 0] = value
    with pytest.raises(VQFormatError, match=problem):
        validate_tensor(key, tensors[key], tensor_specs(GROUPED, 4, 256)[key], "it")


def test_integers_beyond_8_bits_are_refused() -> None:
    tensors = encode(torch.randn(4, 256), GROUPED)
    checked(tensors, "it")
    tensors["step"][2, 1], tensors["zero"][2, 1] = 17, 100
    tensors["codes"][2, 64:] = 0x11
    checked(tensors, "it")  # no code of this group is too large for it
    tensors["codes"][2, 100] = 0xF1
    with pytest.raises(VQFormatError, match="layer 7: group 1 of row 2 holds the integer 155"):
        checked(tensors, "layer 7")
