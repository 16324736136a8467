"""Whether the engine with exact inputs says what Transformers says in float32: the same artifact, the same text."""

from __future__ import annotations

from typing import Any

import numpy as np

from anybit.bench.contenders import InTransformers, Native
from anybit.calibration.texts import read_text, token_ids
from anybit.config import Json
from anybit.engine.timing import far_apart
from anybit.errors import InputError
from anybit.loader import load_tokenizer

TOKENS = 256  # whose logits are compared
GREEDY = 64  # the last of them, which Transformers chose


def agreement(engine: Native, beside: InTransformers, bits: float, prompt: list[int]) -> Json:
    """How far logits are apart, in their spread (most minus least), and where greedy texts part.

    Args:
        prompt: as many tokens as `prompt_of` gives.

    Returns:
        `difference`, the largest; `equal`, the tokens until the first that the engine would not choose; `gap`, by how
        much the two best logits of Transformers differ there, in the spread (None: all are equal).
    """
    ids, logits = beside.greedy(bits, prompt, GREEDY)
    found = engine.engine.logits(ids, bits)
    spread = float(logits.max() - logits.min())
    behind = range(TOKENS - GREEDY - 1, TOKENS - 1)
    parts = next((i for i in behind if int(found[i].argmax()) != ids[i + 1]), None)
    gap = None
    if parts is not None:
        second, first = np.sort(logits[parts])[-2:]
        gap = float(first - second) / spread
    return {
        "difference": float(np.abs(found - logits).max()) / spread,
        "equal": GREEDY if parts is None else parts - behind[0],
        "gap": gap,
    }


def prompt_of(model: str, vocabulary: int) -> list[int]:
    """The beginning of a text; where the model has no tokenizer, token ids far apart.

    A text, as other tokens can be such that the rounding of float32 alone moves logits by a hundredth.
    """
    try:
        ids: list[int] = token_ids(load_tokenizer(model), read_text("builtin-eval")).tolist()
    except InputError:
        ids = far_apart(TOKENS - GREEDY, vocabulary)
    return ids[: TOKENS - GREEDY]


def agrees(found: Json, most: float) -> bool:
    """Whether logits are as near as that, and greedy texts part at most where two tokens are as good."""
    near = found["difference"] <= most
    return bool(near and (found["gap"] is None or found["gap"] <= 2 * found["difference"]))


def compared(contenders: Any) -> dict[float, tuple[Any, Any]]:
    """The pairs to compare, by width: the engine with exact inputs and a cache of 16 bits, and float32."""

    def of(engine: str, **how: Any) -> dict[float, Any]:
        wanted = {"engine": engine, "kv_bits": 16, **how}
        return {c.bits: c for c in contenders if wanted.items() <= c.about.items()}

    ours, theirs = of("anybit", precision="fp16"), of("Transformers", dtype="float32")
    return {bits: (ours[bits], theirs[bits]) for bits in ours if bits in theirs}
