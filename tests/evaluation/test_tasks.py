"""Zero-shot tasks against brute force on tiny models."""

import builtins
import copy
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anybit.errors import InputError
from anybit.evaluation.measure import evaluate
from anybit.evaluation.tasks import _environment_kept, prepare, read_questions, run_prepared
from tests.evaluation.models import tiny_llama

PLAIN = {"query": "Question: red or blue?\n", "choices": ["red", "blue sky"], "gold": 1}
HELLASWAG = {
    "activity_label": "Ski [header]",
    "ctx_a": "He stands [title] there.",
    "ctx_b": "the man",
    "ctx": "He stands [title] there. the man",
    "endings": ["goes  home [substeps] now.", " falls."],
    "label": "1",
}


def run_tasks(model, tokenizer, tasks, *, batch_size=1, **given):
    return run_prepared(model, tokenizer, prepare(tasks, **given), batch_size=batch_size)


def write_tasks(folder: Path, **tasks: list) -> Path:
    for name, rows in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_prompts_are_those_of_lm_eval(tmp_path):
    write_tasks(tmp_path, a=[PLAIN, PLAIN | {"query": "Why?"}], b=[HELLASWAG])
    first, second = read_questions(tmp_path / "a.jsonl")
    assert first.query == "Question: red or blue?\nAnswer:"
    assert (first.choices, first.gold) == (("red", "blue sky"), 1)
    assert second.query == "Question: Why?\nAnswer:"
    (row,) = read_questions(tmp_path / "b.jsonl")
    utils = pytest.importorskip("lm_eval.tasks.hellaswag.utils", reason="lm-eval is not installed")
    whole = HELLASWAG["activity_label"] + ": " + HELLASWAG["ctx_a"] + " " + HELLASWAG["ctx_b"].capitalize()
    assert row.query == utils.preprocess(whole)
    assert list(row.choices) == [utils.preprocess(each) for each in HELLASWAG["endings"]]
    assert row.gold == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "x", "choices": ["a", "b"]}, "line 2 has neither query, choices, gold nor"),
        ([1], "line 2 has neither"),
        (PLAIN | {"choices": ["a"]}, "line 2: the choices should be a list of at least two strings"),
        (PLAIN | {"choices": "ab"}, "line 2: the choices"),
        (HELLASWAG | {"endings": None}, "line 2: the choices"),
        (PLAIN | {"gold": 2}, "line 2: the answer is 2; expected an index from 0 to 1"),
        (PLAIN | {"gold": -1}, "line 2: the answer is -1"),
        (PLAIN | {"gold": True}, "line 2: the answer is True"),
    ],
)
def test_faulty_questions_name_the_line(tmp_path, row, message):
    write_tasks(tmp_path, a=[PLAIN, row])
    with pytest.raises(InputError, match=message):
        read_questions(tmp_path / "a.jsonl")


def test_files_without_questions(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no question"):
        read_questions(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="line 1 is not valid JSON"):
        read_questions(tmp_path / "a.jsonl")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, 256 in all, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")


def byte_model() -> LlamaForCausalLM:
    model = tiny_llama(3, vocabulary=257)
    model.config.max_position_embeddings = 512
    return model


@torch.no_grad()
def choice_scores(model, tokenizer, question) -> tuple[list[float], list[float]]:
    """Log-likelihood of " choice" after the prompt, and the same per byte of the choice."""
    totals, means = [], []
    for choice in question.choices:
        context = tokenizer(question.query)["input_ids"]
        ids = context + tokenizer(" " + choice)["input_ids"]
        logs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        totals.append(float(sum(logs[i - 1, ids[i]] for i in range(len(context), len(ids)))))
        means.append(totals[-1] / len(choice.encode()))
    return totals, means


def test_scores_equal_brute_force_and_leave_no_trace(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    words = ["ash", "birch bark", "cedar", "dogwood tree", "elm", "fir needles"]
    plain = [
        {"query": f"tree {i}?", "choices": [words[i % 6], words[(i + 1) % 6], "x" * (i + 1)], "gold": i % 3}
        for i in range(8)
    ]
    swag = [
        HELLASWAG | {"ctx_b": f"she {word}", "endings": [word, words[i - 1]], "label": i % 2}
        for i, word in enumerate(words)
    ]
    write_tasks(tmp_path, trees=plain, swag=swag)
    model, tokenizer = byte_model(), byte_tokenizer()
    model.train()
    environment, state = dict(os.environ), (torch.get_rng_state(), np.random.get_state()[1].copy())
    before = copy.deepcopy(tokenizer.special_tokens_map)
    results = run_tasks(model, tokenizer, ["trees", "swag", "trees"], tasks_dir=tmp_path, batch_size=3)
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), state[0]) and (np.random.get_state()[1] == state[1]).all()
    assert model.training and tokenizer.special_tokens_map == before
    assert list(results) == ["trees", "swag"]
    model.eval()
    for name, found in results.items():
        questions = read_questions(tmp_path / f"{name}.jsonl")
        scores = [choice_scores(model, tokenizer, question) for question in questions]
        n = len(questions)
        for kind, metric in enumerate(("acc", "acc_norm")):
            right = sum(int(np.argmax(s[kind]) == q.gold) for s, q in zip(scores, questions))
            share = right / n
            assert found[metric] == pytest.approx(share), (name, metric)
            assert found[f"{metric}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
        assert found["n"] == n
        assert set(found) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "n"}
    json.dumps(results, allow_nan=False)


@pytest.mark.parametrize("limit", [1, 3, 99])
def test_limit_takes_the_first_questions(tmp_path, limit):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    write_tasks(tmp_path, a=[PLAIN] * 4 + [PLAIN | {"gold": 0}])
    result = run_tasks(byte_model(), byte_tokenizer(), ["a"], tasks_dir=tmp_path, limit=limit)["a"]
    assert result["n"] == min(limit, 5)
    assert result["acc"] in ((0.8, 0.2) if limit == 99 else (0.0, 1.0))
    assert ("acc_stderr" in result) == (limit > 1)


def test_environment_is_put_back(monkeypatch):
    """lm-eval sets HF_* variables when it is imported."""
    monkeypatch.setenv("HF_TEST_KEPT", "old")
    with _environment_kept():
        os.environ.update({"HF_TEST_KEPT": "new", "HF_TEST_ADDED": "new"})
    assert os.environ["HF_TEST_KEPT"] == "old" and "HF_TEST_ADDED" not in os.environ


def test_task_requests_that_cannot_be_met(tmp_path, monkeypatch):
    model, tokenizer = byte_model(), byte_tokenizer()
    write_tasks(tmp_path, a=[PLAIN], b=[PLAIN])
    for options, message in (({"limit": 0}, "limit 0"), ({"batch_size": 0}, "batch size 0")):
        with pytest.raises(InputError, match=message):
            run_tasks(model, tokenizer, ["a"], tasks_dir=tmp_path, **options)
    with pytest.raises(InputError, match="no task was named"):
        run_tasks(model, tokenizer, [], tasks_dir=tmp_path)
    real = builtins.__import__

    def without_lm_eval(name, *args, **kwargs):
        if name.startswith("lm_eval"):
            raise ImportError("No module named 'lm_eval'")
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_lm_eval)
        with pytest.raises(InputError, match=r"No module named 'lm_eval'\); install anybit\[eval\]"):
            run_tasks(model, tokenizer, ["a"], tasks_dir=tmp_path)
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    with pytest.raises(InputError, match=r"unknown task c; .* holds a, b"):
        run_tasks(model, tokenizer, ["a", "c"], tasks_dir=tmp_path)
    with pytest.raises(InputError, match=r"holds no \.jsonl file"):
        run_tasks(model, tokenizer, ["a"], tasks_dir=tmp_path / "none")


def test_tasks_are_checked_before_a_model_loads(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    write_tasks(tmp_path, a=[PLAIN])

    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("anybit.evaluation.measure.load", load)
    monkeypatch.setattr("anybit.evaluation.measure.load_tokenizer", load)
    monkeypatch.setattr("anybit.evaluation.measure.config_of", lambda model: LlamaConfig())
    with pytest.raises(InputError, match="unknown task b"):
        evaluate("any", tasks=("a", "b"), tasks_dir=tmp_path)
    for option in ({"tasks_dir": tmp_path}, {"limit": 3}):
        with pytest.raises(InputError, match=r"name some with tasks"):
            evaluate("any", **option)


def test_tasks_of_lm_eval_itself(monkeypatch):
    """Without a folder lm-eval's own list counts, and data that cannot be fetched end in a sentence."""
    library = pytest.importorskip("lm_eval.tasks", reason="lm-eval is not installed")

    class OfflineManager:
        all_tasks = ("piqa",)

        def load(self, specs):
            raise ConnectionError(f"no network for {specs}")

    monkeypatch.setattr(library, "TaskManager", OfflineManager)
    with pytest.raises(InputError, match="lm-eval has no task nosuchtask"):
        run_tasks(byte_model(), byte_tokenizer(), ["piqa", "nosuchtask"])
    with pytest.raises(InputError, match=r"data of piqa \(no network for \['piqa'\]\)"):
        run_tasks(byte_model(), byte_tokenizer(), ["piqa"])
