"""One fine-tuning in a separate process, which `suite` starts and talks to over pipes.

    in     options as JSON, then an empty line whenever it may go on
    out    JSON Lines: {"waits": steps that are done} or {"row": {...}}, the last

TRL's `SFTTrainer` trains LoRA as its defaults are: gradient checkpointing, and a fused head that
never holds all logits.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

TURN = 5  # steps
LOFTQ = "+loftq"  # ends the name of a method whose adapter begins with what the codes lost


def _say(**message: Any) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def _wait(done: int) -> None:
    _say(waits=done)
    sys.stdin.readline()


def memory() -> dict[str, int]:
    """Bytes of memory now (`VmRSS`), and the most since the last `forget_peak` (`VmHWM`), on
    Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines if line.startswith("Vm"))
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")}


def forget_peak() -> None:
    """Count the peak anew from what is there now."""
    Path("/proc/self/clear_refs").write_text("5")


def weights_bytes(model: Any) -> int:
    """Bytes of the layers that have adapters: the linear layers of the blocks, as they are held."""
    layers = [m.base_layer for m in model.modules() if hasattr(m, "base_layer")]
    return sum(p.nbytes for layer in layers for p in layer.parameters(recurse=False))


def sequences(tokenizer: Any, rows: list[dict[str, str]], tokens: int) -> list[dict[str, Any]]:
    """Question and answer of each row, in order, cut into equal sequences."""
    ids: list[int] = []
    for row in rows:
        ids += tokenizer(f"{row['question']}\n{row['answer']}")["input_ids"]
        ids.append(tokenizer.eos_token_id)
    parts = [ids[i : i + tokens] for i in range(0, len(ids) - tokens + 1, tokens)]
    return [{"input_ids": part, "labels": part} for part in parts]


def read_data(path: str, sequences: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of question and answer: those that are trained on, and the last, from which so many
    sequences are taken to evaluate."""
    rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    count = 10 * sequences
    return rows[:-count], rows[-count:]


def keep_gradients(model: Any) -> None:
    """Make bitsandbytes keep its layout of weights: on a CPU, a layer that is evaluated turns to a
    layout for inference, and stays there. Its product in that layout has no gradients, so
    that nothing below the last layers would learn."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def main() -> None:
    """Run it."""
    options = json.loads(sys.stdin.readline())
    sys.stdout = sys.stderr  # libraries print; ours is for messages alone
    import datasets
    import peft
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        TrainerCallback,
    )
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    import hf_vq

    method, source = options["method"], options["model"]
    if method == "nf4":
        import bitsandbytes  # noqa: F401
    torch.set_num_threads(options["threads"])
    imported = memory()["VmRSS"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    few = options["held_out"]
    rows, last = read_data(options["data"], few)
    evaluated = sequences(tokenizer, last, options["tokens"])[:few]
    train = sequences(tokenizer, rows, options["tokens"])
    dtype, more = torch.bfloat16, {}
    if method == "float32":
        dtype = torch.float32
    elif method == "nf4":
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(options["codes"] or source, dtype=dtype, **more)
    keep_gradients(model)
    if method not in ("bf16", "float32"):
        model = peft.prepare_model_for_kbit_training(model)
    seconds: list[tuple[float, float]] = []

    class Lockstep(TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % TURN == 0:
                _wait(state.global_step)
            self.start = time.process_time(), time.perf_counter()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.process_time(), time.perf_counter()
            seconds.append((now[0] - self.start[0], now[1] - self.start[1]))

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(options["seed"])
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder, max_steps=options["steps"], per_device_train_batch_size=1,
                per_device_eval_batch_size=1, learning_rate=2e-4, bf16=False, use_cpu=True,
                max_length=options["tokens"], report_to=[], save_strategy="no", disable_tqdm=True,
                logging_strategy="no", seed=options["seed"],
            ),
            train_dataset=datasets.Dataset.from_list(train),
            eval_dataset=datasets.Dataset.from_list(evaluated),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(
                r=options["rank"], lora_alpha=2 * options["rank"], target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[Lockstep()],
        )  # fmt: skip
        if method.endswith(LOFTQ):
            hf_vq.replace_lora_weights_loftq(trainer.model, source)
        loaded = memory()["VmHWM"]
        before = trainer.evaluate()["eval_loss"]
        forget_peak()
        trainer.train()
        peak = memory()["VmHWM"]
        after = trainer.evaluate()["eval_loss"]
    cpu, wall = zip(*seconds, strict=True)
    row = {
        "name": method, "loss_before": before, "loss_after": after,
        "cpu_seconds": median(cpu), "wall_seconds": median(wall), "cpu_each": cpu,
        "peak_bytes": peak, "imports_bytes": imported, "loading_peak_bytes": loaded,
        "weights_bytes": weights_bytes(model),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip
    if options["codes"] and options["merge"]:
        ids = torch.tensor([one["input_ids"] for one in evaluated])
        trained = trainer.model.eval()
        del trainer
        gc.collect()
        row |= _merged(trained, source, ids, hf_vq)
    _say(row=row)


def _merged(trained: Any, source: str, ids: Any, hf_vq: Any) -> dict[str, Any]:
    """KL divergences on `ids` [sequences, tokens]: of the codes from the dense model, and of the
    merged adapter from the one next to codes."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_vq.evaluation.score import Reference, model_forward, score

    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    original = Reference(model_forward(dense), ids)
    with trained.disable_adapter():
        scheme = score(model_forward(trained), original)
    del dense, original
    adapter = Reference(model_forward(trained), ids)
    adapter.perplexity  # noqa: B018, computed and kept before the weights change
    start = time.process_time()
    merged = trained.merge_and_unload()
    passed = time.process_time() - start
    found = score(model_forward(merged), adapter)
    return {
        "scheme_kld": scheme.kld, "scheme_kld_se": scheme.kld_se, "merged_kld": found.kld,
        "merged_kld_se": found.kld_se, "merge_cpu_seconds": passed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
