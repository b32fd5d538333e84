"""VQConfig: what it takes, what it keeps, and what it refuses."""

import json
import re

import pytest
from transformers import LlamaConfig

from hf_vq.errors import VQCalibrationError, VQConfigError, VQError, VQSchemeError
from hf_vq.formats import VQScheme
from hf_vq.formats.catalog import WEIGHT_SCHEMES, weight_scheme
from hf_vq.hf import VQConfig, calibration_options
from hf_vq.hf import config as module


@pytest.fixture(autouse=True)
def _advice_was_given(monkeypatch):
    monkeypatch.setattr(calibration_options, "_advised", set(WEIGHT_SCHEMES))


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_every_form_of_a_scheme_is_the_same(name):
    scheme = weight_scheme(name)
    for form in (name, scheme, scheme.spec(), scheme.to_dict()):
        config = VQConfig(form)
        assert config.vq_scheme == scheme
        assert config.scheme_name == name


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_short_for_a_scheme(bits):
    config, name = VQConfig(bits=bits), f"{'vq' if bits in (2, 3, 4) else 'turboquant'}-{bits}"
    assert config.scheme_name == name and round(config.vq_scheme.bits()) == bits
    assert VQConfig(name, bits=bits).to_dict() == config.to_dict()
    assert VQConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_what_is_kept_is_json_and_comes_back():
    config = VQConfig(
        "vq-3", modules_to_not_convert=["a", "b"], seed=7, provenance={"base_model": "a/b"}
    )
    for _ in range(3):
        kept = json.loads(json.dumps(config.to_dict()))
        assert kept == config.to_dict() == config.__dict__
        config = VQConfig.from_dict(kept)
        assert config.to_dict() == kept


def test_it_lives_in_a_model_config(tmp_path):
    config = LlamaConfig(quantization_config=VQConfig("vq-3", seed=3))
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "hf_vq" and stored["format_version"] == 1
    assert VQScheme.from_dict(stored["scheme"]) == weight_scheme("vq-3")
    again = LlamaConfig.from_pretrained(tmp_path)
    assert VQConfig.from_dict(again.quantization_config).to_dict() == stored


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scheme": "vq-5"}, "vq-4"),
        ({"scheme": "vq_4"}, "Did you mean 'vq-4'"),
        ({"scheme": 4}, "Known"),
        ({"scheme": {"vector_size": "2", "entry_bits": 8}}, "vector_size must be an integer"),
        ({"scheme": {"vector_size": 10**30, "entry_bits": 8}}, "integer in"),
        ({"scheme": {"vector_size": 2, "entry_bits": 8, "colour": 1}}, "colour"),
        ({"scheme": {"vector_size": 2, "entry_bits": 8.0}}, "integer in"),
        ({"bits": "4"}, "bits must be an integer"),
        ({"bits": 9}, "bits must be an integer in"),
        ({"bits": "4bit"}, "write bits=4"),
        ({"load_in_4bit": True}, "argument of BitsAndBytesConfig. Write VQConfig(bits=4)"),
        ({"load_in_8bit": True}, "argument of BitsAndBytesConfig. Write VQConfig(bits=8)"),
        ({"scheme": "nf4"}, "Did you mean 'vq-4'"),
        ({"scheme": "INT8"}, "Did you mean 'turboquant-8'"),
        ({"bnb_4bit_quant_type": "nf4"}, "argument of BitsAndBytesConfig"),
        ({"bits": True}, "bits must be an integer"),
        ({"scheme": "vq-3", "bits": 4}, "give one"),
        ({"scheme": "vq-4", "bits": 3}, "give one"),
        ({"seed": "0"}, "seed must be an integer"),
        ({"seed": 10**40}, "seed must be an integer"),
        ({"seed": 10**5000}, "got <int>"),
        ({"modules_to_not_convert": [10**5000]}, "list of names"),
        ({"search": 10**5000}, "least_squares"),
        ({"seed": -1}, "seed must be an integer"),
        ({"search": "best"}, "least_squares"),
        ({"search": ["search"]}, "least_squares"),
        ({"modules_to_not_convert": "lm_head"}, "list of names"),
        ({"modules_to_not_convert": [1]}, "list of names"),
        ({"modules_to_not_convert": [""]}, "list of names"),
        ({"modules_to_not_convert": ["("]}, "regular expression"),
        ({"quant_method": "gptq"}, "another library"),
        ({"format_version": module.FORMAT_VERSION + 1}, "pip install -U hf_vq"),
        ({"format_version": "1"}, "format_version must be an integer"),
        ({"provenance": "me"}, "provenance must be a dict"),
        ({"provenance": {"relative_error": [1]}}, "relative_error"),
        ({"provenance": {"x": float("nan")}}, "JSON"),
        ({"group_size": 64}, "'group_size'"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises((VQConfigError, VQSchemeError), match=re.escape(says)):
        VQConfig(**arguments)
    if "modules_to_not_convert" in arguments and says == "regular expression":
        return  # of a file it is a name
    with pytest.raises(VQError):
        VQConfig.from_dict({**VQConfig().to_dict(), **arguments})


def test_no_pattern_comes_from_a_file(monkeypatch):
    """Entries of a stored config are names, and pass2 is never stored: nothing reaches `re`."""
    hostile = "([a-z_0-9.]+)+\\!"
    stored = VQConfig("turboquant-4+4", layers={"down_proj": "turboquant-4"}).to_dict()
    for policy in ("offload", "absent", None, {hostile: "offload"}):
        with pytest.raises(VQConfigError, match="pass2, which is never stored"):
            VQConfig.from_dict({**stored, "pass2": policy})
    changed = {"modules_to_not_convert": [hostile, "("], "layers": {"(" * 9999: "turboquant-4"}}
    for name in ("check_pattern", "matches"):
        monkeypatch.setattr(module, name, lambda *arguments: pytest.fail(f"{arguments}"))
    config = VQConfig.from_dict({**stored, **changed})
    assert config.modules_to_not_convert == changed["modules_to_not_convert"]
    assert config.stored_scheme("down_proj") == config.vq_scheme


@pytest.mark.parametrize("entry", ["(", "(" * 9999])
def test_a_pattern_that_is_none(entry):
    with pytest.raises(VQConfigError, match="is not a regular expression"):
        VQConfig(modules_to_not_convert=[entry])


def test_a_newer_file_says_so_before_its_new_fields_are_read():
    with pytest.raises(VQConfigError, match="newer"):
        VQConfig.from_dict({**VQConfig().to_dict(), "format_version": 3, "new_field": 1})


def test_two_bits_advise_calibration_once(monkeypatch, recwarn):
    monkeypatch.setattr(calibration_options, "_advised", set())
    for options in ({}, {}, {"activations": None}, {"calibration": "model"}):
        VQConfig("vq-2", **options)
    VQConfig("vq-3")
    VQConfig("vq-4", activations=None)
    VQConfig("vq-3", activations=None)
    cure = "hf-vq calibrate MODEL OUT --scheme {0}, or VQConfig('{0}', calibration='model'). Or use"
    assert [str(warning.message) for warning in recwarn if "calibrat" in str(warning.message)] == [
        f"vq-2 loses much quality without calibration: {cure.format('vq-2')} more bits.",
        "vq-3 loses much quality without activations or calibration: "
        f"{cure.format('vq-3')} more bits.",
    ]


def test_activations_are_written_only_where_they_are_not_usual():
    for given, written in (("auto", {}), (None, {"activations": None}), ("random", None)):
        config = VQConfig(activations=given)
        found = config.to_dict()
        kept = {key: found[key] for key in ("activations",) if key in found}
        assert kept == ({"activations": given} if written is None else written)
        assert VQConfig.from_dict(found).activations == config.activations == given
        config.provenance = {}  # it was quantized
        config.activations = None
        assert "activations" not in config.to_dict()
    for options in ({"calibration": "model"}, {"target_bits": 3.0}):
        assert VQConfig(**options).activations is None


def test_layers_are_written_only_where_they_are_used():
    """Files of one scheme are read by older versions, others are refused by them."""
    plain = VQConfig("vq-3").to_dict()
    assert plain["format_version"] == 1 and not {"layers", "target_bits", "candidates"} & set(plain)
    config = VQConfig("vq-3", layers={"down_proj": "vq-4", r"model\.layers\.[01]": "turboquant-5"})
    assert config.format_version == 2
    assert config.scheme_of("model.layers.0.mlp.down_proj") == weight_scheme("vq-4"), "the first"
    assert config.scheme_of("model.layers.1.mlp.up_proj") == weight_scheme("turboquant-5")
    assert config.scheme_of("model.layers.2.mlp.up_proj") == weight_scheme("vq-3")
    kept = json.loads(json.dumps(config.to_dict()))
    assert VQConfig.from_dict(kept).to_dict() == kept
    assert all(VQScheme.parse(spec) for spec in kept["layers"].values())


def test_target_bits_need_no_more_than_a_number():
    config = VQConfig(target_bits=2.5)
    assert config.calibration["text"] == "model" and config.candidates == ["vq-2", "vq-3", "vq-4"]
    assert config.scheme_name == "vq-2", "of the layers that no block holds"
    assert VQConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    spec = weight_scheme("vq-3").spec()
    named = VQConfig(target_bits=4, candidates=[spec, "vq-3", "turboquant-5"], calibration="a:b")
    assert named.candidates == ["vq-3", "turboquant-5"] and named.calibration["text"] == "a:b"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"layers": ["vq-2"]}, "dict of names and schemes"),
        ({"layers": {"": "vq-2"}}, "dict of names and schemes"),
        ({"layers": {"(": "vq-2"}}, "layers: '(' is not a regular expression"),
        ({"layers": {"mlp": "vq-9"}}, "unknown weight scheme 'vq-9'"),
        ({"target_bits": "3"}, "target_bits must be a number"),
        ({"target_bits": 2}, "at least 2.125, the least that vq-2, vq-3, vq-4 store"),
        ({"target_bits": float("nan")}, "at least 2.125"),
        ({"target_bits": 9}, "vq-4 has the most bits of the candidates, 4.125"),
        ({"target_bits": 3, "candidates": ["vq-2"]}, "a list of two schemes or more"),
        (
            {"target_bits": 3, "candidates": ["vq-2", "gptvq-2"]},
            "gptvq-2 cannot be one of the cand",
        ),
        ({"candidates": ["vq-2", "vq-3"]}, "target_bits chooses from"),
    ],
)
def test_bad_layers_and_targets(arguments, says):
    with pytest.raises((VQConfigError, VQSchemeError), match=re.escape(says)):
        VQConfig(**arguments)


@pytest.mark.parametrize("argument", ["calibration", "activations"])
def test_a_missing_text_is_said_at_once(argument, tmp_path):
    for name in ("nofile.txt", str(tmp_path / "none"), "./none", tmp_path / "none"):
        with pytest.raises(VQCalibrationError, match="is no file"):
            VQConfig("vq-3", **{argument: name})
    (tmp_path / "text.txt").write_text("words")
    for name in ("wikitext:wikitext-2-raw-v1:train", "org/set", str(tmp_path / "text.txt")):
        VQConfig("vq-3", **{argument: name})
    saved = VQConfig("vq-3", calibration=str(tmp_path / "text.txt"), provenance={}).to_dict()
    (tmp_path / "text.txt").unlink()
    VQConfig.from_dict(saved)  # a record needs no file


def test_bits_of_activations_are_not_stored():
    config = VQConfig(activations_bits=8)
    assert config.activations_bits == 8
    assert config.get_loading_attributes() == {"activations_bits": 8}
    assert config.to_dict() == VQConfig().to_dict()
    assert VQConfig().get_loading_attributes() == {}
    for wrong in (4, 12, True, "8", 8.0):
        with pytest.raises(VQConfigError, match="activations_bits must be"):
            VQConfig(activations_bits=wrong)
    spec = WEIGHT_SCHEMES["vq-4"].with_activations(8).spec()
    for stored in ({"scheme": spec}, {"layers": {"down_proj": spec}}):
        with pytest.raises(
            VQConfigError,
            match="hadamard128, and activations_bits=8",
        ):
            VQConfig(**stored)
