"""Texts of a model's own: what it expects in them, against drawing token after token without a cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.calibration import own_texts
from anybit.calibration.gradients import load_whole
from anybit.calibration.own_texts import (
    OwnTexts,
    _drawn,
    _first_token,
    most_varied,
    write_texts,
)
from anybit.calibration.stats import ExpectedTokens
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
from anybit.methods import METHODS, sensitivity
from anybit.methods.anybit import OWN_TEXT_TOKENS, kinds_of_windows
from anybit.methods.method import Search
from anybit.progress import Advance
from tests.builders import VOCABULARY

TEXTS, SEED = 6, 5


def opened(folder: Path) -> StreamedModel:
    return StreamedModel(open_checkpoint(folder), torch.float32)


@torch.no_grad()
def drawn(model: torch.nn.Module, first: int, length: int) -> OwnTexts:
    torch.manual_seed(SEED)
    ids, chances = torch.full((TEXTS, 1), first), []
    for _ in range(length - 1):
        chances.append(model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1))
        sums, places = chances[-1].double().cumsum(-1), torch.rand(TEXTS, 1, dtype=torch.float64)
        chosen = [bisect_right(s.tolist(), float(at * s[-1])) for s, at in zip(sums, places)]
        ids = torch.cat([ids, torch.tensor(chosen)[:, None]], 1)
    p = torch.cat(chances)
    return OwnTexts(ids, ExpectedTokens(p.mean(0), (p * (1 - p)).mean(0)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_are_drawn_from_all_that_the_model_says(model_dir: Callable[[str], Path], family: str) -> None:
    streamed = opened(model_dir(family))
    model = load_whole(streamed)
    wishes = model.generation_config
    wishes.update(temperature=0.1, top_k=2, repetition_penalty=3.0, eos_token_id=list(range(VOCABULARY)))
    before = torch.get_rng_state()
    found = write_texts(streamed, TEXTS, 13, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.generation_config is wishes
    wanted = drawn(model, _first_token(model.config.get_text_config(), VOCABULARY), 13)
    assert torch.equal(found.tokens, wanted.tokens)
    probability, variance = found.expected.probability, found.expected.variance
    torch.testing.assert_close(probability, wanted.expected.probability, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(variance, wanted.expected.variance, rtol=1e-3, atol=1e-6)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    p = torch.tensor([[0.0, 0.5, 0.0, 0.125, 0.375, 0.0], [0.25, 0.0, 0.625, 0.0, 0.0, 0.125]])
    torch.manual_seed(SEED)
    drawn = _drawn(p.repeat(20_000, 1))
    assert drawn.shape == (40_000, 1)
    for own, row in zip(p, drawn.view(-1, 2).T):
        shares = row.bincount(minlength=6) / 20_000
        assert not bool(shares[own == 0].any())
        torch.testing.assert_close(shares, own, rtol=0, atol=0.015)  # four standard errors


def test_the_last_place_is_that_of_the_last_token_with_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, 1 - 2**-53, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "rand", last)
    p = torch.tensor([[0.3, 0.7, 0.0], [0.7, 1e-30, 0.0], [0.1, 0.2, 0.4]])
    assert _drawn(p).tolist() == [[1], [0], [2]]


def test_a_model_whose_logits_are_nan_writes_nothing() -> None:
    with pytest.raises(InputError, match="hold NaN or Inf in texts of its own"):
        _drawn(torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]))


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

    def counted(streamed: StreamedModel, texts: int, length: int, seed: int, advance: Advance) -> OwnTexts:
        asked.append((texts, length, seed))
        return write_texts(streamed, texts, length, seed, advance)

    monkeypatch.setattr(sensitivity, "write_texts", counted)
    options = METHODS["anybit"].options(own_texts=0.5, samples=3, seq_len=48, seed=SEED).resolve()
    tokens = torch.arange(3)[:, None].expand(3, 48)
    search = Search(opened(model_dir("llama")), tokens, {}, options, folder=tmp_path, vocabulary=True)
    found, again = sensitivity._with_own_texts(search), sensitivity._with_own_texts(search)
    assert asked == [(3, 48, SEED)]  # half as many again as the two that are taken
    assert found[1] is not None and again[1] is not None
    assert found[0].tokens is found[1].tokens and found[1].own_windows == 2
    assert torch.equal(found[1].tokens, again[1].tokens)
    assert torch.equal(found[1].expected.probability, again[1].expected.probability)
    assert torch.equal(found[1].expected.variance, again[1].expected.variance)
    assert found[0].folder == again[0].folder and found[0].folder.parent == tmp_path
    other = sensitivity._with_own_texts(replace(search, tokens=tokens + 1))[0]
    assert other.folder != found[0].folder  # gradients of other windows are other parts
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(sensitivity._with_own_texts(search)[0].tokens, found[0].tokens)
    sensitivity._with_own_texts(replace(search, tokens=tokens[:, :8]))
    assert asked[1:] == [(3, 48, SEED), (3, 8, SEED)]
    search = replace(search, options=replace(options, own_texts=0))
    assert sensitivity._with_own_texts(search) == (search, None)


@pytest.mark.parametrize(("samples", "seq_len"), [(20, 600), (17, 256), (1, 2000), (2, 2000), (5, 100)])
def test_a_share_of_the_windows_is_the_models_own(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, samples: int, seq_len: int
) -> None:
    asked: list[tuple[int, int]] = []

    def numbered(streamed: StreamedModel, texts: int, length: int, *_: Any) -> OwnTexts:
        asked.append((texts, length))
        nothing = torch.zeros(VOCABULARY)
        tokens = 1000 + torch.arange(length).expand(texts, length)  # a text begins with 1000
        return OwnTexts(tokens, ExpectedTokens(nothing, nothing))

    monkeypatch.setattr(sensitivity, "write_texts", numbered)
    options = METHODS["anybit"].options(own_texts=0.3, samples=20, seq_len=seq_len).resolve()
    tokens = torch.arange(samples)[:, None].expand(samples, seq_len)
    search, mixed = sensitivity._with_own_texts(Search(opened(model_dir("llama")), tokens, {}, options))
    windows, (taken, count) = search.tokens, kinds_of_windows(20, 0.3, samples)
    assert windows.shape == (taken + count, seq_len)
    assert (0 if mixed is None else mixed.own_windows) == count
    of_text, of_model = windows[:taken], windows[taken:]
    numbers = of_text[:, 0].tolist()
    assert len(set(numbers)) == taken and numbers[0] == 0
    assert torch.equal(of_text, tokens[numbers])
    if count:
        texts, length = asked[0]
        assert length == min(OWN_TEXT_TOKENS, seq_len)
        assert texts >= 1.5 * count * seq_len / length
        assert torch.equal(of_model, (1000 + torch.arange(seq_len) % length).expand(count, seq_len))


def test_texts_that_repeat_themselves_are_left_out() -> None:
    texts = torch.tensor([[5, 5, 5, 5], [1, 2, 3, 4], [1, 2, 1, 2], [4, 3, 2, 2]])
    assert most_varied(texts, 2).tolist() == [[1, 2, 3, 4], [4, 3, 2, 2]]
    assert most_varied(texts, 4).tolist() == texts.tolist()
    assert most_varied(torch.ones(3, 2), 1).shape == (1, 2)


def test_more_texts_than_are_written_together_are_all_counted(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_texts, "TOGETHER", 4)
    written: list[int] = []
    found = write_texts(opened(model_dir("llama")), TEXTS, 6, SEED, written.append)
    assert written == 5 * [4] + 5 * [2]
    assert found.tokens.shape == (TEXTS, 6)
    assert float(found.expected.probability.sum()) == pytest.approx(1, abs=1e-4)
