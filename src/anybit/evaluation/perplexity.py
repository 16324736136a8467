"""Perplexity of a causal LM on a text, and how far it strays from the model it was made from.

Definition: non-overlapping windows of `seq_len` text tokens; a BOS token before each window if and only if
the tokenizer puts one before a text by default; a position is scored where its window holds the next token.
Perplexity is exp of the mean negative log-likelihood of all scored tokens. The tail shorter than a window is
left out. Divergence is KL(base ‖ model) per scored token, in nats.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import BaseModelOutputWithPast

from anybit.calibration.texts import default_bos
from anybit.checkpoint.architectures import max_positions
from anybit.checkpoint.files import unwritable, write_whole
from anybit.config import Json
from anybit.errors import InputError
from anybit.kernels.attention import QuickAttention

__all__ = ["PerplexityResult", "default_bos", "paired_bootstrap", "perplexity"]

CHUNK_ELEMENTS = 1 << 24  # logits turned to fp32 at a time: 64 MB, whatever the vocabulary
MAX_EXPONENT = 700.0  # exp of more overflows a double

BASE_KEYS = ("base_", "kld_", "top1_")  # how the keys begin that only a comparison has

Progress = Callable[[int, int], None]  # (windows done, windows in all)


@dataclass(frozen=True)
class PerplexityResult:
    """What was measured and on what. `None`: nothing was scored (or no base model was given)."""

    perplexity: float | None
    tokens: int  # scored positions, exactly
    seq_len: int  # text tokens per window
    windows: int
    tail_tokens: int  # text tokens left out because they do not fill a window
    bos: int | None  # id put before each window
    window_nll: tuple[float, ...]  # nats, summed over the scored positions of each window
    base_perplexity: float | None = None
    base_window_nll: tuple[float, ...] | None = None
    base_dtype: str | None = None
    kld_mean: float | None = None  # nats per scored token, as are the three below
    kld_median: float | None = None
    kld_p99: float | None = None
    kld_max: float | None = None
    top1_agreement: float | None = (
        None  # share of scored positions where both models rank the same token first
    )
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> Json:
        """JSON types only: without a base, its keys are absent; a figure that is not finite becomes None."""
        record = asdict(self)
        if self.base_window_nll is None:
            record = {key: value for key, value in record.items() if not key.startswith(BASE_KEYS)}
        return {key: _jsonable(value) for key, value in record.items()}


def perplexity(
    model: Any,
    tokens: torch.Tensor,
    *,
    seq_len: int,
    max_tokens: int | None = None,
    bos: int | None = None,
    base: Any = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Score the text `tokens` (int64 [T], no special tokens) with `model`, and against `base` if given.

    `max_tokens` limits the text tokens used. Models are Transformers causal LMs; they run in eval mode and
    are left in the mode they came in. Raises InputError for a text shorter than one window, a window longer
    than the model's positions, token ids outside its vocabulary, and logits that are NaN or infinite.
    """
    models = [model] if base is None else [model, base]
    body, notes = _window_length(models, seq_len, bos)
    windows, tail = _windows(tokens, body, max_tokens)
    _check_ids(models, windows, bos)
    if bos is not None:
        windows = torch.cat([torch.full((len(windows), 1), bos, dtype=torch.int64), windows], dim=1)
    elif body == 1:
        notes += ("a window of one token without BOS has nothing to score",)
    scores = _Scores()
    with _eval_mode(models), torch.no_grad(), QuickAttention():
        for i, window in enumerate(windows):
            _score_window(models, window, i, scores)
            if progress is not None:
                progress(i + 1, len(windows))
    count = len(windows) * (windows.shape[1] - 1)
    return PerplexityResult(
        perplexity=_perplexity(scores.nll, count),
        tokens=count,
        seq_len=body,
        windows=len(windows),
        tail_tokens=tail,
        bos=bos,
        window_nll=tuple(scores.nll),
        notes=notes,
        **({} if base is None else _base_figures(base, scores, count)),
    )


def paired_bootstrap(
    nll_a: Sequence[float],
    nll_b: Sequence[float],
    tokens: int | Sequence[int],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval (percentile bootstrap over windows) of log perplexity(a) - log perplexity(b).

    `nll_a`, `nll_b`: nats per window of two models on the same windows; `tokens`: scored positions of
    each (or of every) window. An interval that excludes 0 says that the models differ on this kind of text.
    """
    a, b = np.asarray(nll_a, dtype=np.float64), np.asarray(nll_b, dtype=np.float64)
    counts = (
        np.broadcast_to(np.asarray(tokens, dtype=np.float64), a.shape) if np.ndim(tokens) == 0 else tokens
    )
    counts = np.asarray(counts, dtype=np.float64)
    if not (len(a) == len(b) == len(counts)) or len(a) == 0:
        raise InputError(
            f"the bootstrap needs the same windows of both models; got {len(a)} and {len(b)} windows "
            f"and {len(counts)} token counts."
        )
    if resamples < 1 or not (counts > 0).all():
        raise InputError("the bootstrap needs at least one resample and scored tokens in every window.")
    rng = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for i in range(resamples):
        drawn = rng.integers(len(a), size=len(a))
        differences[i] = (a[drawn] - b[drawn]).sum() / counts[drawn].sum()
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


@dataclass
class _Scores:
    """What the loop over windows gathers."""

    nll: list[float] = field(default_factory=list)  # per window
    base_nll: list[float] = field(default_factory=list)
    kld: list[torch.Tensor] = field(default_factory=list)  # fp32 [positions] each
    same_top1: int = 0


def _window_length(models: Sequence[Any], seq_len: int, bos: int | None) -> tuple[int, tuple[str, ...]]:
    """Text tokens per window that leave room for BOS, and what to say about it."""
    if seq_len < 1:
        raise InputError(f"seq_len is {seq_len}; a window holds at least 1 token.")
    known = [n for n in map(max_positions, models) if n is not None]
    limit = min(known, default=None)
    if limit is not None and seq_len > limit:
        raise InputError(
            f"seq_len {seq_len} is longer than the {limit} positions of the model; use --seq-len {limit}."
        )
    if limit is None or bos is None or seq_len < limit:
        return seq_len, ()
    if seq_len == 1:
        raise InputError("the model has 1 position, which BOS takes; nothing can be scored with it.")
    return seq_len - 1, (f"windows carry {seq_len - 1} text tokens: BOS takes one of the {limit} positions",)


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _windows(tokens: torch.Tensor, body: int, max_tokens: int | None) -> tuple[torch.Tensor, int]:
    """int64 [windows, body] and the number of tokens left over."""
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise InputError(f"tokens are {tokens.dtype} {list(tokens.shape)}; expected int64 of one dimension.")
    used = len(tokens) if max_tokens is None else min(len(tokens), max_tokens)
    if used < body:
        cause = "the text has" if used == len(tokens) else "--max-tokens leaves"
        raise InputError(
            f"{cause} {used} tokens, fewer than one window of {body}; use a longer text or a smaller seq_len."
        )
    count = used // body
    return tokens[: count * body].reshape(count, body).cpu(), used - count * body


def _check_ids(models: Sequence[Any], windows: torch.Tensor, bos: int | None) -> None:
    low, high = int(windows.min()), int(windows.max())
    if bos is not None:
        low, high = min(low, bos), max(high, bos)
    for model in models:
        vocabulary = getattr(_text_config(model), "vocab_size", None)
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise InputError(
                f"token ids run from {low} to {high}, but the model's vocabulary has {vocabulary}; "
                f"use the tokenizer that belongs to the model."
            )


def _score_window(models: Sequence[Any], ids: torch.Tensor, window: int, scores: _Scores) -> None:
    """Score a window `ids` (int64 [L], BOS included), number `window` of the text."""
    if len(ids) == 1:
        scores.nll.append(0.0)
        scores.base_nll.extend([0.0] * (len(models) - 1))
        return
    logits = [_logits(model, ids) for model in models]  # [L, V] each, in the model's dtype
    if len(logits) > 1 and logits[0].shape != logits[1].shape:
        raise InputError(
            f"the model gives {logits[0].shape[-1]} logits and the base {logits[1].shape[-1]}; "
            f"the base must have the same vocabulary."
        )
    _score_logits([each[:-1] for each in logits], ids[1:], window, scores)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None].to(model.device), use_cache=False, return_dict=True).logits[0]


def _score_logits(
    logits: Sequence[torch.Tensor], targets: torch.Tensor, window: int, scores: _Scores
) -> None:
    """Add one window: `logits` [N, V] of the model (and of the base), `targets` int64 [N]."""
    nll = [0.0] * len(logits)
    step = max(1, CHUNK_ELEMENTS // logits[0].shape[-1])
    for at in range(0, len(targets), step):
        target = targets[at : at + step, None]  # [n, 1]
        logs = [_log_softmax(each[at : at + step], window, is_base=i > 0) for i, each in enumerate(logits)]
        for i, log in enumerate(logs):
            nll[i] -= float(log.gather(1, target.to(log.device)).double().sum())
        if len(logs) > 1:
            model, base = logs[0], logs[1].to(logs[0].device)
            scores.kld.append(_kl_divergence(base, model).cpu())
            scores.same_top1 += int((base.argmax(1) == model.argmax(1)).sum())
    scores.nll.append(nll[0])
    scores.base_nll.extend(nll[1:])


def _log_softmax(logits: torch.Tensor, window: int, is_base: bool) -> torch.Tensor:
    """fp32 [n, V]; a logit of -inf (a token ruled out) is allowed, NaN, +inf and rows of -inf are not."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    # one NaN or +inf makes its whole row NaN, so the largest entry of each row tells
    if bool(torch.isnan(logs.amax(dim=-1)).any()):
        name = "base model" if is_base else "model"
        raise InputError(
            f"the logits of the {name} are NaN or infinite in window {window} (counted from 0); "
            f"load it in float32 or check its weights."
        )
    return logs


def _kl_divergence(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """KL(base ‖ model) in nats per row, fp32 [n], of log-probabilities [n, V]."""
    p = base.exp()
    terms = torch.where(p > 0, p * (base - model), 0.0)  # 0·log 0 = 0
    return terms.sum(dim=-1).clamp_min(0.0)  # below 0 only by rounding


def _base_figures(base: Any, scores: _Scores, count: int) -> Json:
    figures: Json = {
        "base_perplexity": _perplexity(scores.base_nll, count),
        "base_window_nll": tuple(scores.base_nll),
        "base_dtype": str(base.dtype).removeprefix("torch."),
    }
    if count == 0:
        return figures
    kld = torch.cat(scores.kld).double().numpy()
    with np.errstate(invalid="ignore"):  # between two infinities there is no quantile: NaN
        median, p99 = np.quantile(kld, [0.5, 0.99])
    return figures | {
        "kld_mean": float(kld.mean()),
        "kld_median": float(median),
        "kld_p99": float(p99),
        "kld_max": float(kld.max()),
        "top1_agreement": scores.same_top1 / count,
    }


def _perplexity(nll: Sequence[float], count: int) -> float | None:
    if count == 0:
        return None
    mean = math.fsum(nll) / count
    return math.exp(mean) if mean < MAX_EXPONENT else math.inf


class _Recalled(BaseModelOutputWithPast):
    """Hidden states alone, whatever else the output of some architecture has."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def recalled(model: Any, folder: Path | None) -> Iterator[None]:
    """Keep a causal LM's last hidden states in `folder`, and take them from there when it sees the same tokens again.

    The head and whatever scales or caps its logits run as always: the logits are the same to the bit, at a fraction of
    the time. 4 bytes per token and channel of a float32 model. The folder must be of this model alone. A model that
    does not pass through its `base_model` (OPT) is computed each time.
    """
    body = getattr(model, "base_model", model)
    if folder is None or body is model:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    compute = body.forward

    def forward(*args: Any, **options: Any) -> Any:
        ids = args[0] if args else options["input_ids"]
        seen = f"{list(ids.shape)} {model.dtype}".encode() + ids.cpu().numpy().tobytes()
        file = folder / f"{hashlib.sha256(seen).hexdigest()[:32]}.safetensors"
        if file.exists():
            return _Recalled(last_hidden_state=load_file(file)["states"].to(ids.device))
        output = compute(*args, **options)
        states = {"states": output.last_hidden_state.contiguous()}
        try:
            write_whole(file, lambda unfinished: save_file(states, unfinished), mode=0o644)
        except (OSError, SafetensorError) as error:
            raise unwritable(file, error) from error
        return output

    body.forward = forward
    try:
        yield
    finally:
        del body.forward  # the class's own shows again


@contextmanager
def _eval_mode(models: Sequence[Any]) -> Iterator[None]:
    training = [(model, model.training) for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, was in training:
            model.train(was)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
