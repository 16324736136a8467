"""Texts that a language model writes by itself, and which tokens it expects in them.

Calibration text is mostly of one kind, and what other kinds need is rare in it: the tokens of code in prose. The model
knows them. Drawn from its first token on, its texts are of the kinds that it was trained on. LLM-QAT (arXiv:2305.17888)
trains on such texts; here they are a part of the calibration text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from anybit.calibration.gradients import load_for_loss
from anybit.calibration.stats import ExpectedTokens
from anybit.calibration.streaming import StreamedModel
from anybit.errors import InputError
from anybit.kernels.attention import QuickAttention
from anybit.progress import Advance, ignore

TOGETHER = 128  # texts that are written side by side


@dataclass(frozen=True)
class OwnTexts:
    tokens: Tensor  # int64 [texts, length]; each begins like any text, see `_first_token`
    expected: ExpectedTokens  # over all places but the first


@dataclass(frozen=True)
class MixedWindows:
    """Calibration windows of which some are texts of the model's own."""

    tokens: Tensor  # int64 [samples, seq_len], its own last
    own_windows: int  # how many these are
    expected: ExpectedTokens


def write_texts(
    streamed: StreamedModel, texts: int, length: int, seed: int = 0, advance: Advance = ignore
) -> OwnTexts:
    """Have the model write so many texts of `length` tokens, drawn from all that it gives probability.

    Args:
        streamed: the model; materialised by this call.
        texts: at least 1, written `TOGETHER` at a time.
        length: at least 2; at most what the model's context holds.
        seed: of the draws.
        advance: called with the number of texts that have got a token more.

    Raises:
        InputError: logits that are not the head's output, or that are NaN or infinite.
    """
    model, device = load_for_loss(streamed), streamed.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    first = torch.full((texts, 1), _first_token(model.config.get_text_config(), vocabulary), device=device)
    probability, squared = (torch.zeros(vocabulary, device=device) for _ in range(2))

    def draw(_: Tensor, logits: Tensor) -> Tensor:
        """Leave nothing but the token that is drawn: sampling by `generate` draws a number for every logit."""
        p = logits.float().softmax(-1)
        probability.add_(p.sum(0))
        token = _drawn(p)
        squared.add_(p.square_().sum(0))
        advance(len(p))
        return p.zero_().scatter_(1, token, 1.0)

    greedy = GenerationConfig(do_sample=False, max_new_tokens=length - 1)
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, _asked(model, greedy), QuickAttention():
        torch.manual_seed(seed)
        written = [
            model.generate(part, greedy, LogitsProcessorList([draw]), attention_mask=torch.ones_like(part))
            for part in first.split(TOGETHER)
        ]
    places = texts * (length - 1)
    variance = (probability - squared).clamp(min=0)
    expected = ExpectedTokens((probability / places).cpu(), (variance / places).cpu())
    return OwnTexts(torch.cat(written).cpu(), expected)


def most_varied(texts: Tensor, count: int) -> Tensor:
    """Those `count` of texts [n, length] that have the most different tokens, in the order in which they are given.

    A small model that has begun to repeat itself seldom stops.
    """
    different = torch.tensor([len(text.unique()) for text in texts])
    return texts[different.argsort(descending=True, stable=True)[:count].sort().values]


def _first_token(config: Any, vocabulary: int) -> int:
    """What a text begins with: the token that the model expects there."""
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        found = found[0] if isinstance(found, list | tuple) and found else found
        if isinstance(found, int) and 0 <= found < vocabulary:
            return found
    return 0


def _drawn(p: Tensor) -> Tensor:
    """One column of each row, int64 [rows, 1], by the probabilities [rows, columns]: the inverse of their sums.

    In double precision a place is below the last sum, so what has no probability is not drawn.

    Raises:
        InputError: NaN among them.
    """
    sums = p.cumsum(-1, dtype=torch.float64)
    if not bool(sums[:, -1].isfinite().all()):
        raise InputError("the model's logits hold NaN or Inf in texts of its own; is the checkpoint intact?")
    place = torch.rand(len(p), 1, dtype=torch.float64, device=p.device) * sums[:, -1:]
    return torch.searchsorted(sums, place, right=True)


@contextmanager
def _asked(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Have `generate` do this alone: it would fill in what the model's own file asks for, and end texts early."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
