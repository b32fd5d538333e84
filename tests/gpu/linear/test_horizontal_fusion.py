"""Several matrices in one launch (`hf_vq::linears`) on a GPU: what each launch alone computes."""

import pytest
import torch

from hf_vq import ops
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import flat, rotation_of
from hf_vq.nn import VQLinear
from tests.fixtures.cuda_layers import poison, stored
from tests.fixtures.random_weights import random_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEYS = ("codes", "codebook", "scale")


def matrices(name, rows, columns):
    spec = weight_scheme(name).spec()
    return weight_scheme(name), [stored(spec, n, columns)[1] for n in rows]


def several(x, each, bias, scheme):
    given = [[tensors[key] for tensors in each] for key in KEYS]
    rotations = [rotation_of(tensors) for tensors in each]
    return torch.ops.hf_vq.linears.default(x, *given, rotations, bias, scheme.spec())


def exact(x, tensors, bias, scheme):
    y = x.double() @ ops.decode_weight(tensors, scheme, x.shape[-1]).double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
@pytest.mark.parametrize("rows", [(130, 7), (16, 4096, 33), (256, 256, 256, 1)])
@pytest.mark.parametrize("name", ["vq-4", "vq-4-scaled", "quip-sharp-2", "aqlm-2", "turboquant-3"])
def test_several_matrices(name, rows, tokens, dtype):
    """Diagonals and learned codebooks differ. At most twice the error of a launch for each."""
    scheme, each = matrices(name, rows, 1152)
    x = torch.randn(tokens, 1152, device="cuda", dtype=dtype)
    bias = [torch.randn(rows[0], device="cuda", dtype=dtype), *[None] * (len(rows) - 1)]
    poison()
    found = several(x, each, bias, scheme)
    for y, tensors, added in zip(found, each, bias, strict=True):
        right = exact(x, tensors, added, scheme)
        alone = ops.linear(x, tensors, added, scheme)
        allowed = 2 * (alone.double() - right).abs().max() + torch.finfo(dtype).eps
        assert (y.double() - right).abs().max() <= allowed


def test_weights_that_were_just_written():
    """The launch must not read old codes of any of its matrices."""
    rows = (4096, 1024, 1024)
    scheme, each = matrices("vq-4", rows, 4096)
    versions = [matrices("vq-4", rows, 4096)[1] for _ in range(3)]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    expected = [several(x, other, [None] * 3, scheme) for other in versions]
    has = [0, 0, 0]
    for tensors, others in zip(each, versions[0], strict=True):
        for key in (*KEYS, "signs"):
            tensors[key].copy_(others[key])
    for turn in range(40):
        written, has[turn % 3] = turn % 3, turn // 2 % 3
        for key in (*KEYS, "signs"):
            each[written][key].copy_(versions[has[written]][written][key])
        for _ in range(2):
            found = several(x, each, [None] * 3, scheme)
            assert all(torch.equal(y, expected[has[i]][i]) for i, y in enumerate(found))


class Gated(torch.nn.Module):
    """Two layers with one input, and one with another."""

    def __init__(self, name):
        super().__init__()
        scheme = weight_scheme(name)
        self.up, self.gate = VQLinear(512, 1024, False, scheme), VQLinear(512, 1024, True, scheme)
        self.down = VQLinear(1024, 512, False, scheme)
        for layer in (self.up, self.gate, self.down):
            tensors = random_tensors(scheme, layer.out_features, layer.in_features)
            for key, tensor in tensors.items():
                place = layer.attributes[key]
                if place in layer._buffers:
                    layer._buffers[place] = tensor
                else:
                    layer._parameters[place] = torch.nn.Parameter(tensor, False)
        torch.nn.init.normal_(self.gate.bias)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first one of inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of inductor
@pytest.mark.parametrize(("name", "tokens"), [("vq-4", 1), ("vq-4-scaled", 1), ("aqlm-2", 9)])
def test_a_compiled_model(name, tokens, monkeypatch):
    """One launch for both, in a CUDA graph too, which reads what is written to weights later."""
    calls = []
    run = cuda_fused._call

    def counted(first, others, *given):  # a tensor of a CUDA graph's memory must not be kept
        calls.extend([1 + len(others)] if others else [])
        return run(first, others, *given)

    monkeypatch.setattr(cuda_fused, "_call", counted)
    model = Gated(name).cuda().half().eval()
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.float16)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for turn in range(6):
            if turn == 4:
                codes = model.up.weight
                codes.copy_(codes.flip(0))
            expected = model(x)
            found = compiled(x).clone()
            assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max())
    assert set(calls) == {2}
    assert len(calls) < 6  # replayed
    torch.compiler.reset()


def test_the_op_alone_has_no_kernel_for_many_tokens():
    """Then each matrix is multiplied by itself."""
    scheme, each = matrices("vq-4", (64, 32), 512)
    x = torch.randn(3000, 512, device="cuda", dtype=torch.float16)
    for y, tensors in zip(several(x, each, [None, None], scheme), each, strict=True):
        arguments = (*flat(tensors), None, scheme.spec())
        assert torch.equal(y, torch.ops.hf_vq.linear.default(x, *arguments))
