"""Text in, windows of tokens out: where calibration and evaluation text comes from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from anybit.checkpoint.tokenizer import encode
from anybit.config import Json
from anybit.errors import InputError

# name -> file in data/ beside this one; the halves share no document (data/SOURCE.md)
BUILTIN = {"builtin": "calibration.txt", "builtin-eval": "evaluation.txt"}
# what a text is for, by the name of the split that data sets have for it
CALIBRATION, EVALUATION = "train", "test"
# name -> (data set, config)
ALIASES = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
LONGEST = 100_000_000  # bytes of a calibration text, which is tokenized whole, in some fifty times its size
FILE_SUFFIXES = (".txt", ".jsonl", ".raw", ".tokens", ".md")


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Windows of tokens that the statistics are taken from, and where they come from."""

    tokens: torch.Tensor  # int64 [samples, seq_len]
    source: str  # as it was asked for
    sha256: str  # of the whole text in UTF-8
    requested: int  # samples asked for; `tokens` holds fewer where the text is too short
    seed: int
    own_windows: int = 0  # of the samples, the last ones: texts that the model wrote by itself

    def describe(self) -> Json:
        """What an artifact records of its calibration (plain JSON types): of a file only its name."""
        samples, seq_len = self.tokens.shape
        is_file = os.path.isfile(os.path.expanduser(self.source))
        return {
            "source": os.path.basename(self.source) if is_file else self.source,
            "sha256": self.sha256,
            "samples": samples,
            "seq_len": seq_len,
            "seed": self.seed,
            "requested": self.requested,
            "own_windows": self.own_windows,
        }


def check_source(source: str, split: str = EVALUATION) -> None:
    """Refuse a source that is clearly no text: a directory, a file that is not there. Hub data sets are not looked for.

    Raises:
        InputError: with what to give instead.
    """
    path = Path(os.path.expanduser(source))  # os.path answers for every string, Path raises for some
    if source in BUILTIN or os.path.isfile(path):
        return
    if os.path.isdir(path) and source:
        raise InputError(f"text source {source} is a directory; give a .txt or .jsonl file in it.")
    if path.suffix in FILE_SUFFIXES or source.startswith(("/", "./", "../", "~")) or not source:
        builtin = "builtin" if split == CALIBRATION else "builtin-eval"
        raise InputError(f"text file {source!r} does not exist; check the path, or use '{builtin}'.")


def read_text(source: str, split: str = EVALUATION, most: int | None = None) -> str:
    """The text behind `source`, as it is: line ends are not translated and lines are not joined.

    `source` is "builtin" or "builtin-eval" (the two halves of the text in this package), a file (`.jsonl`:
    field "text" of every line, documents joined by an empty line; anything else: plain UTF-8), or a hub data
    set as NAME[:CONFIG[:SPLIT]] or "wikitext2". `split` is used where the source names none.
    Raises InputError for what cannot be read, or is beyond `most` bytes, of which no more are read then.
    """
    check_source(source, split)
    if source in BUILTIN:
        data = resources.files("anybit.calibration").joinpath("data").joinpath(BUILTIN[source]).read_bytes()
        return data.decode("utf-8")
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):
        _check_size(path, most)
        return _read_jsonl(path) if path.suffix == ".jsonl" else read_utf8(path)
    return _read_hub(source, split, most)


def _check_size(path: Path, most: int | None) -> None:
    """Refuse a file of more than `most` bytes."""
    size, part = os.path.getsize(path), "head -n 10000" if path.suffix == ".jsonl" else "head -c 10MB"
    if most is not None and size > most:
        raise InputError(
            f"text file {path} has {size / 1e6:.0f} MB, and at most {most / 1e6:.0f} MB are tokenized; give a part of "
            f"it, such as `{part} {path}` prints."
        )


def default_bos(tokenizer: Any) -> int | None:
    """The id that `tokenizer` puts before every text by default, or None if it puts none."""
    plain = encode(tokenizer, "a", special=False)
    marked = encode(tokenizer, "a", special=True)
    added = len(marked) > len(plain) and marked[: len(plain)] != plain
    return marked[0] if added else None


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Tokens of the whole text, int64 [tokens], without any special token put around it.

    The text is never split before tokenization: no cut is safe for every tokenizer.
    """
    return torch.tensor(encode(tokenizer, text, special=False), dtype=torch.int64)


def calibration_set(tokenizer: Any, source: str, samples: int, seq_len: int, seed: int) -> CalibrationSet:
    """At most `samples` windows of `seq_len` tokens of the text behind `source`, in the order of the text.

    The windows do not overlap; where there are more than asked for, a generator seeded with `seed` picks
    among them. A token that the tokenizer puts before a text by default (BOS) begins each window, which
    stays `seq_len` long. Raises InputError for a text shorter than one window, or longer than `LONGEST`.
    """
    _check_request(samples, seq_len, seed)
    text = read_text(source, CALIBRATION, LONGEST)
    bos = default_bos(tokenizer) if seq_len > 1 else None  # a one-token window keeps its one text token
    body = seq_len - (bos is not None)
    ids = token_ids(tokenizer, text)
    if len(ids) < body:
        raise InputError(
            f"calibration text {source!r} has {len(ids)} tokens, fewer than one window of {body}; "
            f"give a longer text or a smaller --seq-len."
        )
    windows = ids[: len(ids) // body * body].reshape(-1, body)
    windows = windows[_pick(len(windows), samples, seed)]
    if bos is not None:
        windows = torch.cat([torch.full((len(windows), 1), bos, dtype=torch.int64), windows], dim=1)
    sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return CalibrationSet(windows.contiguous(), source, sha256, samples, seed)


def _check_request(samples: int, seq_len: int, seed: int) -> None:
    if samples < 1:
        raise InputError(f"samples is {samples}; at least 1 window of calibration text is needed.")
    if seq_len < 1:
        raise InputError(f"seq_len is {seq_len}; a window holds at least 1 token.")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed is {seed}; give a number from 0 to 2**63 - 1.")


def _pick(windows: int, samples: int, seed: int) -> torch.Tensor:
    """Ascending indices of `samples` of the windows, or of all of them: int64 [min(windows, samples)]."""
    if windows <= samples:
        return torch.arange(windows)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(windows, generator=generator)[:samples].sort().values


def read_utf8(path: Path) -> str:
    """A text file as it is. Raises InputError for what is not UTF-8 or cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start} cannot be read); convert it to plain UTF-8 first."
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the file's permissions.") from None


def _read_jsonl(path: Path) -> str:
    # split at line feeds only: str.splitlines would also cut at U+2028 and the like inside a document
    lines = read_utf8(path).split("\n")
    documents = [_document(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not documents:
        raise InputError(f'{path} has no lines; every line should be an object with a field "text".')
    return "\n\n".join(documents)


def _document(path: Path, number: int, line: str) -> str:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not valid JSON; each line should be one object.") from None
    if not isinstance(row, dict):
        raise InputError(f'{where} is a {type(row).__name__}; expected an object with a field "text".')
    return text_field(where, row)


def text_field(where: str, row: Mapping[str, Any], name: str = "text") -> str:
    """A string of a row; InputError says `where` it is missing or no Unicode text."""
    if name not in row:
        raise InputError(
            f'{where} has no field "{name}" (it has {sorted(row)}); rename the field that holds it.'
        )
    text = row[name]
    if not isinstance(text, str):
        raise InputError(f'{where}: field "{name}" is a {type(text).__name__}; expected a string.')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(
            f'{where}: field "{name}" holds half a surrogate pair; write it as valid Unicode.'
        ) from None
    return text


def _read_hub(source: str, split: str, most: int | None) -> str:
    """Text of a hub data set through the optional `datasets` package (cached data work offline)."""
    name, _, rest = source.partition(":")
    config, _, wanted = rest.partition(":")
    dataset, default_config = ALIASES.get(name, (name, None))
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"text source {source!r} is neither a file nor built in, and reading it as a hub data set needs "
            f"the package 'datasets'; install anybit[eval], or give a .txt or .jsonl file."
        ) from None
    try:
        rows = datasets.load_dataset(dataset, config or default_config, split=wanted or split)
    except Exception as error:  # the library raises dozens of types; all of them mean: no such text here
        raise InputError(
            f"text source {source!r} is neither a file nor a data set that can be loaded "
            f"({type(error).__name__}: {_first_line(error)}); check NAME:CONFIG:SPLIT and the network."
        ) from error
    where = f"data set {source}"
    texts: list[str] = []
    taken = 0
    for number, row in enumerate(rows):
        texts.append(text_field(f"{where}, row {number}", row))
        taken += len(texts[-1].encode())
        if most is not None and taken > most:
            raise InputError(
                f"{where} has more than the {most / 1e6:.0f} MB of text that are tokenized at most; give a part of it "
                f"as NAME:CONFIG:SPLIT, such as {name}:{config}:{wanted or split}[:{number // 10}]."
            )
    if dataset.rpartition("/")[2] == "wikitext":
        # its rows are the file's lines, where blank ones (" \n") became "": this is the file as it was
        return "".join(text or " \n" for text in texts)
    return "\n\n".join(texts)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
