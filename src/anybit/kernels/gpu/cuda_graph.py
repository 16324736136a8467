"""A decode step as a CUDA graph: it has hundreds of kernels, many of which take less time than their launches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

WARM_UP = 2  # calls before a capture: they compile kernels and fill PyTorch's pools

Step = Callable[[], Tensor]


def fits(config: PreTrainedConfig) -> bool:
    """Whether a model's steps are the same computation every time.

    Windows that slide are moved by Python, and so are rotary embeddings that depend on how long a sequence is.
    """
    if any(kind in json.dumps(config.to_dict(), default=str) for kind in ('"longrope"', '"dynamic"')):
        return False
    return all(type(layer) is StaticLayer for layer in StaticCache(config=config, max_cache_len=1).layers)


def capture(step: Step) -> Step:
    """The same computation on the same memory, replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@contextmanager
def graphed(model: PreTrainedModel, capture: Callable[[Step], Step] = capture) -> Iterator[Any]:
    """Let `generate` with the cache that this yields replay a graph for every step of one token a sequence.

    The graph is made at the first such step, for its batch; what else the model is called with runs as ever.

    Args:
        model: a decoder that `fits`; its sequences have no padding.
        capture: what makes a graph; for tests.

    Yields:
        a function that makes the cache of up to so many tokens: `make(tokens)`.
    """
    forward = model.forward
    caches: list[StaticCache] = []

    def make(tokens: int) -> StaticCache:
        caches[:] = [StaticCache(config=model.config, max_cache_len=tokens)]
        steps.clear()
        return caches[0]

    steps: dict[int, tuple[Tensor, Step]] = {}  # by batch: the tokens that a step reads, and the step

    @wraps(forward)  # `generate` looks at what it takes
    def run(input_ids: Tensor | None = None, **rest: Any) -> Any:
        # By its value: "cache" since Transformers 5.24, "past_key_values" before.
        ours = {name: value for name, value in rest.items() if caches and value is caches[0]}
        begun = ours and caches[0].layers[0].is_initialized
        if input_ids is None or input_ids.shape[1] != 1 or not begun:
            return forward(input_ids=input_ids, **rest)
        if len(input_ids) not in steps:
            steps[len(input_ids)] = _prepare(partial(forward, **ours), input_ids, caches[0], capture)
        given, step = steps[len(input_ids)]
        given.copy_(input_ids)
        return CausalLMOutputWithPast(logits=step().clone(), **ours)

    model.forward = run
    try:
        yield make
    finally:
        del model.forward  # the class's shows again


def _prepare(
    forward: Callable[..., Any], ids: Tensor, cache: StaticCache, capture: Callable[[Step], Step]
) -> tuple[Tensor, Step]:
    """A step of `forward` with its `cache` that reads its tokens from one place; the cache stays as it was."""
    given = ids.clone()

    def step() -> Tensor:
        return forward(input_ids=given, use_cache=True).logits

    lengths = [layer.cumulative_length.clone() for layer in cache.layers]

    def restore() -> None:  # keys and values beyond are masked, and written again
        for layer, length in zip(cache.layers, lengths):
            layer.cumulative_length.copy_(length)

    if given.is_cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(side)
    made = capture(step)
    restore()
    return given, made
