"""config.json with what Transformers' configuration classes add to it, for the families that the engine runs.

Older versions of Transformers wrote other names for rotary embeddings, and left out what later ones ask for. A field
that stands in every checkpoint of a family has no default here: without it the model is left to Transformers.
"""

from __future__ import annotations

from typing import Any

from anybit.config import Json
from anybit.engine.description import GEMMAS, Unsupported, check_family

_LLAMA = {
    "num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = {
    "num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2 = {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None, "tie_word_embeddings": False,
}  # fmt: skip
_SMOLLM3 = {
    "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
    "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "tie_word_embeddings": True,
}  # fmt: skip
DEFAULTS: dict[str, Json] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "smollm3": _SMOLLM3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
}
THETAS = {"smollm3": 2e6}  # of rotary embeddings, where they are not 10000
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4  # of Gemma 3
NULLABLE = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")  # whose null is no default
REACHING = ("llama3", "yarn")  # types of rotary embeddings that begin with what a model was trained on
PATTERN = 6  # every so manieth layer of Gemma 3 sees a whole text
LEGACY_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq")


def with_defaults(raw: Json) -> Json:
    """What Transformers makes of a config.json, as far as `describe` reads it.

    Args:
        raw: the file, of one of `FAMILIES`; its numbers are checked (`check_counts`).

    Raises:
        Unsupported: another family, or a value of another type than Transformers takes.
    """
    family = raw.get("model_type")
    check_family(family)
    try:
        return _completed(str(family), raw)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, Unsupported):
            raise
        raise Unsupported(f"its config.json is not what the engine reads: {error}") from error


def _completed(family: str, raw: Json) -> Json:
    defaults = DEFAULTS[family]
    for field, default in defaults.items():
        if field in raw and raw[field] is None and default is not None and field not in NULLABLE:
            raise Unsupported(f"its config.json says {field} = None, expected one such as {default!r}")
    config = defaults | {field: value for field, value in raw.items() if field not in LEGACY_ROPE}
    if family in ("qwen2", "qwen3") and not config["use_sliding_window"]:
        config["sliding_window"] = None
    if family == "smollm3" and config["no_rope_layers"] is None:
        interval = config["no_rope_layer_interval"]
        config["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(config["num_hidden_layers"])]
    if "layer_types" in defaults and config["layer_types"] is None:
        config["layer_types"] = _layer_types(family, config)
    types = config.get("layer_types")
    if types is not None and len(types) != config["num_hidden_layers"]:
        raise Unsupported(
            f"its config.json has {len(types)} layer_types for {config['num_hidden_layers']} layers"
        )
    config["rope_parameters"] = _ropes(family, raw, config)
    return config


def _layer_types(family: str, config: Json) -> list[str]:
    window = config["sliding_window"]

    def slides(layer: int) -> bool:
        if family in GEMMAS:
            pattern = config.get("sliding_window_pattern", PATTERN) if family == "gemma3_text" else 2
            return bool((layer + 1) % pattern)
        if family == "smollm3":
            return (
                bool(config["use_sliding_window"])
                and not config["no_rope_layers"][layer]
                and window is not None
            )
        return window is not None and layer >= config["max_window_layers"]

    kinds = ("full_attention", "sliding_attention")
    return [kinds[slides(layer)] for layer in range(config["num_hidden_layers"])]


def _ropes(family: str, raw: Json, config: Json) -> Json:
    """`rope_parameters` out of these, or out of what older versions wrote in their place."""
    scaling, given = raw.get("rope_scaling"), raw.get("rope_parameters")
    if family == "gemma3_text":
        kinds = ("full_attention", "sliding_attention")
        ropes = {kind: {"rope_type": "default"} for kind in kinds} if given is None else {**given}
        full, local = (dict(ropes.get(kind) or {"rope_type": "default"}) for kind in kinds)
        full |= scaling or {}
        full.setdefault("rope_theta", raw.get("rope_theta", GLOBAL_THETA))
        local.setdefault("rope_theta", raw.get("rope_local_base_freq", LOCAL_THETA))
        return {kind: _typed(rope, config) for kind, rope in zip(kinds, (full, local))}
    rope = dict(scaling or given or {})
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise Unsupported(f"its config.json has rope_parameters of its own for {nested[0]}")
    rope.setdefault("rope_theta", raw.get("rope_theta", THETAS.get(family, 1e4)))
    return _typed(rope, config)


def _typed(rope: Json, config: Json) -> Json:
    """With the fields that depend on its type."""
    kind: Any = rope.setdefault("rope_type", rope.get("type", "default"))
    if kind in REACHING:
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope
