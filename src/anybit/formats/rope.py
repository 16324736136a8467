"""The frequencies of rotary position embeddings, from a configuration.

Rounded to float32 where `transformers.modeling_rope_utils` rounds: far in a text, the last bit of a frequency is a good
part of what float32 says of an angle. Types whose frequencies depend on a text's length are not here.
"""

from __future__ import annotations

import math

import numpy as np

from anybit.config import Json

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def frequencies(rope: Json, head_size: int, positions: int) -> tuple[np.ndarray, float]:
    """Angles per position, float32 [head_size // 2], and what cosines and sines are multiplied with.

    Args:
        rope: `rope_parameters` of a configuration, of one of `ROPE_TYPES`.
        head_size: even.
        positions: `max_position_embeddings`.

    Raises:
        KeyError: a parameter that the type needs is not there.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    periods = (float(rope["rope_theta"]) ** exponents.astype(np.float64)).astype(np.float32)
    angles = 1 / periods
    kind, scale = rope["rope_type"], 1.0
    if kind == "linear":
        angles = angles / np.float32(rope["factor"])
    elif kind == "llama3":
        angles = _llama3(rope, angles)
    elif kind == "yarn":
        angles, scale = _yarn(rope, periods, positions)
    return angles.astype(np.float32), scale


def reached(rope: Json, positions: int | None) -> int | None:
    """How many tokens a model reaches: what its configuration states, or what YaRN lengthens it to.

    Configurations often leave `max_position_embeddings` at what the model was trained on, and add YaRN's factor.
    Transformers computes any position then.

    Args:
        rope: `rope_parameters` of a configuration, or of each of its kinds of layers; what is no number lengthens
            nothing.
        positions: `max_position_embeddings`; None: it is not stated.
    """
    rope = rope.get("full_attention", rope)  # other layers see no more than their window
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
        return positions
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(trained, int | float):
        return positions
    length = float(factor) * float(trained)
    return max(positions or 0, round(length)) if math.isfinite(length) else positions


def _llama3(rope: Json, angles: np.ndarray) -> np.ndarray:
    """Slow rotations slower by `factor`, fast ones as they are, and a ramp between (Llama 3.1)."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], np.float32(rope["factor"])
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / angles)
    share = ((turns - low) / (high - low)).astype(np.float32)
    ramp = (1 - share) * angles / factor + share * angles
    return np.where(turns < low, angles / factor, np.where(turns > high, angles, ramp))


def _yarn(rope: Json, periods: np.ndarray, positions: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv:2309.00071, 3.2 to 3.4): the ramp is over the index of an angle."""
    size, trained = 2 * len(periods), rope["original_max_position_embeddings"]
    factor = rope.get("factor") or positions / trained

    def index_of(rotations: float) -> float:
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = index_of(rope.get("beta_fast") or 32), index_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    at = np.arange(len(periods), dtype=np.float32)
    share = np.clip((at - np.float32(first)) / np.float32(last - first or 0.001), 0, 1)
    return 1 / (np.float32(factor) * periods) * share + 1 / periods * (1 - share), _yarn_scale(rope, factor)


def _yarn_scale(rope: Json, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1

    of, all_of = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(of) / scale(all_of) if of and all_of else scale(1)
