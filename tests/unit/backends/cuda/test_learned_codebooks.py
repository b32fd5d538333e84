"""Tables of learned codebooks lie as attention_learned.cuh addresses them."""

import pytest
import torch

from hf_vq.backends.cuda.kv.codebooks import KEYS, VALUES, arranged
from hf_vq.codegen.attention_plan import parts
from hf_vq.codegen.families.table_layout import fused
from hf_vq.formats import KV_SCHEMES


@pytest.mark.parametrize("sharers", [KEYS, VALUES])
@pytest.mark.parametrize("dim", [32, 48, 80, 128, 192])
@pytest.mark.parametrize("name", ["cq-4", "cq-2", "nomad-4", "nomad-2"])
def test_groups_are_where_lanes_look_them_up(name, dim, sharers):
    scheme = KV_SCHEMES[name].key
    x, stored, count = scheme.vector_size, scheme.entries, fused(scheme)
    book = torch.randn(2, dim // x, stored, x).half()
    table, width, first = arranged(book, scheme, sharers), x * count, 0
    for size in parts(dim):
        channels = max(size // sharers, width)
        indexes = channels // width
        turns = min(4 if sharers == VALUES else 16 // width, indexes)
        for lane in range(size // channels):
            for i in range(indexes):
                chunk, k = i // turns * turns, i % turns
                at = first + width * (chunk * sharers + lane * turns + k)
                found = table[:, at // 64, :, at % 64 : at % 64 + width]
                group = (first + lane * channels) // width + i
                for index in (0, 1, 17, 255):
                    codes = [index // stored**j % stored for j in range(count)]
                    parts_of = [book[:, group * count + j, code] for j, code in enumerate(codes)]
                    assert torch.equal(found[:, index], torch.cat(parts_of, -1))
        first += size
