"""What tests of `anybit bench decode` share: a tiny shape, and a program that stands for llama-bench."""

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
