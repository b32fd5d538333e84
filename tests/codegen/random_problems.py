"""Random problems of every op, over the sizes that models and servers have: what the choosers are
asked for, whatever sizes `tests.buckets` looks at."""

from dataclasses import replace
from functools import partial

from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.families.dequantize import decodable, rotatable
from hf_vq.codegen.families.encode import encodable
from hf_vq.codegen.families.kv_append import HEAD_DIMS, appendable
from hf_vq.codegen.families.kv_prefill import decodable_kv
from hf_vq.codegen.w4a8_plan import Source
from hf_vq.formats.catalog import WEIGHT_SCHEMES
from hf_vq.ops import w4a8 as w4a8_op
from tests.buckets import append, linear, rows, vptq, w4a8
from tests.buckets.append import AppendCase, StoreCase
from tests.buckets.attention import SCHEMES, AttentionCase, has_kernel
from tests.buckets.linear import LinearCase
from tests.buckets.vptq import VptqCase
from tests.buckets.w4a8 import W4A8Case

# Hidden size, rows of queries, of keys, and of the MLP: of Llama 2 and 3, Qwen 2.5 and 3, Gemma 2
# and 3, Phi-3 and SmolLM.
MODELS = (
    (576, 576, 192, 1536), (640, 1024, 256, 2048), (896, 896, 128, 4864), (1024, 2048, 1024, 3072),
    (1536, 1536, 256, 8960), (2048, 2048, 512, 8192), (2048, 2048, 256, 11008),
    (2304, 2048, 1024, 9216), (2560, 4096, 1024, 9728), (2560, 2048, 1024, 10240),
    (3072, 3072, 1024, 8192), (3072, 3072, 3072, 8192), (3584, 3584, 512, 18944),
    (3584, 4096, 2048, 14336), (4096, 4096, 1024, 14336), (4096, 4096, 4096, 11008),
    (5120, 5120, 1024, 27648), (5120, 8192, 1024, 25600), (8192, 8192, 1024, 28672),
)  # fmt: skip
DIMS = (*((dim, dim) for dim in range(16, 257, 16)), (192, 128))
DTYPES = ("float16", "bfloat16")
TOKENS = ((1, 1), (2, 64), (1, 1024), (1, 4096))


def shape(rng):
    """Rows and columns of a layer of a model."""
    hidden, queries, keys, ffn = rng.choice(MODELS)
    layers = (queries, hidden), (keys, hidden), (hidden, queries), (ffn, hidden), (hidden, ffn)
    return rng.choice(layers)


def tokens(rng):
    """One, few, or many."""
    return rng.randint(*rng.choice(TOKENS))


def attention(rng, arch):
    """A step over a cache; half of them without mask and soft-cap."""
    while True:
        name, dims = rng.choice(list(SCHEMES)), rng.choice(DIMS)
        if has_kernel(SCHEMES[name], dims, arch):
            break
    scheme = SCHEMES[name]
    pages = dims[0] == dims[1] and scheme.key.has_scale and scheme.value.has_scale
    page = rng.choice((0, 64, 256)) if pages else 0
    plain, masked = rng.random() < 0.5, rng.choice(list(Mask))
    return AttentionCase(
        name, dims, rng.randint(1, 128), rng.randint(1, 32), rng.randint(1, 16), rng.randint(1, 8),
        int(2 ** rng.uniform(7, 15)), not page and rng.random() < 0.5, page, rng.choice(DTYPES),
        Mask.NONE if plain or page else masked, not plain and rng.random() < 0.5,
    )  # fmt: skip


def weights(rng, arch, family):
    """A layer of a model, sometimes with others in the same launch; None: it has no kernel."""
    name, (count, columns) = rng.choice(linear.families()[family]), shape(rng)
    scheme = WEIGHT_SCHEMES[name]
    if linear.runs(scheme, columns) is not None:
        return None
    case = LinearCase(name, tokens(rng), count, columns, rng.choice(DTYPES), rng.random() < 0.5)
    if rng.random() < 0.3 and linear.joinable(case, arch):
        others = tuple(shape(rng)[0] for _ in range(rng.randint(1, 3)))
        return replace(case, others=others)
    return case


def integers(rng, arch):
    """A layer of a model in QoQ's format; None: columns are no whole groups."""
    name, (count, columns) = rng.choice(w4a8.SCHEMES), shape(rng)
    if columns % (w4a8_op.parse(name).group or 1):
        return None
    source = rng.choice(list(Source))
    bias = rng.choice((None, "float32", *DTYPES))
    return W4A8Case(name, tokens(rng), count, columns, rng.choice(DTYPES), bias, source)


def appended(rng, arch):
    """New keys or values, or steps of a static cache; None: they have no kernel."""
    name, dim = rng.choice(list(SCHEMES)), rng.choice(HEAD_DIMS)
    scheme, dtype = SCHEMES[name], rng.choice(list(append.DTYPES))
    if rng.random() < 0.3:
        reason = appendable(scheme.key, dim) or appendable(scheme.value, dim)
        steps = tuple(rng.randint(1, 8) for _ in range(4))
        return None if reason else StoreCase(name, (dim, dim), dtype, steps, rng.random() < 0.5)
    part = rng.choice((scheme.key, scheme.value))
    if appendable(part, dim):
        return None
    page = rng.choice((0, 64, 256)) if part.has_scale else 0
    count = rng.choice((1, rng.randint(1, 64), rng.randint(1, 4096)))
    return AppendCase(
        part.spec(), dim, count, dtype, part.has_scale and rng.random() < 0.5, rng.random() < 0.5,
        page,
    )  # fmt: skip


def published(rng, arch):
    """A layer of a model in VPTQ's layout."""
    layout, (count, columns) = rng.choice(vptq.LAYOUTS), shape(rng)
    layout = replace(layout, group_size=columns // layout.groups)
    return VptqCase(layout, tokens(rng), count, rng.choice(list(vptq.DTYPES)), rng.random() < 0.5)


def around(rng, arch):
    """Kernels around products and attention; None: there is none."""
    name, (count, columns) = rng.choice(list(WEIGHT_SCHEMES)), shape(rng)
    kind = rng.choice(("rotate", "encode", "decode", "decode_kv"))
    if kind == "rotate":
        block = 1 << rng.randint(1, 10)
        signs, inverse = rng.random() < 0.5, rng.random() < 0.5
        return rows.RotateCase(block, signs, inverse, rng.choice(list(rows.DTYPES)))
    scheme = WEIGHT_SCHEMES[name]
    if kind == "encode":
        known = scheme.stages != "nested" and encodable(scheme, columns, arch) is None
        return rows.EncodeCase(scheme.spec(), count, columns, rng.random() < 0.5) if known else None
    if kind == "decode":
        known = decodable(scheme) is None and rotatable(scheme, columns) is None
        return rows.DecodeCase(name, count, columns) if known else None
    scheme = SCHEMES[rng.choice(list(SCHEMES))]
    part, dim = rng.choice((scheme.key, scheme.value)), rng.choice(rows.HEAD_DIMS)
    if decodable_kv(part, dim):
        return None
    return rows.DecodeKVCase(part.spec(), dim, rng.randint(1, 2000), rng.choice(list(rows.DTYPES)))


PROBLEMS = {
    "attention": attention,
    **{f"linear-{family}": partial(weights, family=family) for family in linear.families()},
    "w4a8": integers,
    "append": appended,
    "vptq": published,
    "rows": around,
}
"""By the names of `tests.buckets.every`."""
