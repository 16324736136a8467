"""Measure a model of any kind: perplexity, divergence from a base, zero-shot tasks; an encoder's embeddings."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from anybit.artifact.files import is_artifact
from anybit.artifact.levels import Budget
from anybit.artifact.sizes import inspect
from anybit.calibration import texts
from anybit.checkpoint.architectures import is_encoder, usual_window
from anybit.config import Json, check_kv_bits
from anybit.encoder import pooling_of
from anybit.engine.description import Unsupported, check_computes
from anybit.engine.engine import Engine
from anybit.engine.opening import check_engine, native_or_inside, refusal
from anybit.errors import InputError, enough_memory, refuse_unknown
from anybit.evaluation import embeddings
from anybit.evaluation import perplexity as evaluation
from anybit.evaluation.native import NativeModel
from anybit.kernels.dispatch import check_device
from anybit.kv_cache import quantized_attention
from anybit.loader import config_of, load, load_tokenizer, opened
from anybit.progress import SILENT, Silent

HOW = ("dtype", "device", "report")  # settings of `load`
# What to do where memory is full.
FULL = "use shorter windows (--seq-len), --dtype bfloat16, or a machine with more"


class Settings(Budget, total=False):
    """What `evaluate` takes besides the model, and of which level of an artifact: see `Budget`."""

    text: str | None  # a `.txt` or `.jsonl` file or a hub dataset; the built-in evaluation text by default
    pairs: Path | None  # of an encoder: sentence pairs with scores, see `embeddings.read_pairs`
    seq_len: int | None  # tokens of a window or a sentence; 2048 by default, or what the model reaches
    max_tokens: int | None  # most tokens of the text
    base: str | Path | None  # the model to compare with: by divergence, of an encoder by embeddings
    base_cache: Path | None  # folder that keeps what `base` computes for the next model, see `recalled`
    tasks: tuple[str, ...]  # zero-shot tasks
    tasks_dir: Path | None  # folder of their files; without it they are fetched
    limit: int | None  # questions of each
    kv_bits: int | None  # of the keys and values that attention reads; what the artifact asks for by default
    engine: str  # "auto", which is the native one where it runs the model, "native" or "transformers"
    threads: int | None  # of the native engine; None: what it finds
    codebook_precision: str  # this and what follows: see `load`
    dtype: str
    device: str
    report: Silent


OF_TEXT = ("text", "max_tokens", "tasks", "tasks_dir", "limit", "kv_bits", "engine", *Budget.__annotations__)


def evaluate(model: str | Path, **settings: Unpack[Settings]) -> Json:
    """Perplexity of a model on a text, its divergence from a base, and zero-shot tasks; of an encoder its embeddings.

    Args:
        model: what `load` takes.
        settings: see `Settings`.

    Returns:
        JSON-able: `perplexity`, `tokens` (scored), `seq_len`, `engine` (what computed it, and how), `bits_per_weight`
        (None for a model that is no artifact), with `base` `kld_mean`, `kld_p99`, `top1_agreement`, and with `tasks` a
        table of accuracies.
        Of an encoder: `sentences`, `pooling`, `bits_per_weight`, with `base` `cosine_mean` and `cosine_min`, with
        `pairs` `spearman`, and with both `base_spearman`.

    Raises:
        InputError: see `load`, `texts.read_text`, `evaluation.perplexity`, `lm_eval.prepare` and `embeddings`; options
            that this kind of model has no use for.
        TypeError: a setting that there is not.
    """
    refuse_unknown(settings, Settings)
    check_device(settings.get("device", "cpu"))
    check_kv_bits(settings.get("kv_bits"))
    check_engine(settings.get("engine", "auto"))
    if settings.get("engine") == "native":  # before anything is read
        try:
            _check_native(settings)
        except Unsupported as error:
            raise refusal(error) from error
    if is_encoder(config_of(model)):
        _refuse_for_encoder(model, settings)
        with enough_memory(FULL):
            return _evaluate_encoder(model, settings)
    if settings.get("pairs") is not None:
        raise InputError(
            f"{model} is a language model, not an encoder: pairs (--pairs) would be ignored; leave it out"
        )
    with enough_memory(FULL):
        return _evaluate_decoder(model, settings)


def _evaluate_decoder(model: str | Path, settings: Settings) -> Json:
    """Perplexity, divergence from the base, zero-shot tasks."""
    prepared = _prepared(settings.get("tasks", ()), settings.get("tasks_dir"), settings.get("limit"))
    text, report = settings.get("text") or "builtin-eval", settings.get("report", SILENT)
    tokenizer = load_tokenizer(model)
    tokens = texts.token_ids(tokenizer, texts.read_text(text))
    loaded, base = _loaded(model, tokenizer, settings), settings.get("base")
    natively = isinstance(loaded, NativeModel)
    reference = None if base is None else load(base, **_some(settings, *HOW))
    seq_len, kv_bits = settings.get("seq_len"), settings.get("kv_bits")
    if seq_len is None:
        seq_len = usual_window(loaded)
    kv_bits = getattr(loaded, "kv_bits", 16) if kv_bits is None else kv_bits
    with evaluation.recalled(reference, settings.get("base_cache")):
        result = score(
            loaded, tokenizer, tokens, f"perplexity on {text}", report, 16 if natively else kv_bits,
            seq_len=seq_len, max_tokens=settings.get("max_tokens"), base=reference,
        )  # fmt: skip
    dtype = settings.get("dtype", "float32")
    figures = {"model": str(model), "text": text, **result.as_dict(), "dtype": dtype, "kv_bits": kv_bits}
    figures["engine"] = loaded.engine.how() if natively else f"Transformers, {dtype}"
    figures |= _stored(model, settings)
    if prepared is not None:
        from anybit.evaluation import tasks as lm_eval

        with quantized_attention(loaded, kv_bits):
            figures["tasks"] = lm_eval.run_prepared(loaded, tokenizer, prepared, batch_size=8)
    return figures


class Windows(TypedDict, total=False):
    """What `score` reads, as `perplexity` takes it."""

    seq_len: Required[int]  # tokens of a window
    max_tokens: int | None  # most tokens of the text
    base: Any  # a loaded model


def score(
    loaded: Any,
    tokenizer: Any,
    tokens: Tensor,
    title: str,
    report: Silent = SILENT,
    kv_bits: int = 16,
    **windows: Unpack[Windows],
) -> evaluation.PerplexityResult:
    """Perplexity of a loaded model, at the level that it runs at, and its divergence from a base.

    Args:
        loaded: the model.
        tokenizer: says whether windows begin with BOS.
        tokens: int64 [T], of the text.
        title: of the progress.
        report: where progress and notes go.
        kv_bits: of the keys and values that attention reads.
        windows: see `Windows`.

    Raises:
        InputError: see `perplexity`.
    """
    bos, progress = texts.default_bos(tokenizer), _counting(report, title)
    with quantized_attention(loaded, kv_bits):
        result = evaluation.perplexity(loaded, tokens, bos=bos, progress=progress, **windows)
    for note in result.notes:
        report.say(note)
    return result


def _loaded(model: str | Path, tokenizer: Any, settings: Settings) -> Any:
    """The model on the native engine where that may and can run it, else inside Transformers, with a word why.

    Raises:
        InputError: see `load` and `native_or_inside`.
    """

    @cache
    def inside() -> Any:
        return load(model, **_some(settings, "codebook_precision", *HOW, *Budget.__annotations__))

    def natively() -> NativeModel:
        _check_native(settings)
        return _native(model, model if is_artifact(Path(model)) else inside(), tokenizer, settings)

    return native_or_inside(settings.get("engine", "auto"), natively, inside, settings.get("report", SILENT))


def _native(model: str | Path, weights: Any, tokenizer: Any, settings: Settings) -> NativeModel:
    """A model on the native engine, which reads its weights, or takes them from what `load` made.

    Raises:
        Unsupported: the engine does not run it.
    """
    threads = torch.get_num_threads()
    made = Engine(
        weights,
        tokenizer=tokenizer,
        kv_bits=settings.get("kv_bits"),
        codebook_precision=settings.get("codebook_precision", "fp16"),
        threads=settings.get("threads"),
        report=settings.get("report", SILENT),
        **_some(settings, *Budget.__annotations__),
    )
    settings.get("report", SILENT).say(made.how())
    if settings.get("base") is not None:  # which runs in PyTorch, in turns with the engine
        torch.set_num_threads(threads)
    return NativeModel(made, config_of(model))


def _check_native(settings: Settings) -> None:
    """Raise `Unsupported` for settings that the native engine has nothing for."""
    if settings.get("tasks"):
        raise Unsupported("zero-shot tasks (--tasks) need Transformers")
    check_computes(settings.get("dtype", "float32"), settings.get("device", "cpu"))


def _some(settings: Settings, *names: str) -> Any:
    """Those of the settings that are given."""
    return {name: value for name, value in settings.items() if name in names}


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


def _stored(model: str | Path, settings: Settings) -> Json:
    """What `evaluate` says of an artifact's size."""
    if not is_artifact(Path(model)):
        return {"bits_per_weight": None}
    made = inspect(Path(model), **_some(settings, *Budget.__annotations__))
    keys = ("method", "bits", "bits_per_weight", "file_bits_per_weight", "size_bytes")
    return {key: made[key] for key in keys}


def _refuse_for_encoder(model: str | Path, settings: Settings) -> None:
    """Refuse options that only a language model has a use for."""
    for name, value in _some(settings, *OF_TEXT).items():
        if value is not None and value != ():
            raise InputError(
                f"{model} is an encoder, and {name} (--{name.replace('_', '-')}) is for language models; its "
                "embeddings are compared with those of base (--base) and with the scores of pairs (--pairs)"
            )


def _evaluate_encoder(model: str | Path, settings: Settings) -> Json:
    """Embeddings against those of the base, and against the scores of pairs."""
    base, pairs = settings.get("base"), settings.get("pairs")
    report, seq_len = settings.get("report", SILENT), settings.get("seq_len")
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
    pooling = pooling_of(opened(model).path)
    tokenizer = load_tokenizer(model)

    def embedded(source: str | Path) -> dict[str, Tensor]:
        loaded = load(source, **_some(settings, "dtype", "device", "report"))
        advance = report.task(f"embeddings of {source}", len(sentences))
        made = embeddings.embed(
            loaded, tokenizer, sentences, pooling=pooling, seq_len=seq_len, advance=advance
        )
        return dict(zip(sentences, made))

    figures = {"model": str(model), "sentences": len(sentences), "pooling": pooling}
    figures["dtype"] = settings.get("dtype", "float32")
    own = embedded(model)
    reference = None if base is None else embedded(base)
    if reference is not None:
        figures |= embeddings.compare(own, reference)
    if scored is not None:
        figures |= {"pairs": len(scored.scores), "spearman": embeddings.rank_correlation(own, scored)}
        if reference is not None:
            figures["base_spearman"] = embeddings.rank_correlation(reference, scored)
    return figures | _stored(model, {})
