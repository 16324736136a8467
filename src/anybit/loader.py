"""Load a model of any kind, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

import anybit.integrations.transformers  # noqa: F401 - registers the quantizer
from anybit.artifact.reader import (
    check_width,
    choose_rung,
    inspect,
    is_artifact,
    open_artifact,
    refuse_unfinished,
)
from anybit.calibration import texts
from anybit.calibration.moments import load_whole
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.architectures import auto_class, build_options, is_encoder, max_positions
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.errors import InputError
from anybit.evaluation import embeddings
from anybit.evaluation import perplexity as evaluation
from anybit.formats.layout import QUANT_METHOD, at_width, stored_tensors
from anybit.kv_cache import check_kv_bits, quantized_attention
from anybit.layers import set_exact
from anybit.progress import SILENT, Silent

SEQ_LEN = 2048
CLOSE_BITS = 0.02  # average widths that are called the same
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str) -> None:
    """Refuse a device that a model cannot be put on here.

    Raises:
        InputError: neither cpu nor cuda, or cuda where PyTorch finds none.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}: expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda': PyTorch finds no CUDA here; use cpu")


def load(  # noqa: PLR0913 - mirrors the command's options
    model: str | Path,
    *,
    bits: float | None = None,
    bpw: float | None = None,
    size: int | str | None = None,
    exact: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
) -> Any:
    """A Transformers model, ready to run, from an artifact, an HF directory, a hub id or a `.gguf` file.

    Args:
        model: what to load; an artifact's headers, shapes and indices are checked first.
        bits: the width to run at: any average width of an artifact of the method `anybit`, one of those of
            `any-precision`. Nothing beyond it is read from disk. Without it all widths are loaded, and
            `model.set_bits(b)` changes the one that runs.
        bpw: of an artifact of the method `anybit`: the most stored bits per weight of the linear layers, instead.
        size: the same in bytes of all files but the tokenizer, or as text such as "110MB".
        exact: False runs codebooks by row (SqueezeLLM, Any-Precision) on the CPU faster, with inputs and centroids
            rounded to 8 bits; `model.set_exact(e)` changes it.
        dtype: what it computes in ("float32", "bfloat16", "float16"); stored codes and scales keep theirs.
        device: "cpu" or "cuda".
        report: where progress goes.

    Raises:
        InputError: see `artifact.open_artifact`, `checkpoint.open_checkpoint`; an unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_device(device)
    path = Path(model)
    refuse_unfinished(path)
    if is_artifact(path):
        quantization, checkpoint = open_artifact(path)
        found, rung = choose_rung(path, quantization, checkpoint, bits, bpw, size)
        if found is not None:
            served = bits is not None and rung is not None and bits - found.rungs[rung].bits <= CLOSE_BITS
            if rung in (None, found.present - 1) and not served and (note := found.note()):
                report.say(note)
            if bits is not None and rung is not None and not served:
                report.say(f"runs at {found.rungs[rung].bits:.2f} bits, the largest width up to {bits:g}")
            config = checkpoint.config
            config.quantization_config = {**quantization, "rung": found.present - 1 if rung is None else rung}
            made = _from_pretrained(path, dtype, checkpoint, config=config)
        elif bits is None:
            made = _from_pretrained(path, dtype, checkpoint)
        else:
            made = _at_width(path, quantization, checkpoint, bits, dtype)
        set_exact(made, exact)
        return made.eval().to(device)
    checkpoint = open_checkpoint(model)
    if checkpoint.gguf is None and is_artifact(checkpoint.path):  # from the hub
        at: dict[str, Any] = {"bits": bits, "bpw": bpw, "size": size}
        return load(checkpoint.path, **at, exact=exact, dtype=dtype, device=device, report=report)
    if (bits, bpw, size) != (None, None, None):
        raise InputError(
            f"{model} is no artifact of several widths: leave bits, bpw and size (--bits, ...) out"
        )
    if checkpoint.gguf is None:
        return _from_pretrained(checkpoint.path, dtype, checkpoint).eval().to(device)
    loaded = load_whole(StreamedModel(checkpoint, DTYPES[dtype]), report)
    return loaded.eval().to(device)


def _at_width(
    path: Path, quantization: dict[str, Any], checkpoint: Checkpoint, bits: float, dtype: str
) -> Any:
    """A nested artifact at one width; of its other planes and tables nothing is read."""
    stored = quantization["layers"]
    if len(check_width(path, stored, bits)) < 2:
        return _from_pretrained(path, dtype, checkpoint)
    layers = {name: at_width(layout, bits) for name, layout in stored.items()}
    wanted = {f"{n}.{f}": shape for n, x in layers.items() for f, (_, shape) in stored_tensors(x).items()}
    others = {f"{n}.{f}" for n, x in stored.items() for f in stored_tensors(x)} - wanted.keys()
    state = {
        name: checkpoint.read_beginning(name, wanted.get(name, checkpoint.shape(name)))
        for name in checkpoint.names()
        if name not in others
    }
    config = checkpoint.config
    config.quantization_config = {
        **quantization,
        "quant_method": QUANT_METHOD,
        "layers": layers,
        "bits": bits,
    }
    model = _from_pretrained(None, dtype, checkpoint, config=config, state_dict=state)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _from_pretrained(name: Path | None, dtype: str, checkpoint: Checkpoint, **given: Any) -> Any:
    """The model as Transformers loads it, refused where Transformers would make weights up.

    Raises:
        InputError: tensors that are missing or have another shape than config.json says; a config that
            describes no model.
    """
    path = checkpoint.path
    try:
        source = auto_class(checkpoint.config)
        if name is None:  # tensors are given: the Auto class would look for files
            source = source._model_mapping[type(given["config"])]
        model, found = source.from_pretrained(
            name,
            dtype=DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, in a sentence
            output_loading_info=True,
            **build_options(checkpoint.config, checkpoint.names()),
            **given,
        )
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{path} needs a package that is not installed: {_first_line(error)}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InputError(f"{path} does not fit into memory: give --dtype bfloat16, or free some") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # whatever an edited config.json makes Transformers and torch raise
        raise InputError(
            f"{path} does not load ({type(error).__name__}: {_first_line(error)}): "
            "its config.json or its files are damaged; copy it again"
        ) from error
    wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:
        raise InputError(
            f"{path} lacks {sorted(wrong)[0]} in the shape that its config.json asks for, and {len(wrong) - 1} "
            "more tensors: config.json and the weights do not belong together"
        )
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def config_of(model: str | Path) -> PreTrainedConfig:
    """The configuration of a model of any kind; see `load` for what is refused."""
    return _opened(model).config


def _opened(model: str | Path) -> Checkpoint:
    refuse_unfinished(Path(model))
    return open_artifact(Path(model))[1] if is_artifact(Path(model)) else open_checkpoint(model)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer that belongs to a model of any kind."""
    refuse_unfinished(Path(model))
    if is_artifact(Path(model)):
        try:
            return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"{model} has no usable tokenizer ({_first_line(error)}): copy the base model's tokenizer files"
            ) from error
    return open_checkpoint(model).tokenizer()


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
    exact: bool = True,
    kv_bits: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
) -> dict[str, Any]:
    """Perplexity of a model on a text, its divergence from `base`, and zero-shot tasks; of an encoder its embeddings.

    `text` is the built-in evaluation text by default; `bits`, `bpw`, `size` and `exact`: see `load`; `seq_len` is
    2048 by default, or what the model reaches. `base_cache` is a folder where what `base` computes is kept for the next
    model that is compared with it (see `evaluation.recalled`). With `kv_bits` below 16 (default: what the artifact asks
    for) attention reads nothing but quantized keys and values.

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
    if is_encoder(config_of(model)):
        unused = {
            "text": text,
            "max_tokens": max_tokens,
            "tasks": tasks,
            "tasks_dir": tasks_dir,
            "limit": limit,
            "bits": bits,
            "bpw": bpw,
            "size": size,
            "kv_bits": kv_bits,
        }
        _refuse_for_encoder(model, unused)
        return _evaluate_encoder(model, base, pairs, seq_len, dtype, device, report)
    if pairs is not None:
        raise InputError(
            f"{model} is a language model, not an encoder: pairs (--pairs) would be ignored; leave it out"
        )
    text = text or "builtin-eval"
    prepared: Any = None
    if tasks:  # before the models load: a mistake here must not cost the figures that come first
        from anybit.evaluation import tasks as lm_eval

        prepared = lm_eval.prepare(tasks, tasks_dir=tasks_dir, limit=limit)
    elif tasks_dir is not None or limit is not None:
        option = "tasks_dir" if tasks_dir is not None else "limit"
        raise InputError(f"{option} is for zero-shot tasks: name some with tasks (--tasks piqa,arc_easy)")
    tokenizer = load_tokenizer(model)
    content = texts.read_text(text)
    tokens = texts.token_ids(tokenizer, content)
    loaded = load(
        model, bits=bits, bpw=bpw, size=size, exact=exact, dtype=dtype, device=device, report=report
    )
    reference = load(base, dtype=dtype, device=device, report=report) if base is not None else None
    if seq_len is None:
        seq_len = min(SEQ_LEN, max_positions(loaded) or SEQ_LEN)
    advance: Any = None

    def progress(done: int, total: int) -> None:
        nonlocal advance
        advance = advance or report.task(f"perplexity on {text}", total)
        advance(1)

    kv_bits = getattr(loaded, "kv_bits", 16) if kv_bits is None else kv_bits
    with quantized_attention(loaded, kv_bits), evaluation.recalled(reference, base_cache):
        result = evaluation.perplexity(
            loaded,
            tokens,
            seq_len=seq_len,
            max_tokens=max_tokens,
            bos=texts.default_bos(tokenizer),
            base=reference,
            progress=progress,
        )
    for note in result.notes:
        report.say(note)
    figures = {"model": str(model), "text": text, **result.as_dict(), "dtype": dtype, "kv_bits": kv_bits}
    figures |= _stored(model, bits, bpw, size)
    if prepared is not None:
        with quantized_attention(loaded, kv_bits):
            figures["tasks"] = lm_eval.run_prepared(loaded, tokenizer, prepared, batch_size=8)
    return figures


def _stored(
    model: str | Path, bits: float | None = None, bpw: float | None = None, size: int | str | None = None
) -> dict[str, Any]:
    """What `evaluate` says of an artifact's size."""
    if not is_artifact(Path(model)):
        return {"bits_per_weight": None}
    made = inspect(Path(model), bits, bpw, size)
    keys = ("method", "bits", "bits_per_weight", "file_bits_per_weight", "size_bytes")
    return {key: made[key] for key in keys}


def _refuse_for_encoder(model: str | Path, options: dict[str, Any]) -> None:
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
) -> dict[str, Any]:
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
    pooling = embeddings.pooling_of(_opened(model).path)
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
