"""Measure a model of any kind: perplexity, divergence from a base, zero-shot tasks; an encoder's embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from anybit.artifact.files import is_artifact
from anybit.artifact.sizes import inspect
from anybit.calibration import texts
from anybit.checkpoint.architectures import is_encoder, max_positions
from anybit.config import Json
from anybit.errors import InputError
from anybit.evaluation import embeddings
from anybit.evaluation import perplexity as evaluation
from anybit.kernels.dispatch import check_device
from anybit.kv_cache import check_kv_bits, quantized_attention
from anybit.loader import config_of, load, load_tokenizer, opened
from anybit.progress import SILENT, Silent

SEQ_LEN = 2048


def evaluate(  # noqa: PLR0913 - mirrors the command's options
    model: str | Path,
    *,
    text: str | None = None,
    pairs: Path | None = None,
    seq_len: int | None = None,
    max_tokens: int | None = None,
    base: str | Path | None = None,
    base_cache: Path | None = None,
    tasks: tuple[str, ...] = (),
    tasks_dir: Path | None = None,
    limit: int | None = None,
    bits: float | None = None,
    bpw: float | None = None,
    size: int | str | None = None,
    codebook_precision: str = "fp16",
    kv_bits: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
) -> Json:
    """Perplexity of a model on a text, its divergence from `base`, and zero-shot tasks; of an encoder its embeddings.

    `text` is the built-in evaluation text by default; `bits`, `bpw`, `size` and `codebook_precision`: see `load`;
    `seq_len` is 2048 by default, or what the model reaches. `base_cache` is a folder where what `base` computes is kept
    for the next model that is compared with it (see `evaluation.recalled`). With `kv_bits` below 16 (default: what the
    artifact asks for) attention reads nothing but quantized keys and values.

    An encoder's embeddings are compared with those of `base`, and with `pairs`, a file of sentence pairs with scores
    (see `embeddings.read_pairs`), by rank; `seq_len` then cuts sentences.

    Returns:
        JSON-able: `perplexity`, `tokens` (scored), `seq_len`, `bits_per_weight` (None for a model that is no
        artifact), with `base` `kld_mean`, `kld_p99`, `top1_agreement`, and with `tasks` a table of accuracies.
        Of an encoder: `sentences`, `pooling`, `bits_per_weight`, with `base` `cosine_mean` and `cosine_min`, with
        `pairs` `spearman`, and with both `base_spearman`.

    Raises:
        InputError: see `load`, `texts.read_text`, `evaluation.perplexity`, `lm_eval.prepare` and `embeddings`; options
            that this kind of model has no use for.
    """
    check_device(device)
    check_kv_bits(kv_bits)
    level: Json = {"bits": bits, "bpw": bpw, "size": size}
    if is_encoder(config_of(model)):
        of_tasks = {"tasks": tasks, "tasks_dir": tasks_dir, "limit": limit}
        of_text = {"text": text, "max_tokens": max_tokens}
        _refuse_for_encoder(model, of_text | of_tasks | level | {"kv_bits": kv_bits})
        return _evaluate_encoder(model, base, pairs, seq_len, dtype, device, report)
    if pairs is not None:
        raise InputError(
            f"{model} is a language model, not an encoder: pairs (--pairs) would be ignored; leave it out"
        )
    prepared = _prepared(tasks, tasks_dir, limit)
    text = text or "builtin-eval"
    tokenizer = load_tokenizer(model)
    tokens = texts.token_ids(tokenizer, texts.read_text(text))
    loaded = load(
        model, **level, codebook_precision=codebook_precision, dtype=dtype, device=device, report=report
    )
    reference = load(base, dtype=dtype, device=device, report=report) if base is not None else None
    if seq_len is None:
        seq_len = min(SEQ_LEN, max_positions(loaded) or SEQ_LEN)
    kv_bits = getattr(loaded, "kv_bits", 16) if kv_bits is None else kv_bits
    with quantized_attention(loaded, kv_bits), evaluation.recalled(reference, base_cache):
        result = evaluation.perplexity(
            loaded, tokens, seq_len=seq_len, max_tokens=max_tokens, bos=texts.default_bos(tokenizer),
            base=reference, progress=_counting(report, f"perplexity on {text}"),
        )  # fmt: skip
    for note in result.notes:
        report.say(note)
    figures = {"model": str(model), "text": text, **result.as_dict(), "dtype": dtype, "kv_bits": kv_bits}
    figures |= _stored(model, **level)
    if prepared is not None:
        from anybit.evaluation import tasks as lm_eval

        with quantized_attention(loaded, kv_bits):
            figures["tasks"] = lm_eval.run_prepared(loaded, tokenizer, prepared, batch_size=8)
    return figures


def _prepared(tasks: tuple[str, ...], tasks_dir: Path | None, limit: int | None) -> Any:
    """The zero-shot tasks, ready before any model loads: a mistake must not cost the figures that come first."""
    if tasks:
        from anybit.evaluation import tasks as lm_eval

        return lm_eval.prepare(tasks, tasks_dir=tasks_dir, limit=limit)
    if tasks_dir is not None or limit is not None:
        option = "tasks_dir" if tasks_dir is not None else "limit"
        raise InputError(f"{option} is for zero-shot tasks: name some with tasks (--tasks piqa,arc_easy)")
    return None


def _counting(report: Silent, title: str) -> evaluation.Progress:
    """A bar that appears with the first step, once the number of steps is known."""
    advance: Any = None

    def progress(done: int, total: int) -> None:
        nonlocal advance
        advance = advance or report.task(title, total)
        advance(1)

    return progress


def _stored(
    model: str | Path, bits: float | None = None, bpw: float | None = None, size: int | str | None = None
) -> Json:
    """What `evaluate` says of an artifact's size."""
    if not is_artifact(Path(model)):
        return {"bits_per_weight": None}
    made = inspect(Path(model), bits, bpw, size)
    keys = ("method", "bits", "bits_per_weight", "file_bits_per_weight", "size_bytes")
    return {key: made[key] for key in keys}


def _refuse_for_encoder(model: str | Path, options: Json) -> None:
    """Refuse options that only a language model has a use for."""
    for name, value in options.items():
        if value is not None and value != ():
            raise InputError(
                f"{model} is an encoder, and {name} (--{name.replace('_', '-')}) is for language models; its "
                "embeddings are compared with those of base (--base) and with the scores of pairs (--pairs)"
            )


def _evaluate_encoder(
    model: str | Path,
    base: str | Path | None,
    pairs: Path | None,
    seq_len: int | None,
    dtype: str,
    device: str,
    report: Silent,
) -> Json:
    """Embeddings against those of the base, and against the scores of pairs."""
    if base is None and pairs is None:
        raise InputError(
            f"{model} is an encoder: name the model to compare it with (--base), or sentence pairs (--pairs), or both"
        )
    if base is not None and not is_encoder(config_of(base)):
        raise InputError(f"{base} is no encoder: its embeddings cannot be compared with those of {model}")
    scored = None if pairs is None else embeddings.read_pairs(pairs)
    if scored is None:
        sentences = embeddings.sentences_of(texts.read_text("builtin-eval"))
    else:
        sentences = list(dict.fromkeys([*scored.first, *scored.second]))
    pooling = embeddings.pooling_of(opened(model).path)
    tokenizer = load_tokenizer(model)

    def embedded(source: str | Path) -> dict[str, Tensor]:
        loaded = load(source, dtype=dtype, device=device, report=report)
        advance = report.task(f"embeddings of {source}", len(sentences))
        made = embeddings.embed(
            loaded, tokenizer, sentences, pooling=pooling, seq_len=seq_len, advance=advance
        )
        return dict(zip(sentences, made))

    figures = {"model": str(model), "sentences": len(sentences), "pooling": pooling, "dtype": dtype}
    own = embedded(model)
    reference = None if base is None else embedded(base)
    if reference is not None:
        figures |= embeddings.compare(own, reference)
    if scored is not None:
        figures |= {"pairs": len(scored.scores), "spearman": embeddings.rank_correlation(own, scored)}
        if reference is not None:
            figures["base_spearman"] = embeddings.rank_correlation(reference, scored)
    return figures | _stored(model)
