"""Sampling against Transformers' own logits processors, in the order in which its `generate` builds them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from anybit.checkpoint.generation import DRAWING, IN_TRANSFORMERS, SAMPLED_BY_TRANSFORMERS
from anybit.engine.distribution import Distribution, Floats, kth_largest
from anybit.engine.sampling import RANGES, Sampler, Sampling
from anybit.errors import InputError
from tests.builders import config_of

PLAIN = Sampling(temperature=1.0)


# ---- the oracle


class OutputPenalties(LogitsProcessor):
    """Frequency and presence penalty as OpenAI defines them, token by token."""

    def __init__(self, output: Sequence[int], frequency: float, presence: float) -> None:
        self.counts, self.frequency, self.presence = Counter(output), frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in self.counts.items():
            scores[0, token] -= self.frequency * count
            scores[0, token] -= self.presence
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    """`generate`'s own choice of processors hangs on a model."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of("llama"))


def by_transformers(
    model: Any,
    values: Mapping[str, Any],
    logits: Floats,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    own: Sequence[LogitsProcessor] = (),
) -> Floats:
    """The probabilities that `generate` would draw from with a generation config of these values."""
    model.generation_config = GenerationConfig(**values)
    config, _ = model._prepare_generation_config(None)
    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(prompt), logits_processor=LogitsProcessorList(own), device="cpu"
    )
    with mock.patch(
        "torch.sort", partial(torch.sort, stable=True)
    ):  # else it's open which of equals top-p drops
        scores = processors(ids, torch.from_numpy(logits.copy())[None])[0]
    if not config.do_sample:
        return torch.nn.functional.one_hot(scores.argmax(), len(logits)).float().numpy()
    return torch.softmax(scores, -1).numpy()


def values_of(sampling: Sampling) -> dict[str, Any]:
    """The same as fields of a generation config."""
    values = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.logit_bias:
        values["sequence_bias"] = [[[token], bias] for token, bias in sampling.logit_bias.items()]
    return values


def at_a_bound(model: Any, sampling: Sampling, *rest: Any) -> bool:
    """Whether rounding alone decides whether a token is kept."""
    free = replace(sampling, top_p=1.0, min_p=0.0)
    likely = np.sort(by_transformers(model, values_of(free), *rest).astype(np.float64))
    sums = np.abs(np.cumsum(likely) - (1 - sampling.top_p))
    shares = np.abs(likely / likely[-1] - sampling.min_p)
    return bool((sampling.top_p < 1 and sums.min() < 2e-6) or (sampling.min_p and shares.min() < 1e-6))


@st.composite
def some_logits(draw: st.DrawFn) -> Floats:
    size = draw(st.sampled_from([10, 37, 513, 1025, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.3, 2.0, 8.0]))
    kind = draw(st.sampled_from(["plain", "ties", "peak", "masked"]))
    if kind == "ties":
        logits = np.round(logits)
    if kind == "peak":
        logits[rng.integers(size)] += 40
    if kind == "masked":
        logits[rng.permutation(size)[: size - 3]] = -np.inf
    return logits.astype(np.float32)


@st.composite
def some_sampling(draw: st.DrawFn, tokens: int) -> Sampling:
    of = st.sampled_from
    biases = st.dictionaries(st.integers(0, tokens - 1), of([-100.0, -2.5, 0.1, 3.0, 100.0]), max_size=4)
    return Sampling(
        temperature=draw(of([0.1, 0.7, 1.0, 1.9])),
        top_k=draw(of([0, 1, 3, 50, 4999, 6000])),
        top_p=draw(of([0.0, 0.05, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw(of([0.0, 0.01, 0.1, 0.7, 1.0])),
        repetition_penalty=draw(of([1.0, 1.3, 0.8])),
        presence_penalty=draw(of([0.0, 0.9, -1.1])),
        frequency_penalty=draw(of([0.0, 0.3, -0.2])),
        logit_bias=draw(biases),
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_distribution_is_that_of_transformers(model: Any, data: st.DataObject) -> None:
    logits = data.draw(some_logits())
    sampling = data.draw(some_sampling(len(logits)))
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=30)
    prompt, output = data.draw(ids.filter(bool)), data.draw(ids)
    own = [OutputPenalties(output, sampling.frequency_penalty, sampling.presence_penalty)]
    rest = (logits, prompt, output, own)
    assume(not at_a_bound(model, sampling, *rest))
    sampler = Sampler(sampling, len(logits), prompt)
    for token in output:
        feed(sampler, token)
    given_logits = logits.copy()
    found = sampler.probabilities(logits)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_transformers(model, values_of(sampling), *rest), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(logits, given_logits)


def feed(sampler: Sampler, token: int) -> None:
    """Have a sampler draw this token."""
    only = np.full(sampler.vocabulary, -np.inf, np.float32)
    only[token] = 0
    assert sampler.draw(only).token == token


# ---- ties, decided by hand and by Transformers


@pytest.mark.parametrize(
    ("logits", "changes", "kept"),
    [
        (
            [0.0] * 8,
            {"top_p": 0.75},
            [2, 3, 4, 5, 6, 7],
        ),  # a sum of exactly 1 - top_p is dropped, lowest ids first
        ([0.0] * 10, {"top_p": 0.9}, list(range(1, 10))),  # neither 0.1 nor 0.9 is a float
        ([0.0] * 8, {"top_p": 0.0}, [7]),
        ([1.0, 1.0, 3.0, 3.0], {"top_p": 0.0}, [3]),
        ([1.0, 0.0, 1.0, 2.0, 1.0], {"top_k": 2}, [0, 2, 3, 4]),  # ties at the k-th are kept
        ([0.0, math.log(0.5), 0.0], {"min_p": 0.5}, [0, 1, 2]),  # at the bound: kept
        ([0.0, -1.0, 0.0], {"min_p": 1.0}, [0, 2]),
        ([-math.inf, 0.0, -math.inf], {"top_k": 2, "top_p": 0.9}, [1]),
    ],
)
def test_ties(model: Any, logits: list[float], changes: dict[str, Any], kept: list[int]) -> None:
    scores, sampling = np.array(logits, np.float32), replace(PLAIN, **changes)
    found = Sampler(sampling, len(logits), []).probabilities(scores)
    expected = by_transformers(model, values_of(sampling), scores, [0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    assert np.flatnonzero(found).tolist() == kept


@pytest.mark.parametrize("size", [1000, 1024, 1025, 5000])
def test_ties_in_a_large_vocabulary(model: Any, size: int) -> None:
    """Above some size sums go by blocks; sums of powers of two are exact."""
    scores = np.where(np.arange(size) % 3, 0, -64).astype(np.float32)
    scores[np.flatnonzero(scores == 0)[512:]] = -64
    for top_p in (0.25, 0.5, 0.75, 0.998046875):
        sampling = replace(PLAIN, top_p=top_p)
        found = Sampler(sampling, size, []).probabilities(scores)
        expected = by_transformers(model, values_of(sampling), scores, [0])
        assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist()
        assert np.count_nonzero(found) == 512 * top_p


def test_scores_decide_where_probabilities_are_equal(model: Any) -> None:
    """Two scores that differ by less than float32 exponents of them do: top-p drops the lower one, not the first."""
    scores = np.array([6.0, np.nextafter(np.float32(0.01), np.float32(1)), 0.01, 6.0], np.float32)
    likely = np.sort(Sampler(PLAIN, 4, []).probabilities(scores))
    assert likely[0] == likely[1]
    sampling = replace(PLAIN, top_p=1 - 1.5 * float(likely[0]))
    found = Sampler(sampling, 4, []).probabilities(scores)
    expected = by_transformers(model, values_of(sampling), scores, [0])
    assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist() == [0, 1, 3]


def test_ties_that_the_division_by_the_temperature_makes(model: Any) -> None:
    lower = np.float32(1.95) + np.arange(100, dtype=np.float32) * np.float32(2**-20)
    higher = np.nextafter(lower, np.float32(2))
    equal = np.flatnonzero(lower / np.float32(1.9) == higher / np.float32(1.9))
    assert len(equal)
    scores = np.array([0.5, lower[equal[0]], higher[equal[0]]], np.float32)
    sampling = replace(PLAIN, top_k=1, temperature=1.9)
    found = Sampler(sampling, 3, []).probabilities(scores)
    assert (
        found.tolist() == by_transformers(model, values_of(sampling), scores, [0]).tolist() == [0, 0.5, 0.5]
    )


@pytest.mark.parametrize("size", [4, 4096])
def test_no_number_draws_a_token_of_probability_0(size: int) -> None:
    """Neither before the first token that can come, nor after the last, nor between two."""
    probabilities = np.zeros(size, np.float32)
    probabilities[[1, size - 2]] = 0.5
    drawn_from = Distribution(None, probabilities)
    numbers = [0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0), 1.0]
    assert [drawn_from.token(number) for number in numbers] == [1, 1, size - 2, size - 2, size - 2]


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 70_001])
@pytest.mark.parametrize("values", [3, 10**9])
def test_the_kth_largest_is_that_of_a_sort(size: int, values: int) -> None:
    scores = np.random.default_rng(size).integers(-values, values, size).astype(np.float32)
    scores[::7] = -np.inf
    for k in {1, 2, 50, 129, 1000, size}:
        if k <= size:
            assert kth_largest(scores, k) == np.sort(scores)[-k]


# ---- draws


def test_one_uniform_number_a_token_decides_by_the_inverse_of_the_distribution() -> None:
    rng = np.random.default_rng(5)
    for size in (10, 1024, 1025, 3000):
        sampler, numbers = Sampler(replace(PLAIN, seed=3), size, []), np.random.Generator(np.random.PCG64(3))
        for _ in range(50):
            logits = rng.standard_normal(size).astype(np.float32)
            sums = sampler.probabilities(logits).cumsum(dtype=np.float64)
            expected = np.flatnonzero(sums > numbers.random() * sums[-1])[0]
            assert sampler.draw(logits).token == expected


@pytest.mark.parametrize("size", [6, 2000])
def test_draws_have_the_frequencies_of_the_distribution(size: int) -> None:
    logits = np.full(size, -np.inf, np.float32)
    logits[:5], logits[-1] = np.log([0.4, 0.3, 0.15, 0.1, 0.04]), math.log(0.01)
    sampler, draws = Sampler(replace(PLAIN, seed=0), size, []), 20_000
    counts = Counter(sampler.draw(logits).token for _ in range(draws))
    for token, probability in enumerate(sampler.probabilities(logits).tolist()):
        sigma = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[token] - draws * probability) <= 4 * sigma


def some_text(sampler: Sampler, seed: int, tokens: int = 40) -> list[int]:
    rng = np.random.default_rng(seed)
    return [sampler.draw(rng.standard_normal(300).astype(np.float32)).token for _ in range(tokens)]


def test_the_same_seed_gives_the_same_text_alone_and_beside_others() -> None:
    """Even where a request between draws takes other numbers, and where this one turns greedy by a single choice."""
    options = replace(PLAIN, seed=11, top_k=20, repetition_penalty=1.2)
    alone = some_text(Sampler(options, 300, [1, 2]), seed=0)
    mine, other = Sampler(options, 300, [1, 2]), Sampler(replace(options, seed=12), 300, [1])
    rng, beside = np.random.default_rng(0), []
    for _ in range(40):
        logits = rng.standard_normal(300).astype(np.float32)
        other.draw(-logits)
        beside.append(mine.draw(logits).token)
    assert beside == alone
    assert some_text(Sampler(replace(options, seed=12), 300, [1, 2]), seed=0) != alone


def test_where_a_token_stands_decides_its_number_whatever_came_before() -> None:
    one, two = (Sampler(replace(PLAIN, seed=4, top_p=0.9), 300, []) for _ in range(2))
    feed(one, 7)
    some_text(two, seed=9, tokens=1)
    assert some_text(one, seed=1) == some_text(two, seed=1)


def test_no_seed_is_another_one_each_time() -> None:
    flat = np.zeros(10_000, np.float32)
    samplers = [Sampler(PLAIN, len(flat), []) for _ in range(2)]
    texts = [[sampler.draw(flat).token for _ in range(8)] for sampler in samplers]
    assert texts[0] != texts[1]


def test_greedy_is_the_first_of_the_likeliest() -> None:
    logits = np.array([0.5, 2.0, -3.0, 2.0], np.float32)
    sampler = Sampler(Sampling(), 4, [])
    assert sampler.draw(logits).token == 1
    assert sampler.probabilities(logits).tolist() == [0, 1, 0, 0]


# ---- penalties, computed by hand


def test_penalties_by_hand() -> None:
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={0: 1.0, 4: -math.inf},
    )
    sampler = Sampler(sampling, 6, prompt=[0, 1, 1, 99])  # of the embedding, but not of the head
    logits = np.array([3.0, -1.0, 2.2, 1.0, 50.0, 0.0], np.float32)
    # 0 is biased to 4, and halved as the prompt has it; 2 leads with 2.2
    assert sampler.draw(logits).token == 2
    # 2 is 2.2 / 2 - 0.25 - 0.5 = 0.35; 0 leads with 2
    assert sampler.draw(logits).token == 0
    # 0 is 2 - 0.25 - 0.5 = 1.25, above 3 with 1
    assert sampler.draw(logits).token == 0
    # 0 is 2 - 2 * 0.25 - 0.5 = 1, as much as 3: the first wins
    assert sampler.draw(logits).token == 0
    # 0 is 2 - 3 * 0.25 - 0.5 = 0.75
    assert sampler.draw(logits).token == 3


def test_many_tokens_are_counted() -> None:
    """More distinct ones than there is room for at first."""
    sampler = Sampler(Sampling(presence_penalty=2.0), 1000, [])
    logits = np.linspace(0, 1, 1000, dtype=np.float32)
    assert [sampler.draw(logits).token for _ in range(1000)] == list(range(999, -1, -1))


# ---- log-probabilities


@settings(max_examples=60, deadline=None)
@given(some_logits(), st.integers(0, 10), st.sampled_from([0.0, 0.7]))
def test_logprobs_are_those_of_the_model(logits: Floats, count: int, temperature: float) -> None:
    """Of logits as they come, whatever else is asked for."""
    sampling = Sampling(
        temperature, top_k=5, logit_bias={3: 2.0}, repetition_penalty=1.5, seed=0, logprobs=count
    )
    drawn = Sampler(sampling, len(logits), [1, 2, 3]).draw(logits)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    assert drawn.logprob == pytest.approx(expected[drawn.token].item(), abs=1e-5)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    assert [token for token, _ in drawn.top] == order
    assert [logprob for _, logprob in drawn.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_without_logprobs_none_are_reported() -> None:
    drawn = Sampler(Sampling(), 3, []).draw(np.zeros(3, np.float32))
    assert (drawn.token, drawn.logprob, drawn.top) == (0, None, ())


# ---- generation_config.json


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"do_sample": False, "temperature": 0.3, "top_k": 3},
        {"do_sample": None, "repetition_penalty": 1.4},
        {"do_sample": True},
        {"do_sample": True, "top_k": None, "temperature": None, "repetition_penalty": 1.05},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"do_sample": True, "typical_p": 1.0, "top_p": 1.0, "eos_token_id": [1, 2], "max_length": 99},
    ],
    ids=str,
)
def test_a_generation_config_means_what_it_means_to_transformers(model: Any, values: dict[str, Any]) -> None:
    logits = np.random.default_rng(2).standard_normal(200).astype(np.float32) * 3
    prompt = [int(logits.argmax()), 5]
    sampling = Sampling.from_generation_config(values)
    found = Sampler(sampling, 200, prompt).probabilities(logits)
    expected = by_transformers(model, values, logits, prompt)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_generation_config_with_what_the_engine_lacks_is_refused() -> None:
    with pytest.raises(InputError, match=r"typical_p 0\.9, which the native engine lacks"):
        Sampling.from_generation_config({"do_sample": True, "typical_p": 0.9})
    for values in ({"typical_p": 0.9}, {"top_h": 0.5}, {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.1}):
        assert Sampling.from_generation_config(values) == Sampling()  # greedy: it has no effect
        with pytest.raises(InputError, match="which the native engine lacks"):
            Sampling.from_generation_config(values | {"do_sample": True})


@pytest.mark.parametrize(
    "values",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3]]},
        {"suppress_tokens": [3]},
        {"begin_suppress_tokens": [3]},
        {"forced_bos_token_id": 3},
        {"forced_eos_token_id": 3},
        {"min_length": 5},
        {"min_new_tokens": 5},
        {"guidance_scale": 1.5},
        {"sequence_bias": [[[3], 1.0]]},
        {"exponential_decay_length_penalty": [5, 1.1]},
        {"watermarking_config": {"bias": 2.0}},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_what_the_engine_lacks_counts_for_the_likeliest_token_too(values: dict[str, Any]) -> None:
    (name,) = values
    for do_sample in (False, True):
        with pytest.raises(InputError, match=f"asks for {name} .*, which the native engine lacks"):
            Sampling.from_generation_config(values | {"do_sample": do_sample})


def test_what_changes_nothing_is_not_refused() -> None:
    neutral = {**IN_TRANSFORMERS, **SAMPLED_BY_TRANSFORMERS}
    for values in (neutral, dict.fromkeys(neutral)):
        assert Sampling.from_generation_config({**values, "do_sample": True, "top_k": 3}) == Sampling(
            temperature=1.0, top_k=3
        )


def test_values_of_a_file_are_as_good_as_those_of_a_request() -> None:
    shared = RANGES.keys() & DRAWING.keys()
    assert shared == {"top_k", "top_p", "min_p", "repetition_penalty"}
    assert {name: RANGES[name] for name in shared} == {name: DRAWING[name] for name in shared}


# ---- bad input


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"temperature": -0.1},
            "temperature is -0.1, expected a number from 1e-07 to 100000, or 0 for the likeliest",
        ),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": False}, "temperature is False"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": -1}, "top_k is -1, expected a whole number from 0"),
        ({"top_k": 2.0}, "top_k is 2.0, expected a whole number"),
        ({"top_p": 1.01}, "top_p is 1.01, expected a number from 0 to 1"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a number from 0.001 to 1000"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, expected a number from -2 to 2"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": True}, "logprobs is True"),
        (
            {"logit_bias": {7: 101.0}},
            "logit_bias of token 7 is 101.0, expected a number from -100 to 100, or -inf",
        ),
        ({"logit_bias": {7: math.nan}}, "logit_bias of token 7 is nan"),
        ({"logit_bias": [7]}, r"logit_bias is \[7\], expected a mapping"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Sampling(**values)


@pytest.mark.parametrize("token", [-1, 10, "3", True, 3.0])
def test_a_bias_of_no_token_is_refused(token: Any) -> None:
    with pytest.raises(InputError, match=f"logit_bias names token {token!r}, expected ids from 0 to 9"):
        Sampler(Sampling(logit_bias={token: 1.0}), 10, [])


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="logprobs is 11, but the vocabulary has 10 tokens"):
        Sampler(Sampling(logprobs=11), 10, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes", [{}, {"logit_bias": {3: -math.inf}}, {"top_k": 2, "repetition_penalty": 2.0}]
)
def test_logits_that_are_no_numbers_are_refused(
    temperature: float, bad: float, changes: dict[str, Any]
) -> None:
    logits = np.zeros(10, np.float32)
    logits[3] = bad
    sampler = Sampler(Sampling(temperature, **changes), 10, [3])
    with pytest.raises(InputError, match=r"the model's logits are not finite \(token 3: "):
        sampler.draw(logits)


def test_no_token_within_reach_is_refused() -> None:
    logits = np.array([-math.inf, 5.0], np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(InputError, match="no token is within reach"):
            Sampler(Sampling(temperature, logit_bias={1: -math.inf}), 2, []).draw(logits)


def test_logits_that_a_temperature_makes_infinite_are_refused() -> None:
    sampler = Sampler(Sampling(temperature=1e-7), 2, [])
    with pytest.raises(InputError, match=r"logits up to 1e\+35 cannot be divided by a temperature of 1e-07"):
        sampler.draw(np.array([1e35, 0], np.float32))
    assert sampler.draw(np.array([1e30, -1e38], np.float32)).token == 0


@pytest.mark.parametrize(
    "logits", [np.zeros(3, np.float32), np.zeros(4), np.zeros((1, 4), np.float32)], ids=repr
)
def test_logits_of_another_model_are_refused(logits: Any) -> None:
    with pytest.raises(InputError, match=r"expected float32 \(4,\)"):
        Sampler(Sampling(), 4, []).draw(logits)


def test_the_engine_needs_no_torch() -> None:
    code = "import sys, anybit.engine.sampling, anybit.engine.text; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
