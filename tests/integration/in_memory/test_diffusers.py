"""Models and pipelines of diffusers: quantize while loading, in memory, save, load, dequantize."""

import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import hf_vq
from hf_vq import VQConfig, VQConfigError, VQFormatError
from hf_vq.nn.replace import vq_modules

diffusers = pytest.importorskip("diffusers")
# Imported here, where warnings of what they import are no errors.
pytest.importorskip("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion")
pytest.importorskip("diffusers.models.unets.unet_2d_condition")


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("unet")
    unet().save_pretrained(path)
    return path


def load(folder, **options) -> nn.Module:
    return diffusers.UNet2DConditionModel.from_pretrained(folder, **options)


def run(model: nn.Module) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    image, text = (torch.randn(*s, generator=random) for s in ((1, 4, 8, 8), (1, 5, 32)))
    with torch.no_grad():
        return model(image.to(model.dtype), 3, text.to(model.dtype)).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-4+4", "aqlm-3"])
def test_a_model_is_quantized_saved_and_loaded(folder, tmp_path, dtype, scheme):
    some = {"up_blocks": "vq-4", "down_blocks": "vq-4"} if scheme == "aqlm-3" else None  # slow
    model = load(folder, quantization_config=VQConfig(scheme, layers=some), torch_dtype=dtype)
    linear = [n for n, m in load(folder).named_modules() if type(m) is nn.Linear]
    assert linear and set(linear) == set(vq_modules(model))
    assert any(type(module) is nn.Conv2d for module in model.modules())
    before = run(model)
    exact = run(load(folder, torch_dtype=dtype))
    assert before.dtype == dtype and (before - exact).norm() < 0.3 * exact.norm()
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again, info = load(tmp_path / "saved", torch_dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(run(again), before)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(run(load(tmp_path / "again", torch_dtype=dtype)), before)
    config = VQConfig(scheme, layers=some)
    in_memory = hf_vq.quantize_model(load(folder, torch_dtype=dtype), config)
    assert torch.equal(run(in_memory), before)
    in_memory.save_pretrained(tmp_path / "memory")
    assert torch.equal(run(load(tmp_path / "memory", torch_dtype=dtype)), before)
    assert hf_vq.dequantize(in_memory) is in_memory and not vq_modules(in_memory)
    assert (run(in_memory) - before).norm() < 0.02 * before.norm()
    in_memory.save_pretrained(tmp_path / "dense")
    assert not vq_modules(load(tmp_path / "dense"))


def test_layers_and_skips(folder):
    config = VQConfig(layers={"ff": "vq-3"}, modules_to_not_convert=["mid_block"])
    model = load(folder, quantization_config=config)
    bits = {name: module.scheme.bits() for name, module in vq_modules(model).items()}
    assert all((".ff." in name) == (value < 4) for name, value in bits.items())
    assert not any(name.startswith("mid_block") for name in bits)


def test_what_is_refused(folder, tmp_path):
    for options in ({"calibration": "default"}, {"activations": "random"}, {"pass2": "offload"}):
        with pytest.raises(VQConfigError, match="is not for models of diffusers"):
            load(folder, quantization_config=VQConfig("turboquant-4+4", **options))
    with pytest.raises(VQConfigError, match="'nowhere' matches no"):
        load(folder, quantization_config=VQConfig(layers={"nowhere": "vq-3"}))
    with pytest.raises(VQConfigError, match="offloaded to disk"):
        load(
            folder, quantization_config=VQConfig(), device_map={"": "disk"}, offload_folder=tmp_path
        )
    with pytest.raises(VQConfigError, match="give one of its models"):
        hf_vq.quantize_model(diffusers.DDIMScheduler())
    with pytest.raises(VQConfigError, match="save_pretrained"):
        hf_vq.save_quantized(load(folder, quantization_config=VQConfig()), tmp_path)


def test_a_damaged_file(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    load(folder, quantization_config=VQConfig()).save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    name = next(name for name in state if name.endswith("vq_scale"))
    save_file({key: tensor for key, tensor in state.items() if key != name}, path)
    with pytest.raises(VQFormatError, match=name):
        load(tmp_path)
    state[name][0, 0] = float("nan")
    save_file(state, path)
    with pytest.raises(VQFormatError, match=name):
        load(tmp_path)


@pytest.fixture
def pipeline(tmp_path):
    words = {
        "<|startoftext|>": 0,
        "<|endoftext|>": 1,
        **{f"{c}</w>": i + 2 for i, c in enumerate("abcd")},
    }
    text = CLIPTextConfig(
        vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32,), norm_num_groups=8, sample_size=8, latent_channels=4
    )
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    whole = diffusers.StableDiffusionPipeline(
        vae, CLIPTextModel(text), CLIPTokenizer(words, [], model_max_length=8), unet(),
        scheduler, None, None, requires_safety_checker=False,
    )  # fmt: skip
    whole.save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def draw(pipe) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    random = torch.Generator().manual_seed(0)
    found = pipe(
        "a b", num_inference_steps=2, generator=random, height=8, width=8, output_type="pt"
    )
    return found.images


def test_a_pipeline(pipeline, tmp_path):
    mapping = {"unet": VQConfig("vq-4"), "text_encoder": VQConfig("turboquant-4")}
    config = diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(pipeline, quantization_config=config)
    assert vq_modules(pipe.unet) and vq_modules(pipe.text_encoder) and not vq_modules(pipe.vae)
    before = draw(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert vq_modules(again.unet) and vq_modules(again.text_encoder)
    assert torch.equal(draw(again), before)


def test_one_backend_for_the_whole_pipeline(pipeline):
    config = diffusers.PipelineQuantizationConfig(
        quant_backend="vq", quant_kwargs={"scheme": "vq-4"}, components_to_quantize=["unet"]
    )
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(pipeline, quantization_config=config)
    assert vq_modules(pipe.unet) and not vq_modules(pipe.text_encoder)


IMPORTS = {
    "neither": "import diffusers\n",
    "hf_vq first": "import hf_vq\nimport diffusers\n",
    "hf_vq later": "import diffusers\ndiffusers.UNet2DConditionModel\nimport hf_vq\n",
}


@pytest.mark.parametrize("first", IMPORTS.values(), ids=IMPORTS)
def test_another_process_loads_it(folder, tmp_path, run_python, first):
    load(folder, quantization_config=VQConfig()).save_pretrained(tmp_path)
    code = (
        f"{first}model = diffusers.UNet2DConditionModel.from_pretrained({str(tmp_path)!r})\n"
        "print(type(model.mid_block.attentions[0].proj_in).__name__,"
        " type(model.time_embedding.linear_1).__name__)"
    )
    assert run_python(code).split()[-1] == "VQLinear"


def test_pipelines_of_others_work_where_hf_vq_is_not_imported(run_python):
    """diffusers compares a config with the types in Transformers' and its own tables."""
    code = (
        "import sys, diffusers\n"
        "config = diffusers.QuantoConfig('int8')\n"
        "diffusers.PipelineQuantizationConfig(quant_mapping={'unet': config})\n"
        "try: diffusers.PipelineQuantizationConfig(quant_mapping={'unet': 3})\n"
        "except ValueError: print('hf_vq' in sys.modules)"
    )
    assert run_python(code).split()[-1] == "False"


def test_dequantize_to_a_dtype_and_fused_projections(folder, monkeypatch):
    model = hf_vq.quantize_model(load(folder))
    with pytest.raises(VQConfigError, match="cannot be fused"):
        model.fuse_qkv_projections()
    dense = hf_vq.dequantize(model, torch.float16)
    assert dense.time_embedding.linear_1.weight.dtype == torch.float16
    dense.float().fuse_qkv_projections()
    with torch.device("meta"):
        empty = unet()
    with pytest.raises(VQConfigError, match="is not in memory"):
        hf_vq.quantize_model(empty)
    base = diffusers.quantizers.base.DiffusersQuantizer
    monkeypatch.delattr(base, "get_state_dict_and_metadata")
    with pytest.raises(VQConfigError, match="update it"):
        load(folder, quantization_config=VQConfig())


def test_files_have_no_room_for_digests_that_nothing_fills(folder, tmp_path):
    from safetensors import safe_open

    load(folder, quantization_config=VQConfig()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert set(file.metadata()) == {"format"}
