"""Samples hf_vq/calibration/data/default.txt.xz, the text of `calibration="default"`, from models.

    python scripts/sample_calibration_text.py sample PARTS smollm2 MODEL_DIR --seconds 1200
    python scripts/sample_calibration_text.py sample PARTS qwen MODEL_DIR --seconds 1200
    python scripts/sample_calibration_text.py sample PARTS tinybooks MODEL_DIR --seconds 300
    python scripts/sample_calibration_text.py pack PARTS      # at most 1 MB, every kind in turn

Every document is a prompt of this file and what the model makes of it at temperature 1, of all
tokens. SmolLM2-135M-Instruct writes prose, answers and explanations; Qwen2.5-Coder-0.5B-Instruct
writes code, mathematics and other languages (both Apache-2.0, so the text may be shipped);
tinybooks-17m, which is of this project, writes stories. A batch is seeded by its number, and kept
in its own file: a stopped run goes on. `pack` fills what is missing to 1 MB with the code, the
documents and the demo's text of this project. The packed file, and not this script, is the
definition of the text: another version of PyTorch samples other words.

The file of today: 16 documents each of SmolLM2's prose and answers (batches 0 and 1), stories, and
the rest of this project; see the line that `pack` prints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import random
import time
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "hf_vq" / "calibration" / "data" / "default.txt.xz"
BATCH, LENGTH = 16, 320  # documents, tokens of an answer
MOST = 1_000_000  # bytes of text

TOPICS = """the tides|a village school|steam engines|bread|the French Revolution|volcanoes|chess
jazz|the immune system|a lighthouse keeper|bees|inflation|glaciers|typewriters|the Silk Road|sleep
black holes|gardening in a small yard|a broken bicycle|elections|photosynthesis|mountain rescue
the printing press|a lost letter|coral reefs|football|origami|railway timetables|the human heart
medieval castles|a job interview|whales|clouds|the stock market|poetry|electric cars|a night train
dinosaurs|tea|bridges|maps|vaccines|a stray dog|the Roman army|comets|wooden boats|tax returns
earthquakes|libraries|a power cut|the Olympic Games|mushrooms|radio|prisons|deserts|a wedding
computer networks|cheese|satellites|strikes|the piano|rivers|a museum thief|fear of flying"""

SUBJECTS = """a stack with a minimum|reading a CSV file|binary search|a priority queue|parsing dates
matrix multiplication|a rate limiter|word counts|an LRU cache|a directory walk|prime numbers|a trie
retrying HTTP requests|a linked list|quicksort|password hashing|a state machine|JSON validation
a command line parser|edit distance|a thread pool|roman numerals|an event emitter|graph search
bank accounts|image thumbnails|a text adventure|unit conversion|a ring buffer|log rotation"""

PROSE = (
    "{Topic}\n\n", "It was late in the evening when the talk turned to {topic}. ",
    "The history of {topic} begins", "Review: a new book about {topic}.\n\n",
    "Chapter 3\n\nNobody in the house had ever cared about {topic}, until",
    "Scientists said on Tuesday that {topic}", "Dear editor,\n\nyour article about {topic}",
    "In 1953, {topic}", "\"What do you know about {topic}?\" she requested.\n\n",
)  # fmt: skip
CHAT = (
    "Explain {topic} to a child.", "Write a short story about {topic}.",
    "What are five surprising facts about {topic}?", "Give me a step by step guide to {topic}.",
    "Write a polite email about {topic}.", "What are the pros and cons of {topic}?",
    "Summarize what is known about {topic}.", "I need help with {topic}. Where do I start?",
    "Write a dialogue between two friends about {topic}.", "Write a poem about {topic}.",
    "Make a table that compares three views of {topic}.", "Why does {topic} matter today?",
)  # fmt: skip
CODE = (
    "Write {subject} in {language}.", "Write {language} code for {subject}, with tests.",
    "Explain how to implement {subject} in {language}, with an example.",
    "Find the bug in a typical {language} program for {subject}, and fix it.",
    "Refactor {subject} in {language} for speed.",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "JavaScript", "C++", "Rust", "Java", "Go", "SQL", "Bash", "C")
MATH = (
    "A shop sells {a} boxes of {b} pencils for {c} euros. What does a pencil cost? Show your work.",
    "Solve {a}x + {b} = {c} step by step.", "Compute the derivative of {a}x^3 - {b}x^2 + {c}.",
    "A train goes {c} km in {a} hours and rests {b} minutes. How fast is it on average?",
    "What is {a} * {b} + {c}? Explain every step.", "Prove that the sum of {a} odd numbers, {b} "
    "even numbers and {c} is even or odd.", "In how many ways can {a} of {b} people sit in a row?",
)  # fmt: skip
FOREIGN = (
    "Écris un texte court sur {topic}.", "Schreibe einen kurzen Text über {topic}.",
    "Escribe un texto corto sobre {topic}.", "Scrivi un breve testo su {topic}.",
    "写一篇关于 {topic} 的短文。", "{topic} について短い文章を書いてください。",
    "Напиши короткий текст на тему «{topic}».", "Escreva um texto curto sobre {topic}.",
    "{topic}에 대해 짧은 글을 써 주세요.", "اكتب نصا قصيرا عن {topic}.",
)  # fmt: skip
KINDS = {"smollm2": ("prose", "chat"), "qwen": ("code", "foreign", "math"), "tinybooks": ("story",)}
OWN = ("hf_vq/**/*.py", "kernels/**/*.[ch]*", "docs/**/*.md", "tests/models/*.txt")
"""Files of this project that fill what is missing, in pieces of PIECE characters."""
PIECE = 2000


def prompts(kind: str, count: int, seed: int) -> list[str]:
    """Prompts of a kind: forms and subjects by chance."""
    chance = random.Random(f"{kind} {seed}")
    topics, subjects = (text.replace("\n", "|").split("|") for text in (TOPICS, SUBJECTS))
    forms = {
        "prose": PROSE,
        "chat": CHAT,
        "code": CODE,
        "math": MATH,
        "story": PROSE,
        "foreign": FOREIGN,
    }[kind]
    found = []
    for _ in range(count):
        topic = chance.choice(topics)
        words = {
            "topic": topic, "Topic": topic.capitalize(), "subject": chance.choice(subjects),
            "language": chance.choice(LANGUAGES), "a": chance.randint(2, 12),
            "b": chance.randint(3, 60), "c": chance.randint(20, 900),
        }  # fmt: skip
        found.append(chance.choice(forms).format(**words))
    return found


def sample(folder: Path, writer: str, model_dir: str, seconds: float, device: str) -> None:
    """Write batches of documents into `folder` until the time is over."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    start = time.monotonic()
    for number in itertools.count():
        kind = KINDS[writer][number % len(KINDS[writer])]
        path = folder / f"{kind}-{number:03d}.json"
        if path.exists():
            continue
        if time.monotonic() - start > seconds:
            return
        batch = prompts(kind, BATCH, number)
        path.write_text(json.dumps(documents(model, tokenizer, kind, batch, number)))
        print(path.name, f"{time.monotonic() - start:.0f} s", flush=True)


def documents(model: Any, tokenizer: Any, kind: str, batch: list[str], seed: int) -> list[str]:
    """The prompts with what the model makes of them."""
    import torch

    requested = batch
    if kind not in ("prose", "story"):
        requested = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True
            )
            for one in batch
        ]
    inputs = tokenizer(requested, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = inputs.to(model.device)
    torch.manual_seed(seed)
    with torch.no_grad():
        written = model.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    answers = tokenizer.batch_decode(
        written[:, inputs.input_ids.shape[1] :], skip_special_tokens=True
    )
    join = "" if kind in ("prose", "story") else "\n\n"
    return [(one + join + answer).strip() for one, answer in zip(batch, answers, strict=True)]


def own_pieces() -> list[str]:
    """The code and the documents of this project, in pieces."""
    root = Path(__file__).parents[1]
    found = []
    for pattern in OWN:
        for path in sorted(root.glob(pattern)):
            text = path.read_text(encoding="utf-8").strip()
            found += [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    return found


def pack(folder: Path) -> None:
    """Join the documents, one of each kind in turn, up to MOST bytes, and compress them."""
    kinds: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        kinds.setdefault(path.name.partition("-")[0], []).extend(json.loads(path.read_text()))
    missing = MOST - sum(len(t.encode()) + 2 for texts in kinds.values() for t in texts)
    own = own_pieces()
    random.Random(0).shuffle(own)
    while missing > 0 and own:
        kinds.setdefault("own", []).append(own.pop())
        missing -= len(kinds["own"][-1].encode()) + 2
    # In proportion to their number, so that all kinds last to the end.
    order = sorted(
        ((index + 0.5) / len(texts), kind, text)
        for kind, texts in kinds.items()
        for index, text in enumerate(texts)
    )
    text = "\n\n".join(document for _, _, document in order)
    data = text.encode()[:MOST].decode(errors="ignore").encode()
    OUT.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    sizes = {kind: sum(len(t.encode()) for t in texts) for kind, texts in kinds.items()}
    print(f"{len(data)} bytes of text, {OUT.stat().st_size} compressed; sampled: {sizes}")


def main() -> None:
    """Sample, or pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    sampling = verbs.add_parser("sample")
    sampling.add_argument("folder", type=Path)
    sampling.add_argument("writer", choices=KINDS)
    sampling.add_argument("model")
    sampling.add_argument("--seconds", type=float, default=1200)
    sampling.add_argument("--device", default="cpu")
    verbs.add_parser("pack").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.verb == "pack":
        pack(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    sample(args.folder, args.writer, args.model, args.seconds, args.device)


if __name__ == "__main__":
    main()
