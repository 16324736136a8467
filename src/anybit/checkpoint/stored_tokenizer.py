"""tokenizer.json and what lies beside it, without Transformers: what text in and text out need of a tokenizer.

Transformers builds some tokenizers anew, by rules of their class, whatever tokenizer.json says. Those are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from anybit.checkpoint.files import TEMPLATES, check_files, read_json
from anybit.config import Json
from anybit.errors import InputError

# Classes that take tokenizer.json as it is, and one that normalizes besides, whatever the file says.
AS_STORED = ("TokenizersBackend", "PreTrainedTokenizerFast")
NORMALIZING = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What of tokenizer_config.json would change tokens, where it is set.
CHANGING = (
    *("add_bos_token", "add_eos_token", "split_special_tokens", "add_prefix_space"),
    *("auto_map", "extra_special_tokens"),
)
TEMPLATE = "chat_template.jinja"
LONGEST = 1 << 20  # bytes of a template


class StoredTokenizer:
    """As much of the interface of Transformers' tokenizers as anybit uses, with their results."""

    def __init__(self, backend: Tokenizer, special: dict[str, str], template: str | None) -> None:
        self.backend_tokenizer, self.chat_template = backend, template
        self.special_tokens_map = special  # texts by role, such as "eos_token"

    @staticmethod
    def read(folder: Path) -> StoredTokenizer | None:
        """The tokenizer of a folder; None where only Transformers knows what it is.

        Raises:
            InputError: a file that cannot be read.
        """
        if not all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return None
        check_files(folder)
        config, template = read_json(folder / "tokenizer_config.json"), _template(folder)
        template = config.get("chat_template") if template is None else template
        known = config.get("tokenizer_class") in (*AS_STORED, *NORMALIZING)
        plain = isinstance(template, str | None) and not (folder / TEMPLATES).exists()
        if not known or not plain or any(config.get(name) for name in CHANGING):
            return None
        try:
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library has no class for it; Transformers says what is wrong
            return None
        special = _special(config)
        if not _has_all(backend, config, special):
            return None
        backend.no_truncation()
        backend.no_padding()
        if config["tokenizer_class"] in NORMALIZING:
            backend.normalizer = NFC()
        return StoredTokenizer(backend, special, template)

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        """Token ids of a text."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def get_chat_template(self, tools: Any = None) -> str | None:
        """The one that there is, with tools or without."""
        return self.chat_template

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    def _id(self, role: str) -> int | None:
        text = self.special_tokens_map.get(role)
        found: Any = None if text is None else self.backend_tokenizer.token_to_id(text)
        return None if found is None else int(found)


def _special(config: Json) -> dict[str, str]:
    """Texts of the special tokens by role; a token is a text, or an object with its `content`."""
    found = {role: config.get(role) for role in SPECIAL}
    texts = {role: of.get("content") if isinstance(of, dict) else of for role, of in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _has_all(backend: Tokenizer, config: Json, special: dict[str, str]) -> bool:
    """Whether a tokenizer has the tokens that its configuration names, and knows which are special."""
    held = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    named: Any = config.get("added_tokens_decoder", {})
    further = config.get("additional_special_tokens") or []
    if "eos_token" not in special or not isinstance(named, dict) or not isinstance(further, list):
        return False
    wanted = dict.fromkeys((*special.values(), *map(str, further)), True)
    for token in named.values():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            return False
        wanted[token["content"]] = bool(token.get("special")) or wanted.get(token["content"], False)
    return all(held.get(text) == flag for text, flag in wanted.items())


def _template(folder: Path) -> str | None:
    """The chat template of a folder that is a file of its own.

    Raises:
        InputError: it is too long, or no text.
    """
    path = folder / TEMPLATE
    if not path.is_file():
        return None
    data = path.read_bytes()
    if len(data) > LONGEST:
        raise InputError(f"{path} has {len(data)} bytes, but {LONGEST} is the limit.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not valid UTF-8: copy the file again") from error
