"""An encoder inside Transformers, as what embeds texts.

An embedding is the mean of the last hidden states over the attention mask, or the state of the first token where
sentence-transformers' pooling file says so, divided by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from anybit.artifact.levels import Budget
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.files import POOLING, read_json, read_json_list
from anybit.config import Json
from anybit.engine.engine import Floats, Tokens
from anybit.errors import InputError, enough_memory
from anybit.loader import load, load_tokenizer, opened
from anybit.progress import SILENT, Silent

POOLINGS = ("mean", "cls")
MODES = {  # of sentence-transformers' pooling file, whose older form has switches
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode mean": "mean",
    "pooling_mode cls": "cls",
}
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, what is computed here
LENGTHS = "sentence_bert_config.json"  # sentence-transformers': the tokens that a text is cut to
SURELY = 2**31 - 1  # tokens that no text has
PROBE = (4, 11)  # tokens of texts that are embedded alone and together
APART = 1e-3  # coordinates of one text's embeddings may be apart; rounding puts them a thousandth of that


def pooling_of(folder: Path) -> str:
    """How a directory's model pools: "mean" or "cls"; the mean where nothing is said.

    Raises:
        InputError: another pooling, or modules behind it that are not computed here.
    """
    expected = str(Path(POOLING).parent)
    for kind, place in _modules(folder / "modules.json"):
        if kind == "Pooling" and place not in (expected, None):
            raise InputError(
                f"{folder / 'modules.json'} has the pooling in {place!r}, but only {expected} is read: move it there"
            )
    if not (folder / POOLING).is_file():
        return "mean"
    chosen = _modes(read_json(folder / POOLING))
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise InputError(
            f"{folder / POOLING} sets {' and '.join(chosen) or 'no pooling_mode'}: only one of "
            f"{' and '.join(POOLINGS)} is computed here"
        )
    return MODES[chosen[0]]


def _modes(config: Json) -> list[str]:
    """What a pooling file sets, in its own words."""
    if (named := config.get("pooling_mode")) is not None:
        return [f"pooling_mode {one!s:.40}" for one in (named if isinstance(named, list) else [named])]
    return sorted(key for key, value in config.items() if key.startswith("pooling_mode_") and value is True)


def _modules(path: Path) -> list[tuple[str, Any]]:
    """Kinds and folders of sentence-transformers' modules, of which none may change the embedding after the pooling."""
    if not path.is_file():
        return []
    try:
        kinds = [(str(m["type"]).rpartition(".")[2], m.get("path")) for m in read_json_list(path)]
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not sentence-transformers' list of modules: copy it again") from error
    for kind, _ in kinds:
        if kind not in MODULES:
            raise InputError(
                f"{path} puts a {kind} into the embedding, which is not computed here: only {', '.join(MODULES)} are"
            )
    return kinds


def pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """[n, hidden] of unit length from states [n, tokens, hidden] and their mask [n, tokens]."""
    if pooling == "cls":
        first = mask.argmax(1)  # padding may stand in front
        return torch.nn.functional.normalize(states[torch.arange(len(states)), first], dim=-1)
    weights = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


class Encoder:
    """A model that Transformers runs, and that embeds texts.

    Args:
        model: what to load, and at which of its levels: see `anybit.load`.
        pooling: "mean" or "cls"; default: what the model's files say, else the mean.
        context: most tokens of a text; default: what the model's files say.
        threads: PyTorch's; default: as they are.

    Raises:
        InputError: see `anybit.load` and `pooling_of`; a context beyond what the model reaches, or none that its files
            say; a model that embeds a text otherwise beside a longer one.
    """

    def __init__(
        self,
        model: str,
        codebook_precision: str = "fp16",
        *,
        pooling: str | None = None,
        context: int | None = None,
        threads: int | None = None,
        report: Silent = SILENT,
        **at: Unpack[Budget],
    ) -> None:
        folder = opened(model).path
        self.name = model
        self.pooling, self.pooled_by = _chosen(folder, pooling)
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads()
        self.tokenizer = load_tokenizer(model)
        self.model = load(model, codebook_precision=codebook_precision, report=report, **at)
        self.vocabulary: int = self.model.get_input_embeddings().num_embeddings
        self.widths = [level.bits for level in getattr(self.model, "levels", ())][-1:] or [16.0]
        self.context = self._reach(folder, context)
        padding = self.model.config.pad_token_id
        self._padding = 0 if padding is None else padding  # by which RoBERTa counts positions
        self.dimensions = self._probed()

    def _reach(self, folder: Path, context: int | None) -> int:
        """Tokens that a text may have."""
        limit = max_positions(self.model)
        if context is not None and limit is not None and context > limit:
            raise InputError(f"--context {context}: {self.name} reaches {limit} tokens")
        said: dict[str, Any] = {"model_max_length": self.tokenizer.model_max_length}
        if (folder / LENGTHS).is_file():
            said["max_seq_length"] = read_json(folder / LENGTHS).get("max_seq_length")
        special = self.tokenizer.num_special_tokens_to_add()
        lengths = {"--context": context} if context is not None else {"its positions": limit, **said}
        found = {name: length for name, length in lengths.items() if length is not None}
        for name, length in found.items():
            if not isinstance(length, int | float) or not length > special:
                raise InputError(
                    f"{self.name} is for texts of {length!r} tokens by {name}, but a number above the {special} "
                    "special ones is expected: give --context"
                )
        if (reached := min(found.values(), default=SURELY)) >= SURELY:
            raise InputError(f"{self.name} does not say how many tokens it reaches: give --context")
        return int(reached)

    def _probed(self) -> int:
        """Dimensions of an embedding; refuses a model whose embedding of a text depends on the padding behind it."""
        lengths = [min(count, self.context) for count in PROBE]
        texts = [7 * np.arange(1, count + 1, dtype=np.int32) % self.vocabulary for count in lengths]
        try:
            alone, together = np.concatenate([self.embed([text]) for text in texts]), self.embed(texts)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise InputError(
                f"{self.name} cannot be served: it takes no texts with a mask ({error})"
            ) from error
        apart = float(np.abs(alone - together).max())
        if apart > APART:  # not of NaN, which is said of each text
            raise InputError(
                f"{self.name} cannot be served: a text's embedding is another beside a longer text, by up to "
                f"{apart:.2g} in a coordinate"
            )
        return int(alone.shape[1])

    def embed(self, texts: Sequence[Tokens]) -> Floats:
        """Embeddings of unit length, float32 [texts, dimensions], of texts that are computed at once.

        Args:
            texts: token ids of each, at least one, special ones among them.

        Raises:
            InputError: memory is full.
        """
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), self._padding)
        mask = torch.zeros((len(texts), longest), dtype=torch.int64)
        for own, kept, text in zip(ids, mask, texts):
            own[: len(text)] = torch.from_numpy(text)
            kept[: len(text)] = 1
        with torch.inference_mode(), enough_memory("ask for shorter texts, or free some"):
            states = self.model(input_ids=ids, attention_mask=mask, return_dict=True).last_hidden_state
            made: Floats = pooled(states.double(), mask, self.pooling).float().numpy()
        return made


def _chosen(folder: Path, asked: str | None) -> tuple[str, str]:
    """The pooling, and by what it is chosen."""
    if asked is not None:
        if asked not in POOLINGS:
            raise InputError(f"--pooling {asked!r}: expected one of {', '.join(POOLINGS)}")
        _modules(folder / "modules.json")
        return asked, "by --pooling"
    found = pooling_of(folder)
    if (folder / POOLING).is_file():
        return found, f"by {POOLING}"
    return found, f"as there is no {POOLING} that says otherwise"
