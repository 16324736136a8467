"""`anybit generate` and `anybit chat`."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from anybit.generate import Echo, Generator
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

    def interrupted(self: Generator, ids: torch.Tensor, *options: object, streamer: Echo) -> None:
        asked.append(self.tokenizer.decode(ids[0]))
        streamer.put(ids)
        streamer.put(self.tokenizer("of course", return_tensors="pt").input_ids[0])
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
