"""Codes follow their gradients: what they become, and what their gradient is."""

import pytest
import torch

from hf_vq.calibration.straight_through import MovingCodes, movable
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.packing import pack_bits, unpack_bits

STEP = 5.0


def moving(name, rows=(6,), columns=256):
    scheme = weight_scheme(name)
    book = fixed_tensors(scheme, columns, 0)["codebook"]
    shape = (*rows, columns // scheme.vector_size)
    codes = torch.randint(scheme.entries, shape)
    return (
        MovingCodes(pack_bits(codes, scheme.entry_bits), book, scheme, columns, STEP),
        codes,
        book,
    )


def test_which_codes_can_move():
    names = {name for name, scheme in WEIGHT_SCHEMES.items() if movable(scheme)}
    assert names == {"vq-4", "vq-3", "vq-2", *(f"turboquant-{bits}" for bits in range(1, 9))}


@pytest.mark.parametrize("name", ["vq-4", "vq-3", "vq-2", "turboquant-4"])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_they_become_the_nearest_entries(name, rows):
    found, codes, book = moving(name, rows)
    scheme, entries = found.scheme, book[0].float()
    found.follow()
    assert torch.equal(found.codes, codes), "nothing has moved"
    for size in (0.05, 0.4, 0.0):  # from where they are, and back
        with torch.no_grad():
            found.delta.copy_(size / STEP * torch.randn(found.delta.shape))
        found.follow()
        target = entries[codes] + STEP * found.delta.detach().reshape(*codes.shape, -1)
        distance = (target[..., None, :].double() - entries).square().sum(-1)
        chosen = distance.gather(-1, found.codes[..., None])[..., 0]
        assert bool((chosen <= distance.amin(-1) + 1e-5).all())
        moved = (found.codes != codes).double().mean()
        assert (moved > 0.02) == (size == 0.4) or size == 0.05
        packed = unpack_bits(found.packed, scheme.entry_bits, codes.shape[-1])
        assert torch.equal(packed.long(), found.codes)
    assert torch.equal(found.codes, codes)


def test_the_gradient_is_that_of_the_entries():
    """Of sum(w W), with W = R^-1(s e): s R(w)."""
    from hf_vq.calibration.finetune import TunedBlock
    from hf_vq.calibration.resume import CodedBlock
    from hf_vq.calibration.targets import targets_of
    from hf_vq.formats.stored_weight import rotation_of
    from hf_vq.transforms import rotate

    scheme, layer = weight_scheme("vq-2"), torch.nn.Linear(256, 8, bias=False)
    holder = torch.nn.ModuleDict({"up": layer})
    fitted = fit_weight(layer.weight.detach(), scheme, search="norm")
    done, [part] = CodedBlock({"h.0.up": fitted}), targets_of("h.0.up", layer)
    device = torch.device("cpu")
    block = TunedBlock(holder, "h.0.", done, [part], {"h.0.up": scheme}, 0, device, STEP)
    weight = torch.randn(8, 256)
    loss = (block.tensors()["up.weight"] * weight).sum()
    (slope,) = torch.autograd.grad(loss, [block.parameters()[-1]])
    turned = rotate(weight, scheme, rotation_of(fixed_tensors(scheme, 256, 0)))
    scale = fitted.tensors["scale"].float().repeat_interleave(128, 1)
    torch.testing.assert_close(slope, STEP * scale * turned)
    with torch.no_grad():
        block.parameters()[-1].copy_(-0.5 / STEP * turned.sign())
    block.follow()
    block.update()
    assert not torch.equal(done.fitted["h.0.up"].tensors["codes"], fitted.tensors["codes"])
    with torch.no_grad():
        lower = float((block.tensors()["up.weight"] * weight).sum())
    assert lower < float(loss.detach()), "against the gradient the loss falls"
