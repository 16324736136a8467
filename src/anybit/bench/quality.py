"""What the contenders of `anybit bench decode` make of a text: a rate says little where the quality is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from anybit.bench.contenders import Native
from anybit.bench.sources import Gguf, Source, state_of
from anybit.calibration import texts
from anybit.config import Json
from anybit.errors import InputError
from anybit.evaluation.native import NativeModel
from anybit.evaluation.perplexity import perplexity, recalled
from anybit.loader import config_of, load, load_tokenizer

QUALITY = "quality"  # the test's name
WINDOW, WINDOWS = 1024, 8  # tokens of a window, and how many there are


@dataclass(frozen=True)
class Text:
    """What is read, and the model that all others are made of, if divergences are wanted."""

    path: Path
    base: str | None = None

    def check(self, sources: Sequence[Source]) -> None:
        """Refuse what the models cannot be measured with.

        Raises:
            InputError: a text that is too short, a base of other sizes.
        """
        read = texts.read_text(str(self.path))
        for source in sources:
            count = len(texts.token_ids(load_tokenizer(source.name), read))
            if count < WINDOW * WINDOWS:
                raise InputError(
                    f"--text {self.path} has {count} tokens, expected {WINDOW * WINDOWS}: give a longer one"
                )
            if self.base is not None:
                config = config_of(self.base)
                sizes = config.hidden_size, config.num_hidden_layers, config.vocab_size
                if sizes != (*source.sizes, source.config.vocab_size):
                    raise InputError(
                        f"--base {self.base} is not what {source.name} was made of: it has other sizes"
                    )

    @property
    def state(self) -> Json:
        """What has to be the same for figures to be the same."""
        base = None if self.base is None else Path(self.base)
        there = base is not None and base.exists()
        return {"text": state_of(self.path), "base": state_of(base) if base and there else self.base}


def quality(
    found: Source,
    engines: Mapping[str, tuple[Native, float]],
    files: Sequence[Gguf],
    text: Text,
    threads: int,
) -> Json:
    """Perplexity of the engine at its widths and of files of peers, and with a base the mean KL divergence from it.

    Files are dequantized and run in float32: what a peer loses by rounding inputs is not counted against it.

    Args:
        found: whose tokenizer reads the text.
        engines: by names: the engine, and the width.
        files: of peers.
        text: what is read, and the base.
        threads: of PyTorch.
    """
    tokenizer = load_tokenizer(found.name)
    tokens = texts.token_ids(tokenizer, texts.read_text(str(text.path)))
    reference = None if text.base is None else load(text.base, dtype="float32")

    def measured(model: Any) -> Json:
        result = perplexity(
            model,
            tokens,
            seq_len=WINDOW,
            max_tokens=WINDOWS * WINDOW,
            bos=texts.default_bos(tokenizer),
            base=reference,
        )
        return {"perplexity": result.perplexity, "kld": result.kld_mean, "others": None}

    made, before = {}, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with TemporaryDirectory() as folder, recalled(reference, None if reference is None else Path(folder)):
            for name, (native, bits) in engines.items():
                made[name] = measured(NativeModel(native.engine, found.config, bits))
            for file in files:
                about = {"engine": "file", "file": file.path.name, "state": file.state}
                made[file.path.name] = about | measured(load(file.path, dtype="float32"))
    finally:
        torch.set_num_threads(before)
    return made
