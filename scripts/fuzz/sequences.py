"""Random operations on a VQCache and a DynamicCache: every row must be the token that was given.

Unquantized rows (sinks, the window, and rows that a crop restores) must equal the DynamicCache bit
for bit. Other rows may be that token's codes: those of a new cache with the same mean that gets
the DynamicCache's rows in one update. A step of attention over the codes must equal attention over
the decoded rows in float64.
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from campaign import Finding, Try
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig

from hf_vq import VQCache
from hf_vq.cache.key_means import Calibrated
from hf_vq.cache.layer import SLACK
from hf_vq.errors import VQCacheError
from hf_vq.ops.rotary_mean import rotated

SCHEMES = ("u4", "u3", "u2", "k4v2", "nomad-u4", "qserve-kv4", "turboquant-4", "turboquant-3-prod")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Codes that are ties in float32 may be either; a row of another token is wrong by its whole length.
TIE = 1.02
# Of a step of attention: standard deviations of what rounding queries to 8 bits does, and of the
# largest value, what tables and weights of 8 to 16 bits do.
DEVIATIONS, ATTENTION = 12, 0.01


@dataclass
class Life:
    """One sequence of calls, made of two caches."""

    rng: random.Random
    folder: Path
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(60))
        self.kv_heads = rng.choice([1, 2, 3])
        self.heads = self.kv_heads * rng.choice([1, 1, 2, 4])
        self.dim = rng.choice([16, 32, 64, 80])
        self.dtype = rng.choice(DTYPES)
        self.kind = rng.choice(["full", "full", "full", "static", "sliding"])
        sizes = {
            "num_hidden_layers": 1, "num_attention_heads": self.heads, "head_dim": self.dim,
            "num_key_value_heads": self.kv_heads, "hidden_size": self.heads * self.dim,
        }  # fmt: skip
        self.plain = LlamaConfig(**sizes)
        sliding = rng.choice([5, 16, 40])
        self.config: Any = (
            MistralConfig(**sizes, sliding_window=sliding) if self.kind == "sliding" else self.plain
        )
        self.scheme = rng.choice(SCHEMES)
        self.window, self.sinks = rng.choice([0, 1, 4, 16, 200]), rng.choice([0, 1, 4])
        self.limit = 400 if self.kind == "static" or rng.random() < 0.2 else None
        mean = torch.randn(self.kv_heads, self.dim, generator=self.generator)
        self.means = [mean] if rng.random() < 0.3 else None
        self.shift = 2 * torch.randn(self.kv_heads, 1, self.dim, generator=self.generator)
        self.batch = rng.choice([1, 1, 2, 3])
        self.log.append(
            f"{self.scheme} {self.kind} {self.dtype} heads {self.heads}/{self.kv_heads} "
            f"x {self.dim} window {self.window} sinks {self.sinks} limit {self.limit} "
            f"batch {self.batch}"
        )
        self.renew()

    def renew(self) -> None:
        """Two empty caches."""
        self.cache = VQCache(
            self.config, self.scheme, self.sinks, self.window, self.limit, key_means=self.means,
            static=self.kind == "static", quantize_sliding=self.kind == "sliding",
        )  # fmt: skip
        self.forget()

    def forget(self) -> None:
        """Nothing was fed yet."""
        self.dense = DynamicCache(config=self.config)
        self.start: Tensor | None = None
        self.floats_from = 0

    @property
    def layer(self) -> Any:
        """The layer with codes."""
        return self.cache.coded_layers[0]

    def feed(self, count: int) -> None:
        """Append random tokens, and check what attention sees of them."""
        first = self.dense.get_seq_length() == 0
        if first and self.rng.random() < 0.3 and self.kind == "full" and count > 1:
            starts = [self.rng.randrange(count) for _ in range(self.batch)]
            self.start = torch.tensor(starts)
            mask = (torch.arange(count) >= self.start[:, None]).long()
            self.cache.expect_prompt(mask)
            self.log.append(f"padding {starts}")
        shape = self.batch, self.kv_heads, count, self.dim
        keys, values = (torch.randn(shape, generator=self.generator) for _ in "kv")
        keys, values = (keys + self.shift).to(self.dtype), values.to(self.dtype)
        found = self.cache.update(keys, values, 0)
        self.exact = self.dense.update(keys, values, 0)
        length = self.dense.get_seq_length()
        self.floats_from = max(self.floats_from, length - self.window - SLACK)
        if count == 1 and not first:
            self.attend(*found)

    def attend(self, keys: Tensor, values: Tensor) -> None:
        """One query: over codes, and over what they decode to."""
        query = torch.randn(self.batch, self.heads, 1, self.dim, generator=self.generator)
        query = query.to(self.dtype)
        groups = self.heads // self.kv_heads
        mask = None
        if self.start is not None:
            length = self.dense.get_seq_length()
            mask = (torch.arange(length) >= self.start[:, None])[:, None, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, enable_gqa=groups > 1
        )
        seen = (
            [self.seen(side) for side in "kv"]
            if self.kind == "static"  # which cannot be decoded
            else [keys.decode(), values.decode()]
        )
        k, v = (part.double().repeat_interleave(groups, 1) for part in seen)
        scores = query.double() @ k.transpose(2, 3) / self.dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        exact = weights @ v
        # Numbers of a query are rounded to 127 steps of its largest one: by 1 / sqrt(12) of a step.
        step = query.double().abs().amax(-1, keepdim=True) / 127 / 12**0.5
        logits = step * k.norm(dim=-1)[:, :, None] / self.dim**0.5
        moved = (weights * logits)[..., None] * (v[:, :, None] - exact[:, :, :, None])
        allowed = DEVIATIONS * moved.norm(dim=-2) + ATTENTION * v.abs().max()
        error = ((out.double() - exact).abs() / allowed).max()
        if not error < 1:
            raise Finding("attention diverges", f"{error:.3g} of what is allowed; {self.said}")

    def seen(self, side: str) -> Tensor:
        """Expected keys or values for a query after the last token."""
        true = self.expected_rows()["kv".index(side)]
        coded = torch.stack([self.coded(side, row, true[row], 0) for row in range(self.batch)])
        position = torch.arange(true.shape[2])
        exact = (position < self.sinks) | (position > len(position) - 1 - max(self.window, 1))
        return torch.where(exact[:, None], true, coded)

    @property
    def said(self) -> str:
        """All that was done."""
        return "; ".join(self.log)

    def check(self) -> None:
        """Every row is its token."""
        length = self.dense.get_seq_length()
        if self.cache.get_seq_length() != length:
            raise Finding("length", f"{self.cache.get_seq_length()}, not {length}; {self.said}")
        if length == 0 or self.kind == "static":
            return
        layer = self.layer
        exact_from = max(length - self.window + 1, self.floats_from, 0)
        for side, found, exact in zip(
            "kv", (layer.keys, layer.values), self.expected_rows(), strict=True
        ):  # fmt: skip
            rows, true = found.decode(), exact
            count = min(rows.shape[2], true.shape[2])
            rows, true = rows[:, :, -count:], true[:, :, -count:]
            for row in range(rows.shape[0]):
                begin = 0 if self.start is None else int(self.start[row])
                self.check_row(side, row, rows[row], true[row], begin, exact_from, length - count)

    def expected_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the DynamicCache."""
        return self.dense.layers[0].keys, self.dense.layers[0].values

    def check_row(
        self, side: str, row: int, rows: Tensor, true: Tensor, begin: int, exact_from: int, at: int
    ) -> None:
        """One sequence of a batch: rows [H, n, D] at positions `at` and on."""
        position = torch.arange(at, at + rows.shape[1])
        same = (rows == true).all(-1).all(0)
        sinks = (position >= begin) & (position < begin + self.sinks)
        must = sinks if self.kind == "sliding" else sinks | (position >= exact_from)
        if self.kind == "sliding":
            must = position >= max(exact_from, at)
        wrong = must & ~same & (position >= begin)
        if bool(wrong.any()):
            raise Finding(
                "floats changed",
                f"{side} of row {row} at {position[wrong].tolist()[:8]} of {at + len(position)}; "
                f"{self.said}",
            )
        coded = self.coded(side, row, true, at)
        near = (rows.double() - true.double()).norm(dim=-1)
        allowed = (coded.double() - true.double()).norm(dim=-1) * TIE + 1e-6
        equal = (rows == coded).all(-1).all(0)
        wrong = ~same & ~equal & (near > allowed).any(0) & (position >= begin)
        if bool(wrong.any()):
            raise Finding(
                "codes of another token",
                f"{side} of row {row} at {position[wrong].tolist()[:8]} of {at + len(position)}; "
                f"{self.said}",
            )

    def coded(self, side: str, row: int, true: Tensor, at: int) -> Tensor:
        """Encode and decode rows [H, n, D] at positions `at` and on with a new cache that quantizes
        all of them, and has the same means."""
        cache = VQCache(self.plain, self.scheme, 0, 0, key_means=self.known(row, at), static=False)
        cache.update(true[None], true[None], 0)
        layer = cache.coded_layers[0]
        return (layer.keys if side == "k" else layer.values).decode()[0]

    def known(self, row: int, at: int) -> list[Calibrated] | None:
        """Means and factors of the keys of a row, as of a sequence that begins at position `at`."""
        factors = self.layer.k.smoothing
        smoothing = None if factors is None else factors[row, :, 0]
        mean, turning, rotary = self.layer.k.mean, self.layer.k.rotary_mean, self.layer._rotary
        if mean is None:
            return None
        if turning is None or rotary is None:
            return [Calibrated(mean[row, :, 0], smoothing=smoothing)]
        layout = bool(rotary.interleaved)
        moved = rotated(turning[row, None], rotary.inv_freq, layout, torch.tensor([at]))
        return [Calibrated(mean[row, :, 0], moved[0, :, 0], layout, smoothing)]

    def step(self) -> None:
        """One call that changes rows or length."""
        length = self.dense.get_seq_length()
        choices = ["feed", "feed", "feed", "one", "one", "one"]
        if length:
            choices += ["save", "copy", "reset"]
            if self.kind != "static":
                choices += ["reorder", "repeat", "select"]
            if self.kind != "sliding":
                choices += ["crop", "crop"]
            if self.kind == "full":
                choices += ["reject"]
        what = self.rng.choice(choices)
        self.log.append(what)
        getattr(self, f"do_{what}")(length)

    def do_feed(self, length: int) -> None:
        """Some tokens."""
        count = self.rng.choice([2, 3, 7, 33, 70])
        if self.limit and length + count > self.limit:
            return
        self.log[-1] += f" {count}"
        self.feed(count)

    def do_one(self, length: int) -> None:
        """One token."""
        if not self.limit or length < self.limit:
            self.feed(1)

    def do_crop(self, length: int) -> None:
        """Forget the newest tokens; the first one stays."""
        most = SLACK if self.kind == "static" else length - 1
        if self.start is not None:
            most = min(most, length - 1 - int(self.start.max()))
        count = min(most, self.rng.choice([1, 2, 5, 30, 60]))
        if count <= 0:
            return
        self.log[-1] += f" {count}"
        try:
            self.cache.crop(-count)
        except VQCacheError:
            if self.kind != "static":  # which may say no
                raise
            return
        self.dense.crop(-count)

    def do_reject(self, length: int) -> None:
        """Candidates of assisted decoding, some of them rejected."""
        count = self.rng.randint(2, 6)
        if self.limit and length + count > self.limit:
            return
        self.cache.activate_past_recording()
        self.feed(count)
        rejected = self.rng.randint(1, count - 1)
        self.log[-1] += f" {rejected} of {count}"
        self.cache.crop(-rejected)
        self.dense.crop(-rejected)
        self.cache.stop_past_recording()

    def rows(self, index: Tensor) -> None:
        """The rows changed."""
        self.batch = len(index)
        if self.start is not None:
            self.start = self.start[index]

    def do_reorder(self, length: int) -> None:
        """Beams."""
        index = torch.tensor([self.rng.randrange(self.batch) for _ in range(self.batch)])
        self.cache.reorder_cache(index)
        self.dense.reorder_cache(index)
        self.rows(index)

    def do_repeat(self, length: int) -> None:
        """Every row several times."""
        if self.batch > 3:
            return
        self.cache.batch_repeat_interleave(2)
        self.dense.batch_repeat_interleave(2)
        self.rows(torch.arange(self.batch).repeat_interleave(2))

    def do_select(self, length: int) -> None:
        """Some rows."""
        index = torch.tensor(self.rng.sample(range(self.batch), self.rng.randint(1, self.batch)))
        self.cache.batch_select_indices(index)
        self.dense.batch_select_indices(index)
        self.rows(index)

    def do_reset(self, length: int) -> None:
        """Begin anew."""
        self.cache.reset()
        self.forget()

    def do_copy(self, length: int) -> None:
        """Go on with a copy, and leave the other one something else."""
        other, self.cache = self.cache, copy.deepcopy(self.cache)
        if not self.limit:
            noise = torch.randn(self.batch, self.kv_heads, 3, self.dim).to(self.dtype)
            other.update(noise, noise, 0)

    def do_save(self, length: int) -> None:
        """Go on with what was written."""
        if self.kind == "static":
            return
        path = self.folder / f"{os.getpid()}.safetensors"
        self.cache.save(path)
        self.cache = VQCache.load(path, self.config)


def prepare(folder: Path) -> Try:
    """Nothing is needed."""

    @torch.no_grad()
    def attempt(rng: random.Random, number: int) -> str:
        life = Life(rng, folder)
        for _ in range(rng.randint(2, 14)):
            life.step()
            life.check()
        return life.kind

    return attempt
