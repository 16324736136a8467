"""Texts of a model's own: what it expects in them, against drawing token after token without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.calibration import own_texts
from anybit.calibration.gradients import load_whole
from anybit.calibration.own_texts import _first_token, expected_tokens
from anybit.calibration.stats import ExpectedTokens
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.methods import METHODS, sensitivity
from anybit.methods.anybit import OWN_TEXT_TOKENS
from anybit.methods.method import Search
from anybit.progress import Advance
from tests.builders import VOCABULARY

TEXTS, SEED = 6, 5


def opened(folder: Path) -> StreamedModel:
    return StreamedModel(open_checkpoint(folder), torch.float32)


@torch.no_grad()
def drawn(model: torch.nn.Module, first: int, length: int) -> ExpectedTokens:
    torch.manual_seed(SEED)
    ids, chances = torch.full((TEXTS, 1), first), []
    for _ in range(length):
        chances.append(model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1))
        ids = torch.cat([ids, torch.multinomial(chances[-1], 1)], 1)
    p = torch.cat(chances)
    return ExpectedTokens(p.mean(0), (p * (1 - p)).mean(0))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_probabilities_are_those_of_drawing_from_all_that_the_model_says(
    model_dir: Callable[[str], Path], family: str
) -> None:
    streamed = opened(model_dir(family))
    model = load_whole(streamed)
    wishes = model.generation_config
    wishes.update(temperature=0.1, top_k=2, repetition_penalty=3.0, eos_token_id=list(range(VOCABULARY)))
    before = torch.get_rng_state()
    found = expected_tokens(streamed, TEXTS, 12, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.generation_config is wishes
    expected = drawn(model, _first_token(model.config.get_text_config(), VOCABULARY), 12)
    torch.testing.assert_close(found.probability, expected.probability, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("bos", "eos", "first"),
    [(1, 2, 1), (0, 2, 0), (None, 2, 2), (None, [7, 2], 7), (None, None, 0), (90, 2, 2), (None, [], 0)],
)
def test_a_text_begins_with_what_the_model_is_used_to(
    bos: int | None, eos: int | list[int] | None, first: int
) -> None:
    assert _first_token(SimpleNamespace(bos_token_id=bos, eos_token_id=eos), 64) == first


def test_what_was_drawn_is_kept_with_the_other_statistics(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def counted(streamed: StreamedModel, texts: int, length: int, seed: int, advance: Advance) -> Any:
        asked.append((texts, length, seed))
        return expected_tokens(streamed, texts, length, seed, advance)

    monkeypatch.setattr(sensitivity, "expected_tokens", counted)
    options = METHODS["anybit"].options(own_texts=TEXTS, samples=1, seq_len=48, seed=SEED).resolve()
    tokens = torch.zeros(1, 48).long()
    search = Search(opened(model_dir("llama")), tokens, {}, options, folder=tmp_path, vocabulary=True)
    found, again = sensitivity._own_texts(search), sensitivity._own_texts(search)
    assert asked == [(TEXTS, OWN_TEXT_TOKENS, SEED)]
    assert found is not None
    assert again is not None
    assert torch.equal(found.probability, again.probability)
    assert torch.equal(found.variance, again.variance)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    sensitivity._own_texts(search)
    sensitivity._own_texts(replace(search, tokens=tokens[:, :8]))
    assert asked[1:] == [(TEXTS, OWN_TEXT_TOKENS, SEED), (TEXTS, 7, SEED)]
    assert sensitivity._own_texts(replace(search, vocabulary=False)) is None
    assert sensitivity._own_texts(replace(search, options=replace(options, own_texts=0))) is None


def test_more_texts_than_are_written_together_are_all_counted(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_texts, "TOGETHER", 4)
    written: list[int] = []
    found = expected_tokens(opened(model_dir("llama")), TEXTS, 5, SEED, written.append)
    assert written == 5 * [4] + 5 * [2]
    assert float(found.probability.sum()) == pytest.approx(1, abs=1e-4)
