"""Two passes by kernels of one, on the CPU; tests/gpu/linear/test_residual.py has a GPU."""

import itertools

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.torch import residual as two_passes
from hf_vq.formats import VQScheme, pack_bits, weight_scheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

PAIRS = list(itertools.product(range(1, 5), repeat=2))
ADDING = [
    f"vq1x{bits}r2-universal-g64-{rotation}-{stages}"
    for bits in ("4", "4+2", "2+3")
    for rotation, stages in (
        ("random_hadamard64", "shared"),
        ("hadamard64", "shared"),
        ("qr64", "rerotated"),
        ("random_hadamard64", "rerotated"),
    )
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("length", [16, 40, 128])
def test_merged_codes(first, second, length):
    codes, codes_2 = torch.randint(1 << first, (3, length)), torch.randint(1 << second, (3, length))
    scheme = weight_scheme(f"turboquant-{first}+{second}")
    packed = pack_bits(codes, first), pack_bits(codes_2, second)
    merged = two_passes.merged_codes(*packed, scheme, length)
    assert merged.dtype == torch.uint8
    assert torch.equal(merged.long(), (codes << second) | codes_2)


@pytest.mark.parametrize("spec", [weight_scheme(f"turboquant-{a}+{b}").spec() for a, b in PAIRS])
def test_nested_rows_are_the_reference(spec):
    """Bit by bit: the same entries, scales and sums."""
    scheme = VQScheme.parse(spec)
    tensors, x = random_tensors(scheme, 24, 256), torch.randn(2, 3, 256)
    weight = StoredWeight.of(tensors, scheme, 256)
    expected = reference.decode(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_VQ_BACKEND", "reference")  # of what the row asks
        assert torch.equal(two_passes.decode(weight), expected)
        y = two_passes.linear(x, weight, None)
        assert torch.equal(y, reference.linear(x, weight, None))


@pytest.mark.parametrize("spec", ADDING)
def test_passes_that_add_up_are_the_reference(spec):
    scheme = VQScheme.parse(spec)
    tensors, x, bias = random_tensors(scheme, 24, 128), torch.randn(5, 128), torch.randn(24)
    for key in ("rotation", "rotation_2"):
        if key in tensors:
            tensors[key] = torch.linalg.qr(torch.randn(64, 64))[0].half()
    weight = StoredWeight.of(tensors, scheme, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_VQ_BACKEND", "reference")
        for found, expected in (
            (two_passes.decode(weight), reference.decode(weight)),
            (two_passes.linear(x, weight, bias), reference.linear(x, weight, bias)),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["turboquant-4+4", ADDING[0]])
def test_a_second_pass_that_is_not_there_counts_as_zero(spec):
    scheme = weight_scheme(spec)
    tensors = random_tensors(scheme, 24, 128)
    one = {key: tensor for key, tensor in tensors.items() if not key.endswith("_2")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_VQ_BACKEND", "reference")
        alone = two_passes.decode(StoredWeight.of(one, scheme, 128))
        assert torch.equal(alone, ops.decode_weight(one, scheme.first_pass(), 128))


def asked(spec):
    return dispatch.LinearProblem("cpu", "float32", weight_scheme(spec).spec(), 1, 64, 256)


def test_who_runs_two_passes():
    def one_pass(problem):
        return "two" if VQScheme.parse(problem.scheme).two_passes else None

    fast = dispatch.Implementation(lambda *given: None, one_pass)
    better = dispatch.Entry("fast.linear", "linear", fast, ("cpu",))
    names = ("reference", "two_passes.linear")
    with dispatch.using(entry for entry in dispatch.ENTRIES if entry.name in names):
        reason = {v.entry.name: v.reason for v in dispatch.explain(asked("turboquant-4+4"))}
        assert reason["two_passes.linear"] == "only the reference runs one of its passes"
        assert dispatch.select(asked("turboquant-4+4")).name == "reference"
        with dispatch.preferred(better):
            for spec, note in (
                ("turboquant-4+2", "codes are merged at every call for fast.linear"),
                (ADDING[0], "passes run by fast.linear and fast.linear"),
            ):
                entry = dispatch.select(asked(spec))
                assert entry.name == "two_passes.linear"
                assert entry.implementation.note(asked(spec)) == note
            assert dispatch.select(asked("turboquant-4")).name == "fast.linear"
            assert two_passes.supports(asked("turboquant-4")) == "it has one pass"
