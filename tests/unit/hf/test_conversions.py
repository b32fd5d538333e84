"""Which of Transformers' conversions apply to a model whose layers hold codes."""

from torch import nn
from transformers.core_model_loading import WeightRenaming

from hf_vq import VQConfig, quantize_model
from hf_vq.hf.checkpoint.conversions import dense_conversions


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(64, 32)})])


def renamed(*patterns):
    return WeightRenaming(source_patterns=patterns[0], target_patterns=patterns[1])


def test_a_renaming_that_names_of_codes_do_not_survive_is_left_out():
    """Inkling 2 stores `weight_proj.weight` as `weight_proj`, which its `weight_proj.vq_scale`
    contains, too."""
    model = quantize_model(Model(), VQConfig(activations=None))
    kept = [renamed("attn", "self_attn"), renamed(r"^blocks\.", "layers."), renamed("gate", "gate")]
    left_out = [renamed(r"(gate)", r"\1.weight")]
    assert dense_conversions([*kept, *left_out], model) == kept
    assert dense_conversions([*kept, *left_out], model, reverse=True) == kept
    assert dense_conversions([*kept, *left_out], nn.Linear(2, 2)) == [*kept, *left_out]
