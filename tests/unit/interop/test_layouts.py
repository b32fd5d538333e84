"""Layouts of published checkpoints: what a config.json may say, and what it may not."""

import pytest
import torch

from hf_vq.errors import VQConfigError
from hf_vq.formats.published import (
    LAYOUTS,
    AqlmLayout,
    HiggsLayout,
    QoqLayout,
    TurboquantLayout,
    VptqLayout,
    layout_from_dict,
)

GOOD = {
    "aqlm": AqlmLayout(2, 8),
    "vptq": VptqLayout(8, 256, 16, 1, 60, 4, 4, 300, norm=True),
    "higgs": HiggsLayout(4, 64, 512, 32),
    "qoq": QoqLayout(True),
    "turboquant-model": TurboquantLayout(4, 2, 64, True, 42, 1042),
}
BAD = [-1, -(1 << 40), 1 << 40, 1.5, "8", None, True, [8], {}, float("nan")]
CONFIGS = {  # of the checkpoint
    "aqlm": {"num_codebooks": 2, "nbits_per_codebook": 8, "in_group_size": 8, "out_group_size": 1},
    "higgs": {
        "bits": 4, "group_size": 64, "hadamard_size": 512,
        "tune_metadata": {"X": {"template_id": 40}},
    },
    "qoq": {"wbits": 4, "group_size": 128},
    "vptq": {
        "vector_lens": [4, 8], "num_centroids": [300, 256], "num_res_centroids": [-1, 16],
        "group_num": 1, "group_size": 60, "outlier_size": 4, "is_indice_packed": True,
        "enable_norm": True, "enable_perm": False,
    },
    "turboquant-model": {
        "bit_width": 4, "residual_bit_width": 2, "group_size": 64, "seed": 42,
        "residual_seed": 1042, "rotation": "hadamard", "rotation_strategy": "different",
    },
}  # fmt: skip


def of(method, changes):
    config = {**CONFIGS[method], **changes}
    if method == "vptq":
        config = {"config_for_layers": {"X": config}}
    return LAYOUTS[method].of(config, "X", {})


@pytest.mark.parametrize("method", LAYOUTS)
def test_what_is_right(method):
    assert of(method, {}) == GOOD[method]
    assert layout_from_dict(GOOD[method].to_dict()) == GOOD[method]


@pytest.mark.parametrize("method", LAYOUTS)
def test_fields_of_our_own_config(method):
    """Each field in turn holds what it may not: an error that names it, and nothing is built."""
    fields = GOOD[method].to_dict()
    for name in set(fields) - {"method"}:
        for value in [*BAD, "float64"]:
            if (value is True and isinstance(fields[name], bool)) or value == fields[name]:
                continue
            with pytest.raises(VQConfigError, match=r"layout of \S+|dtype of codebooks"):
                layout_from_dict({**fields, name: value})


@pytest.mark.parametrize("method", LAYOUTS)
def test_fields_of_published_configs(method):
    for name, good in CONFIGS[method].items():
        for value in BAD:
            changed = [value, value] if isinstance(good, list) else value
            if name == "num_res_centroids" and value in (-1, -(1 << 40)):
                continue  # none
            if (method, name, value) == ("qoq", "group_size", -1):
                continue  # none
            if name in ("enable_norm", "enable_perm") or value is good:
                continue  # true, or not
            if name == "tune_metadata" and value in (None, {}):
                continue  # says nothing, which is an error of its own
            if name == "residual_bit_width" and value is None:
                continue  # there is none
            with pytest.raises(VQConfigError):
                of(method, {name: changed})


@pytest.mark.parametrize("value", [[1], "all", 7])
def test_parts_that_are_no_mappings(value):
    for method, key in (
        ("vptq", "config_for_layers"),
        ("vptq", "shared_layer_config"),
        ("higgs", "tune_metadata"),
    ):
        config = {**CONFIGS["higgs"], key: value}
        with pytest.raises(VQConfigError, match=f"{key} must be a mapping"):
            LAYOUTS[method].of(config, "X", {"scales": torch.empty(1, dtype=torch.float16)})


def test_what_only_several_fields_say():
    fields = GOOD["vptq"].to_dict()
    with pytest.raises(VQConfigError, match="codes of no bits"):
        layout_from_dict({**fields, "residual": 1})
    with pytest.raises(VQConfigError, match="outlier columns have no codebook"):
        layout_from_dict({**fields, "outlier_centroids": 0})
    with pytest.raises(VQConfigError, match="powers of two"):
        layout_from_dict({**GOOD["higgs"].to_dict(), "hadamard": 96})
