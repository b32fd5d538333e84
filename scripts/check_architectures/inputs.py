"""Inputs of a tiny model, by what its forward takes and its config says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

Inputs = dict[str, Any]

TOKENS = 12
BINS = ("num_mel_bins", "n_mel_bins", "feature_size", "feature_projection_input_dim", "input_dim")
"""Names of the number of features of a frame of sound."""


def inputs_for(model: Any) -> Iterator[Inputs]:
    """Inputs that a model may take, those that use more of it first."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    needed = [name for name, parameter in takes.items() if parameter.default is parameter.empty]
    makers = {name: NAMED[name] for name in needed if name in NAMED}
    makers |= SPECIAL.get(type(model).__name__, {})
    more = {name: make(config) for name, make in makers.items()}
    text = {"input_ids": input_ids(config)}
    for found in (
        {},
        *(with_text(model, image) for image in images(config)),
        text,
        *images(config),
        *sounds(config),
        *({**text, **sound} for sound in sounds(config)),
    ):
        found = {**found, **more}
        if found and {*found} <= {*takes}:
            yield found
            if "decoder_input_ids" in takes:
                yield {**found, "decoder_input_ids": text["input_ids"]}


def parts(config: Any) -> Iterator[Any]:
    """A config and all configs in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def values_of(config: Any, *names: str) -> list[Any]:
    """Values of the fields of these names, in a config and in those in it, without None."""
    found = [vars(part).get(name) for part in parts(config) for name in names]
    return [value for value in found if value is not None]


def first(config: Any, *names: str, default: Any) -> Any:
    """The first of `values_of`."""
    return next(iter(values_of(config, *names)), default)


def random(*shape: int) -> torch.Tensor:
    """Normal numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def input_ids(config: Any) -> torch.Tensor:
    """Token ids; the last one ends the sequence, which some classifiers look for."""
    ids = torch.arange(TOKENS)[None] + 20
    end = first(config, "eos_token_id", default=None)
    if isinstance(end, int) and 0 <= end < 160:
        ids[0, -1] = end
    return ids


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of an image."""
    size = first(config, "image_size", "input_size", default=64)
    return (size, size) if isinstance(size, int) else (size[-2], size[-1])


def images(config: Any) -> Iterator[Inputs]:
    """An image, in the forms that models know."""
    size = image_size(config)
    channels = first(config, "num_channels", "in_channels", "in_chans", default=3)
    patch = first(config, "patch_size", default=16)
    patch = patch if isinstance(patch, int) else 16
    # 4 x 4 patches, as Qwen 2 VL, which sees each as often as a clip has images, and its kin.
    times = first(config, "temporal_patch_size", "patch_temporal", default=1)
    patches = random(16, channels, patch, patch)
    flat = patches.flatten(1)
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    yield {"pixel_values": flat, **grid, "image_merge_sizes": torch.tensor([1])}
    yield {"pixel_values": flat.repeat(1, times), **grid}
    yield {"pixel_values": patches, **grid}
    yield {"pixel_values": patches[None], **grid}
    yield {"pixel_values": patches, "image_grid_hws": torch.tensor([[4, 4]])}
    yield {
        "pixel_values": flat[None], "pixel_attention_mask": torch.ones(1, 16).long(),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }  # fmt: skip
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)) + 1
    yield {"flattened_patches": torch.cat([places, flat], 1)[None]}
    image, sizes = random(1, channels, *size), torch.tensor([size])
    yield {"pixel_values": image, "image_sizes": sizes}
    yield {"pixel_values": image[None].repeat(1, 2, 1, 1, 1), "image_sizes": sizes}
    yield {"pixel_values": image}
    yield {"pixel_values": image[None]}


def with_text(model: Any, image: Inputs) -> Inputs:
    """Text with as many image tokens as the image has features."""
    ids = input_ids(model.config)
    token = first(model.config, "image_token_id", "image_token_index", default=None)
    found = {"input_ids": ids, **image}
    features = getattr(model, "get_image_features", None)
    features = features or getattr(model.base_model, "get_image_features", None)
    if token is None or features is None:
        return found
    try:
        with torch.no_grad():
            made = features(**image)
        made = getattr(made, "pooler_output", made)
        count = sum(math.prod(each.shape[:-1]) for each in made)
    except Exception:
        return found
    found["input_ids"] = torch.cat([ids[:, :3], ids.new_full((1, count), token), ids[:, 3:]], 1)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        found["mm_token_type_ids"] = (found["input_ids"] == token).long()
    return found


def sounds(config: Any) -> Iterator[Inputs]:
    """A sound: a wave, or frames of features."""
    bins = dict.fromkeys([*values_of(config, *BINS), 80])
    yield {"input_values": random(1, 4000)}
    yield {"input_values": random(1, 1024, next(iter(bins)))}
    for each in bins:
        for frames in (3000, 400, 8 * TOKENS):
            yield {"input_features": random(1, each, frames)}
        yield {"input_features": random(1, 100, each)}


def audio_codes(config: Any) -> torch.Tensor:
    """Token ids of every codebook: a sequence for each."""
    return input_ids(config).repeat(config.num_codebooks, 1)


Makers = dict[str, Callable[[Any], Any]]

NAMED: Makers = {
    "input_ids": input_ids,
    "qformer_input_ids": input_ids,
    "pixel_values_videos": lambda config: random(
        1, first(config, "num_frames", default=4), 3, *image_size(config)
    ),
}
"""Inputs that some models cannot do without, by their names: from a config to a value."""

SPECIAL: dict[str, Makers] = {
    "Blip2ForImageTextRetrieval": {
        "attention_mask": lambda config: torch.ones(1, TOKENS).long(),
        "use_image_text_matching_head": lambda config: True,
    },
    "GraniteSpeech5ForCTC": {
        "input_features": lambda config: random(1, 100, 4 * config.encoder_config.num_mel_bins),
    },
    "IdeficsForVisionText2Text": {
        "image_attention_mask": lambda config: torch.ones(1, TOKENS, 1).long(),
    },
    "Kosmos2ForConditionalGeneration": {
        "image_embeds_position_mask": lambda config: (
            torch.arange(TOKENS)[None] < config.latent_query_num
        ).long(),
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "input_ids": lambda config: input_ids(config)[..., None].repeat(
            1, 1, config.num_codebooks + 1
        ),
    },
    "MusicgenForCausalLM": {"input_ids": audio_codes},
    "MusicgenMelodyForCausalLM": {"input_ids": audio_codes},
    "PI0ForConditionalGeneration": {
        "noise": lambda config: random(1, config.chunk_size, config.max_action_dim),
        "pixel_attention_mask": lambda config: torch.ones(1, 1).long(),
        "state": lambda config: random(1, config.max_state_dim),
        "timestep": lambda config: torch.tensor([0.5]),
    },
    "UdopForConditionalGeneration": {
        "bbox": lambda config: torch.tensor([10, 20, 30, 40]).expand(1, TOKENS, 4),
    },
}  # fmt: skip
"""By the name of a class: inputs that its signature does not tell."""
