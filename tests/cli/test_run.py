"""`anybit generate` and `anybit chat`."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from anybit.engine import pages
from anybit.generate import Generator, Say
from tests.cli.commands import Run, refused


@pytest.mark.slow
def test_generate_continues_the_prompt(run: Run, made: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ran = run("generate", made, "-p", "abc", "--max-new-tokens", "6")
    assert ran.code == 0 and ran.out.startswith("abc")
    assert run("generate", made, "-p", "abc", "--max-new-tokens", "6").out == ran.out, "greedy"
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
    assert ran.out.rstrip("\n") == tokenizer.decode(expected[0], skip_special_tokens=True).rstrip("\n")
    sampled = [run("generate", made, "-p", "abc", "--temperature", "2", "--seed", s).out for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    refused(run("generate", made, "-p", ""), "empty")
    refused(run("generate", made, "-p", "x" * 200), "200 tokens", "128")


def test_which_engine_runs_is_said(run: Run, made: Path) -> None:
    how = ("generate", made, "-p", "abc", "--max-new-tokens", "6", "--codebook-precision", "fp16")
    natively, inside = run(*how), run(*how, "--engine", "transformers")
    assert natively.out == inside.out
    assert "native engine: " in natively.err and "exact inputs" in natively.err
    assert "native engine" not in inside.err
    narrow = run(*how, "--kv-bits", "2")
    assert narrow.code == 0
    assert "runs inside Transformers: a KV-cache of 2 bits; the engine has 16, 8, 4" in narrow.err
    refused(run(*how, "--kv-bits", "2", "--engine", "native"), "does not run this", "2 bits")
    refused(run(*how, "--engine", "fast"), "expected one of auto, native, transformers")
    assert "dtype bfloat16 on cpu" in run(*how, "--dtype", "bfloat16").err
    native = run(*how, "--dtype", "bfloat16", "--engine", "native")
    refused(native, "does not run this: dtype bfloat16 on cpu (--dtype, --device)", "leave engine")


def test_what_the_engine_refuses_late_runs_inside_transformers(run: Run, made: Path, tmp_path: Path) -> None:
    """The model keeps its weights then."""
    how = ("-p", "abc", "--max-new-tokens", "6", "--codebook-precision", "fp16")
    shutil.copytree(made, tmp_path / "copy")
    (tmp_path / "copy/generation_config.json").write_text(json.dumps({"typical_p": 0.5, "eos_token_id": 1}))
    inside = run("generate", tmp_path / "copy", *how)
    assert "runs inside Transformers" in inside.err and "typical_p" in inside.err
    assert inside.code == 0 and inside.out.startswith("abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "free_memory", lambda: 0)
        without = run("generate", made, *how)
    assert "no memory for a KV-cache" in without.err
    assert without.out == run("generate", made, *how).out


def test_drawing(run: Run, made: Path) -> None:
    how = ("generate", made, "-p", "abc", "--max-new-tokens", "30", "--codebook-precision", "fp16")
    whole = run(*how).out
    stop = whole[6:8]
    cut = run(*how, "--stop", stop)
    assert cut.out.rstrip("\n") == "abc" + whole[3:].partition(stop)[0]
    refused(run(*how, "--stop", "x", "--engine", "transformers"), "--stop needs the native engine")
    assert run(*how, "--temperature", "1", "--top-k", "1").out == whole, "the likeliest alone"
    again = run(*how, "--repetition-penalty", "1.5")
    assert again.out == run(*how, "--repetition-penalty", "1.5", "--engine", "transformers").out != whole
    empty = run(*how, "--stop", "")
    refused(empty, "--stop is empty")
    assert empty.out == ""
    drawn = run(*how, "--temperature", "1", "--top-p", "2")
    refused(drawn, "top_p is 2.0, expected a number from 0 to 1")
    refused(run(*how, "--temperature", "-1"), "temperature")


@pytest.mark.parametrize("option", ["--top-k", "--top-p", "--min-p", "--seed"])
def test_options_of_drawing_need_a_temperature(run: Run, option: str) -> None:
    words = f"{option} would be ignored", "--temperature above 0"
    refused(run("generate", "nowhere", "-p", "abc", option, "1"), *words)
    refused(run("chat", "nowhere", option, "1", "--temperature", "0"), *words)


def test_chat_answers_line_by_line(run: Run, made: Path) -> None:
    once = run("chat", made, "--max-new-tokens", "4", stdin="hello\n")
    assert once.code == 0 and once.out.count("\n") >= 1
    again = run("chat", made, "--max-new-tokens", "4", stdin="hello\n/new\nhello\n\nnever read\n")
    assert again.out == once.out * 2, "/new forgets, an empty line ends"
    longer = run("chat", made, "--max-new-tokens", "4", stdin="hello\nhello\n/exit\n")
    assert longer.out.startswith(once.out)
    assert run("chat", made, stdin="").code == 0


def test_chat_goes_on_when_its_context_is_full(run: Run, made: Path) -> None:
    first = run("chat", made, "--max-new-tokens", "4", stdin="hello\n")
    stdin = "hello\n" + "x" * 200 + "\n/new\nhello\n"
    ran = run("chat", made, "--max-new-tokens", "4", stdin=stdin)
    assert ran.code == 0 and ran.out == first.out * 2
    assert ran.err.count("anybit:") == 1 and "128" in ran.err and "/new" in ran.err


def test_ctrl_c_stops_an_answer_or_the_chat(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def interrupted(self: Generator, ids: list[int], most: int, say: Say, **_: object) -> None:
        asked.append(self.tokenizer.decode(ids))
        say("of course")
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "generate", interrupted)
    ran = run("chat", made, stdin="one\ntwo\n")
    assert (ran.code, ran.out) == (0, "of course\n" * 2)
    assert asked[1].endswith("[user]one[assistant]of course[user]two[assistant]"), "what was said counts"
    assert run("generate", made, "-p", "x").code == 130

    class Prompt(io.StringIO):
        def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr(io, "StringIO", Prompt)
    assert run("chat", made).code == 130


def test_chat_needs_a_template(run: Run, model_copy: Callable[[str], Path]) -> None:
    model = model_copy("llama")
    (model / "chat_template.jinja").unlink()
    refused(run("chat", model, stdin="hello\n"), "no chat template", "anybit generate")
