"""Schemes: spec strings, JSON, validation, dimensions."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_vq.errors import VQFormatError, VQSchemeError
from hf_vq.formats import (
    KV_SCHEMES,
    WEIGHT_SCHEMES,
    VQScheme,
    kv_codebook_spec,
    kv_scheme,
    scheme_name,
    tensor_specs,
    validate_tensor,
    weight_scheme,
)
from hf_vq.formats.scheme import (
    ACTIVATIONS_BITS,
    CODEBOOK_BITS,
    CODEBOOKS,
    ROTATIONS,
    STAGES,
)

CATALOGUE = [*WEIGHT_SCHEMES.values(), *(s.key for s in KV_SCHEMES.values())]


@pytest.mark.parametrize("scheme", CATALOGUE, ids=lambda scheme: scheme.spec())
def test_catalogue_survives_spec_and_json(scheme):
    assert VQScheme.parse(scheme.spec()) == scheme
    assert VQScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@given(
    st.builds(
        dict,
        vector_size=st.sampled_from([1, 2, 4, 8]),
        entry_bits=st.integers(1, 16),
        residuals=st.integers(1, 3),
        codebook=st.sampled_from(CODEBOOKS),
        scale_group=st.sampled_from([0, 32, 128]),
        rotation=st.sampled_from(ROTATIONS[1:]),
        rotation_block=st.sampled_from([0, 64, 128]),
        codebook_bits=st.sampled_from(CODEBOOK_BITS),
        stages=st.sampled_from(STAGES),
        second_bits=st.sampled_from([0, 0, 1, 2, 4, 5, 16]),
        activations_bits=st.sampled_from(ACTIVATIONS_BITS),
    )
)
def test_any_scheme_survives_spec(fields):
    try:
        scheme = VQScheme(**fields)
    except VQSchemeError:
        assume(False)
    assert VQScheme.parse(scheme.spec()) == scheme
    assert VQScheme.from_dict(scheme.to_dict()) == scheme


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("vq-4", 4.125),
        ("vq-3", 3.125),
        ("vq-2", 2.125),
        ("turboquant-4", 4.125),
        ("turboquant-4+4", 8.125),
        ("turboquant-4+2", 6.125),
        ("turboquant-1+3", 4.125),
        ("vq1x4+2r2-universal-g128-random_hadamard128-shared", 6.25),
        ("vq1x3+2r2-universal-g64-qr64-rerotated", 5.5),
        ("quip-sharp-4", 4.125),
        ("quip-sharp-2", 2.125),
        ("aqlm-3", 3.0),
        ("aqlm-2", 2.0),
        ("aqlm-3-int7", 3.0),
        ("aqlm-2-int7", 2.0),
        ("gptvq-2", 2.0),
        ("gptvq-2-int7", 2.0),
    ],
)
def test_nominal_bits(name, bits):
    assert weight_scheme(name).bits() == bits


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("u4", 4.125, 4.125),
        ("k4v2", 4.125, 2.125),
        ("nomad-u4", 4.125, 4.125),
        ("nomad-4", 4.0, 4.125),
        ("nomad-2", 2.0, 4.125),
        ("nomad-1", 1.0, 4.125),
        ("cq-4", 4.0, 4.0),
        ("cq-2", 2.0, 2.0),
    ],
)
def test_nominal_bits_of_keys_and_values(name, key, value):
    """A codebook per channel group has the data's own size: no scale is stored."""
    scheme = kv_scheme(name)
    assert (scheme.key.bits(128), scheme.value.bits(128)) == (key, value)
    assert scheme.key.has_scale == (scheme.key.codebook != "channel_group")
    if not scheme.key.has_scale:
        assert scheme.key.bits() == scheme.key.bits(128, 128) == key


def test_bits_of_activations_change_nothing_that_is_stored():
    for name, scheme in WEIGHT_SCHEMES.items():
        other = scheme.with_activations(8)
        assert other != scheme and other.with_activations(16) == scheme, name
        assert scheme.with_activations(16) is scheme
        assert "activations_bits" not in scheme.to_dict()
        assert other.spec() == f"{scheme.spec()}-a8"
        assert tensor_specs(other, 512, 512) == tensor_specs(scheme, 512, 512)
        assert other.bits(512, 512) == scheme.bits(512, 512)


def test_two_passes():
    """A second pass of its own size; a field that files of old, and of one pass, do not say."""
    nested = weight_scheme("turboquant-4+2")
    assert nested.spec() == "vq1x4+2r2-universal-g128-random_hadamard128-nested"
    assert nested.notation() == "VQ<1,4+2,2>"
    assert nested.first_pass() == weight_scheme("turboquant-4")
    assert nested.second_pass() == weight_scheme("turboquant-2")
    assert nested.merged() == weight_scheme("turboquant-6")
    specs = tensor_specs(nested, 8, 256)
    assert (specs["codes"].shape, specs["codes_2"].shape) == ((8, 128), (8, 64))
    assert specs["codebook_2"].shape == (1, 64, 1) and "scale_2" not in specs
    same = weight_scheme("turboquant-4+4")
    old = {key: value for key, value in same.to_dict().items() if key != "second_bits"}
    assert VQScheme.from_dict(old) == same == VQScheme.parse(same.spec().replace("4r2", "4+4r2"))
    one = weight_scheme("turboquant-4")
    assert (one.two_passes, one.second_bits, one.first_pass()) == (False, 0, one)


def test_tensors_of_a_second_pass_that_adds_up():
    keys = {}
    for stages in ("shared", "rerotated"):
        scheme = VQScheme.parse(f"vq1x4+2r2-universal-g64-random_hadamard64-{stages}")
        specs = tensor_specs(scheme, 8, 256)
        keys[stages] = {key for key in specs if key.endswith("_2")}
        assert specs["codebook_2"].shared_name == "vq_codebook.gauss_1x2"
        assert specs["scale_2"].shape == specs["scale"].shape == (8, 4)
    assert keys["shared"] == {"codes_2", "codebook_2", "scale_2"}
    assert keys["rerotated"] == keys["shared"] | {"signs_2"}


def test_integer_entries():
    """A field that old files do not have, and half the bytes for a codebook."""
    floats, integers = weight_scheme("aqlm-3"), weight_scheme("aqlm-3-int7")
    assert integers == replace(floats, codebook_bits=7) != floats
    assert integers.spec() == "vq8x12r2-tensor-int7-g0-none"
    old = {key: value for key, value in floats.to_dict().items() if key != "codebook_bits"}
    assert VQScheme.from_dict(old) == floats
    books = 2 * 4096 * 8 / 4096**2
    assert floats.bits(4096, 4096) - integers.bits(4096, 4096) == pytest.approx(8 * books)
    spec = tensor_specs(integers, 64, 256)["codebook"]
    assert (spec.shape, spec.dtype, spec.largest) == ((2, 4096, 8), torch.int8, 63)
    assert tensor_specs(floats, 64, 256)["codebook"].largest == 0
    spec = tensor_specs(weight_scheme("gptvq-2-int7"), 300, 384)["codebook"]
    assert (spec.shape, spec.dtype, spec.largest) == ((2, 2, 256, 4), torch.int8, 63)


@pytest.mark.parametrize("value", [64, 127, -64, -128])
def test_integers_beyond_their_bits_are_refused(value):
    spec = tensor_specs(weight_scheme("vq4x3r1-tensor-int7-g0-none"), 8, 64)["codebook"]
    codebook = torch.randint(-63, 64, spec.shape, dtype=torch.int8)
    validate_tensor("codebook", codebook, spec, "file")
    codebook[0, 3, 1] = value
    with pytest.raises(VQFormatError, match=r"file: codebook holds integers beyond 63.*again"):
        validate_tensor("codebook", codebook, spec, "file")


def test_codebooks_of_a_kv_cache():
    spec = kv_codebook_spec(kv_scheme("nomad-2").key, heads=3, head_dim=64)
    assert spec.shape == (3, 32, 16, 2) and spec.shared_name is None
    assert kv_codebook_spec(kv_scheme("cq-2").key, 1, 80).shape == (1, 20, 256, 4)
    with pytest.raises(VQSchemeError, match=r"divisible by 4; layer 7 has 50\. Use"):
        kv_codebook_spec(kv_scheme("nomad-1").key, 2, 50, "layer 7")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codebook": "channel_group"}, "no scale"),
        ({"codebook": "channel_group", "scale_group": 0, "residuals": 2}, "one stage"),
        ({"vector_size": "2"}, "vector_size must be an integer"),
        ({"entry_bits": True}, "entry_bits must be an integer"),
        ({"entry_bits": 10**9}, r"in \[1, 16\]"),
        ({"scale_group": 10**30}, "scale_group"),
        ({"entry_bits": 10**5000}, "entry_bits must be an integer"),
        ({"scale_group": 96}, "scale_group must be 0 or a power of two[.]"),
        ({"vector_size": 3}, "scale_group must be 0 or a power of two times 3"),
        ({"rotation_block": 96}, "rotation_block must be 0 or a power of two"),
        ({"vector_size": 4, "rotation_block": 2}, "must be multiples of vector_size"),
        ({"vector_size": 6, "scale_group": 3}, "must be multiples of vector_size"),
        ({"rotation": "fourier"}, "rotation must be one of"),
        ({"codebook": None}, None),
        ({"stages": "nested"}, "residuals=2"),
        ({"second_bits": 2}, "second_bits are those of a second pass"),
        ({"second_bits": 17}, r"second_bits must be an integer in \[0, 16\]"),
        (
            {
                "vector_size": 1,
                "entry_bits": 4,
                "residuals": 2,
                "second_bits": 5,
                "stages": "nested",
            },
            "at most 4 bits",
        ),
        ({"lattice": "e8p"}, "of VQ<8,16,z>"),
        ({"tile": [256, 256]}, "tile"),
        ({"codebook_bits": 8}, "codebook_bits must be 16 or 7; got 8"),
        ({"codebook_bits": True}, "codebook_bits must be 16 or 7"),
        ({"activations_bits": 4}, "activations_bits must be 16 or 8; got 4"),
        ({"codebook_bits": 7, "vector_size": 8}, "integer entries are learned, for"),
        ({"codebook_bits": 7, "codebook": "tensor"}, "vectors of 4, 8"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(VQSchemeError, match=message):
        VQScheme(**{"vector_size": 2, "entry_bits": 8, **fields})


def test_from_dict_names_what_is_wrong():
    with pytest.raises(VQSchemeError, match="unknown scheme field 'bits'"):
        VQScheme.from_dict({"vector_size": 2, "entry_bits": 8, "bits": 4})
    with pytest.raises(VQSchemeError, match="entry_bits"):
        VQScheme.from_dict({"vector_size": 2})
    with pytest.raises(VQSchemeError, match="unknown scheme field '1', 'a'"):
        VQScheme.from_dict({1: 2, "a": 3})


@pytest.mark.parametrize("spec", ["", "vq2x8", "vq2x8r1-universal", "vq0x8r1-universal-g128-none"])
def test_bad_spec_is_refused(spec):
    with pytest.raises(VQSchemeError):
        VQScheme.parse(spec)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(VQSchemeError, match=r"Did you mean 'vq-4'.*gptvq-2"):
        weight_scheme("vq_4")
    with pytest.raises(VQSchemeError, match="Known: u4, u3, u2"):
        kv_scheme("int4")
    for wrong in (None, 4, ["vq-4"]):
        with pytest.raises(VQSchemeError):
            weight_scheme(wrong)


def test_a_universal_codebook_that_does_not_exist_is_refused_early():
    with pytest.raises(VQSchemeError, match=r"<1,1>.*<2,8>"):
        weight_scheme("vq2x7r1-universal-g128-none")


def test_a_rotation_of_the_whole_row_is_never_silently_none():
    scheme = VQScheme(1, 4, rotation_block=0, scale_group=0)
    with pytest.raises(VQSchemeError, match="rotation block"):
        scheme.block(11007)
    assert scheme.block(8) == 8


def test_names_are_found_again():
    for name, scheme in WEIGHT_SCHEMES.items():
        assert scheme_name(scheme) == name
    assert scheme_name(replace(WEIGHT_SCHEMES["vq-4"], scale_group=64)) is None


@pytest.mark.parametrize(
    ("in_features", "group"), [(4096, 128), (288, 32), (80, 16), (13696, 128), (2880, 64), (48, 16)]
)
def test_group_divides_the_row(in_features, group):
    scheme = weight_scheme("vq-4")
    assert scheme.group(in_features) == group
    assert scheme.block(in_features) == group
    assert in_features % group == 0


@pytest.mark.parametrize("in_features", [11007, 172, 40, 0, -128])
def test_a_row_that_cannot_be_packed_names_the_layer_and_the_cure(in_features):
    with pytest.raises(VQSchemeError, match=r"down_proj.*modules_to_not_convert"):
        tensor_specs(weight_scheme("vq-4"), 8, in_features, where="layers.3.mlp.down_proj")
