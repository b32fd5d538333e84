"""Suite `quality-finetune`: what fine-tuning adds to calibration (`quality-weights` is without).

The same measurement, on more of the calibration text: codes that move need many steps. A GPU
(`--device-map cuda`) takes minutes for it, a CPU hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_vq.calibration import finetune
from hf_vq.hf.calibration_options import FINETUNE

from . import weights
from .weights import FINETUNED as SCHEMES

CALIBRATION_TOKENS = 1 << 18


def run(
    model_dir: str,
    text: str | Path,
    *,
    calibration: str | Path,
    tokens: int = 32768,
    context: int = 1024,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    device_map: str | None = None,
    take_up: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda settings: (),
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Args:
        calibration: UTF-8 text that is calibrated and fine-tuned on.
        schemes: of which those in SCHEMES are tuned.
        with_baselines: also the same without fine-tuning.
        device_map: of the models, as `from_pretrained` takes it.
        take_up: given the settings, the rows of a run with the same that was stopped.

    Returns:
        (settings, results) of the record.
    """
    about = {
        "learning_rate": finetune.LEARNING_RATE,
        "epochs": finetune.EPOCHS,
        "entry_step": finetune.ENTRY_STEP,
    }
    settings, results = weights.run(
        model_dir,
        text,
        calibration=calibration,
        calibration_tokens=CALIBRATION_TOKENS,
        tokens=tokens,
        context=context,
        schemes=[name for name in schemes if name in SCHEMES],
        with_baselines=False,
        kinds=(*("calibrated",) * with_baselines, *FINETUNE),
        device_map=device_map,
        take_up=lambda found: take_up({**found, **about}),
        report=report,
    )
    return {**settings, **about}, results
