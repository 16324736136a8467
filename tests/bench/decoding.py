"""What tests of `anybit bench decode` share: a tiny shape, and programs that stand for llama-bench and mistral.rs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from anybit.bench import decode, random_model, reading
from anybit.kernels import cpu

Json = dict[str, Any]
TINY = ("qwen3", {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64,
    "intermediate_size": 160, "vocab_size": 320, "max_position_embeddings": 512, "tie_word_embeddings": True,
})  # fmt: skip
# What llama-bench printed, but for the fields that nobody reads, as a program.
LLAMA_BENCH = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(json.dumps([{{
    "build_commit": "0c1e570", "model_type": "llama 256M Q4_0", "n_threads": 2, "type_k": "f16", "flash_attn": 0,
    "n_prompt": int(given["-p"]), "n_gen": int(given["-n"]), "n_depth": int(given["-d"]), "avg_ns": 136861894,
    "avg_ts": 116.906171, "stddev_ts": 0.0, "samples_ns": [136861894], "samples_ts": [116.906],
}}]))
"""

# What is used of the package mistralrs. Every text begins with a token of its own, and " a" is two tokens.
MISTRALRS = """
import json, os
from types import SimpleNamespace

class Which(SimpleNamespace):
    GGUF = SimpleNamespace

CompletionRequest = ChatCompletionRequest = SimpleNamespace

class Runner:
    def __init__(self, which, **settings):
        if "broken" in which.quantized_filename:
            raise ValueError("Tokenizer is missing required props")

    def tokenize_text(self, text, add_special_tokens, enable_thinking):
        return [0] * (add_special_tokens + len(text))

    def send_completion_request(self, request):
        threads = os.environ["RAYON_NUM_THREADS"]
        with open({log!r}, "a") as log:
            log.write(json.dumps([len(request.prompt) + 1, request.max_tokens, request.ignore_eos, threads]) + "\\n")
        used = dict(prompt_tokens=len(request.prompt) + 1, completion_tokens=min(request.max_tokens, {most}))
        return SimpleNamespace(usage=SimpleNamespace(**used, total_prompt_time_sec=0.5, total_completion_time_sec=0.25))

    def send_chat_completion_request(self, request):
        said = [("a", None)] * request.max_tokens + [("", "length")]
        for n, (text, finish) in enumerate(said):
            choice = SimpleNamespace(delta=SimpleNamespace(content=text), finish_reason=finish)
            used = SimpleNamespace(completion_tokens=request.max_tokens) if finish else None
            yield SimpleNamespace(choices=[choice], usage=used)
"""


def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape "tiny", little to read, and nobody else on the machine."""
    if not cpu.available():
        pytest.skip("the native extension is not built")
    monkeypatch.setitem(random_model.SHAPES, "tiny", TINY)
    monkeypatch.setattr(reading, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(decode, "others", lambda *_: 0.0)


def stand_in(folder: Path) -> Json:
    """A program that stands for llama-bench and notes its calls in "calls", and a file of the tiny shape."""
    program, log = folder / "llama-bench", folder / "calls"
    program.write_text(LLAMA_BENCH.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    return {"llama_bench": program, "ggufs": [gguf(folder / "tiny-Q4_0.gguf")]}


def mistralrs(folder: Path, most: int = 1000) -> Path:
    """An interpreter whose package mistralrs gives `most` tokens, and notes what it was asked in "asked"."""
    python, package = folder / "python", folder / "package"
    package.mkdir()
    (package / "mistralrs.py").write_text(MISTRALRS.format(log=str(folder / "asked"), most=most))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def gguf(path: Path, hidden: int = 64, untied: bool = False) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    names = ["token_embd.weight", "blk.0.attn_q.weight"] + ["output.weight"] * untied
    for name in names:
        writer.add_tensor(name, np.zeros((320, hidden), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
