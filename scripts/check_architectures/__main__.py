#!/usr/bin/env python3
"""Quantize, save, load and run a tiny random model of every class that Transformers can build.

    python scripts/check_architectures [--out RECORD] [--only NAME ..] [--scheme vq-4]
                                       [--processes 2]

configs.py makes a class's default config tiny, inputs.py finds inputs that the dense model takes;
where there are none, the class is listed with the reason. Writes a record, and goes on where it was
interrupted. Takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from configs import tiny_config
from inputs import inputs_for
from transformers.models.auto import modeling_auto

from hf_vq import VQConfig
from hf_vq.evaluation.record import Recorder
from hf_vq.nn.replace import vq_modules

TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ",
    "CTC", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION", "SEQUENCE_CLASSIFICATION", "TEXT_ENCODING",
)  # fmt: skip
SECONDS = 900
LARGEST = 60_000_000  # parameters


def output_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The first float tensor that a model returns, and all others that are finite, as one."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**inputs)
    values = found.values() if isinstance(found, dict) else found
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not tensors:
        raise TypeError("no float tensor among the outputs")
    finite = [v for v in tensors[1:] if bool(v.isfinite().all())]
    return torch.cat([v.float().flatten() for v in (tensors[0], *finite)])


def save_tiny(kind: Any, folder: str) -> None:
    """Save a tiny random model of a class."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters when made tiny")
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some are zero or not initialized at all
            if not parameter.isfinite().all() or (parameter.abs() < 1e-3).all():
                parameter.normal_(0, 0.02)
    model.save_pretrained(folder)


def run_dense(model: Any, row: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor] | None:
    """Inputs that a dense model takes, and its output; None, and the first error, if none is."""
    for inputs in inputs_for(model):
        try:
            output = output_of(model, inputs)
            assert bool(output.isfinite().all()), "output is not finite"
        except Exception as error:
            row.setdefault("not run", shown(error))
        else:
            row.pop("not run", None)
            row["inputs"] = sorted(inputs)
            return inputs, output
    return None


def check(name: str, scheme: str) -> dict[str, Any]:
    """Outcome of one class."""
    kind = getattr(transformers, name)
    row: dict[str, Any] = {"class": name}
    step = "build"
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny(kind, f"{folder}/dense")
            model = kind.from_pretrained(f"{folder}/dense", dtype=torch.float32).eval()
            dense = run_dense(model, row)
            del model
            step = "quantize"
            quantized = kind.from_pretrained(
                f"{folder}/dense", dtype=torch.float32, quantization_config=VQConfig(scheme)
            ).eval()
            row["layers"] = len(vq_modules(quantized))
            step = "save"
            quantized.save_pretrained(f"{folder}/vq")
            step = "load"
            again = kind.from_pretrained(f"{folder}/vq", dtype=torch.float32).eval()
            step = "compare"
            left, right = quantized.state_dict(), again.state_dict()
            assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())[:3]
            wrong = [n for n in left if not torch.equal(left[n], right[n])]
            assert not wrong, wrong[:3]
            if dense is None:
                return {**row, "outcome": "stored"}
            step = "run"
            inputs, expected = dense
            found = output_of(quantized, inputs)
            assert bool(found.isfinite().all()), "output is not finite"
            # Not bit by bit: PyTorch's own sums depend on where in memory a tensor begins.
            torch.testing.assert_close(output_of(again, inputs), found)
            row["change"] = float(f"{(found - expected).norm() / expected.norm():.3g}")
        return {**row, "outcome": "run"}
    except Exception as error:
        outcome = "not built" if step == "build" else f"failed: {step}"
        if "has no layer to quantize" in str(error):
            outcome = "no linear layer"
        return {**row, "outcome": outcome, "why": shown(error)}


def shown(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def worker(tasks: Any, results: Any, scheme: str) -> None:
    """Check classes until told to stop."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in iter(tasks.get, None):
        results.put(("begin", name))
        results.put(("end", check(name, scheme)))


def classes() -> dict[str, list[str]]:
    """Every class of the tasks, and the Auto classes that make it."""
    autos = {
        id(getattr(auto, "_model_mapping", None)): n for n, auto in vars(modeling_auto).items()
    }
    found: dict[str, list[str]] = {}
    for task in TASKS:
        auto = autos[id(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING"))]
        for value in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
                if hasattr(transformers, name) and auto not in found.setdefault(name, []):
                    found[name].append(auto)
    return {name: autos for name, autos in found.items() if autos}


def main() -> None:
    """Check what is left, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("architectures.jsonl"), help="the record")
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--scheme", default="vq-4")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    autos, settings = classes(), {"scheme": arguments.scheme, "only": arguments.only}
    recorder = Recorder(
        arguments.out, "architectures", "python scripts/check_architectures", arguments.revision,
        settings=settings,
    )  # fmt: skip
    done: dict[str, dict[str, Any]] = {}

    def add(row: dict[str, Any]) -> None:
        done[row["class"]] = row
        recorder.add(row)

    for row in recorder.kept():
        add(row)
    left = [name for name in arguments.only or autos if name not in done]
    context = mp.get_context("fork")
    tasks, results = context.Queue(), context.Queue()
    for name in left:
        tasks.put(name)
    for _ in range(arguments.processes):
        tasks.put(None)

    def start() -> Any:
        made = context.Process(target=worker, args=(tasks, results, arguments.scheme), daemon=True)
        made.start()
        return made

    started = time.time()
    # One process a time looks at a class, so that one that hangs or dies can be told.
    workers: list[Any] = [start() for _ in range(arguments.processes)]
    running: dict[str, float] = {}
    while any(w.is_alive() for w in workers) or not results.empty():
        try:
            event, value = results.get(timeout=5)
        except Exception:
            late = [n for n, t in running.items() if time.time() - t > SECONDS]
            dead = [w for w in workers if w.exitcode not in (None, 0)]
            if late or dead:
                for w in workers:
                    w.kill()
                for name in late or running:
                    row = {"class": name, "outcome": "failed: too slow, or died", "why": ""}
                    add({**row, "auto": autos[name]})
                for name in set(running) - set(done):
                    tasks.put(name)
                running.clear()
                workers = [start() for _ in range(arguments.processes)]
                for _ in range(arguments.processes):
                    tasks.put(None)
            continue
        if event == "begin":
            running[value] = time.time()
            continue
        running.pop(value["class"], None)
        add({**value, "auto": autos[value["class"]]})
        ended = sum(name in done for name in left)
        seconds = (time.time() - started) / max(1, ended) * (len(left) - ended)
        line = f"{ended}/{len(left)} {value['class']}: {value['outcome']}, {seconds:.0f} s left"
        print(line, file=sys.stderr)
    recorder.finish(settings, {"rows": list(done.values())})
    print(json.dumps(Counter(row["outcome"] for row in done.values()), indent=1))


if __name__ == "__main__":
    main()
