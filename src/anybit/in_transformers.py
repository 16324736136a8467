"""A model inside Transformers, as what continues texts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Unpack

import torch
from transformers import GenerationConfig, TextStreamer

from anybit.artifact.levels import Budget
from anybit.checkpoint.architectures import is_encoder, max_positions
from anybit.checkpoint.generation import for_one_sequence
from anybit.config import Json
from anybit.errors import InputError, enough_memory
from anybit.kernels.gpu import cuda_graph
from anybit.kv_cache import CACHE, QuantizedCache, key_biases
from anybit.loader import config_of, load, load_tokenizer
from anybit.progress import SILENT, Silent

if TYPE_CHECKING:
    from anybit.generate import Drawing, Say

DRAWN_BY = ("temperature", "top_k", "top_p", "min_p")


class InTransformers:
    """A model that Transformers runs.

    Args:
        model: what to load, and how: see `anybit.load`.
        kv_bits: of the KV-cache; default: what the artifact asks for.
        threads: PyTorch's; default: as they are.

    Raises:
        InputError: see `anybit.load`; an encoder, or a model that has one.
    """

    def __init__(
        self,
        model: str,
        codebook_precision: str = "fp16",
        dtype: str = "float32",
        device: str = "cpu",
        *,
        kv_bits: int | None = None,
        threads: int | None = None,
        report: Silent = SILENT,
        **at: Unpack[Budget],
    ) -> None:
        config = config_of(model)
        if is_encoder(config):
            raise InputError(
                f"{model} is an encoder and cannot generate text; `anybit eval` measures its embeddings"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(
                f"{model} has an encoder, too, by its config.json (is_encoder_decoder), which anybit cannot run: "
                "use the config.json that belongs to its weights"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self.tokenizer = load_tokenizer(model)
        how: Json = {"codebook_precision": codebook_precision, "dtype": dtype, "device": device}
        self.model = load(model, **how, report=report, **at)
        self.vocabulary = getattr(self.model.config.get_text_config(), "vocab_size", None)
        stored = getattr(self.model, "generation_config", None)
        self.generation: Json = {} if stored is None else stored.to_dict()  # what came with the model
        kept = for_one_sequence(model, self.generation, self.vocabulary)
        self.model.generation_config = GenerationConfig(**kept)
        self.context = max_positions(self.model)
        self.kv_bits: int = getattr(self.model, "kv_bits", 16) if kv_bits is None else kv_bits

    def tokens(self, ids: list[int], room: int, drawing: Drawing, say: Say) -> list[int]:
        """At most so many new tokens after a prompt; their text is said as it is made."""
        sampling: Json = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if drawing.get("temperature", 0.0) > 0:
            sampling = {"do_sample": True} | {n: value for n, value in drawing.items() if n in DRAWN_BY}
        if "repetition_penalty" in drawing:
            sampling["repetition_penalty"] = drawing["repetition_penalty"]
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        on_gpu = self.model.device.type == "cuda"
        with ExitStack() as stack:
            stack.enter_context(enough_memory("shorten the prompt, or ask for fewer tokens"))
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.no_grad())
            torch.manual_seed(drawing.get("seed", 0))
            if self.kv_bits != 16:
                sampling[CACHE] = QuantizedCache(self.model.config, self.kv_bits, key_biases(self.model))
            elif on_gpu and cuda_graph.fits(self.model.config):
                make_cache = stack.enter_context(cuda_graph.graphed(self.model))
                sampling |= {CACHE: make_cache(len(ids) + room), "disable_compile": True}
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=room,
                pad_token_id=end if pad is None else pad,
                streamer=_Streamer(self.tokenizer, say),
                **sampling,
            )
        made: list[int] = output[0, len(ids) :].tolist()
        return made


class _Streamer(TextStreamer):
    """Says the text of tokens as they come."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._say(text)
