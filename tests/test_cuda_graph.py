"""Steps replayed as a graph. Without a GPU the operations of a step are recorded instead: what a CUDA graph replays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config, StaticCache

import anybit
from anybit.kernels.gpu.cuda_graph import Step, capture, fits, graphed
from anybit.kv_cache import CACHE
from tests import builders

pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 100, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 128}


def recorded(step: Step) -> Step:
    """The step's operations on the same memory, without its Python."""
    return make_fx(step)()


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("batch", [1, 3])
def test_replayed_steps_generate_the_same(kind: type, batch: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **HEADS, **TOKENS)).eval().to(device)
    assert fits(model.config)
    made: list[Step] = []

    def counted(step: Step) -> Step:
        made.append(step)
        return (capture if device == "cuda" else recorded)(step)

    with torch.no_grad(), graphed(model, counted) as make_cache:
        for tokens in (7, 4):  # another prompt, another cache
            ids = torch.randint(2, 100, (batch, tokens), device=device)
            how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 15, "min_new_tokens": 15}
            replayed = model.generate(ids, **{CACHE: make_cache(tokens + 15)}, disable_compile=True, **how)
            assert torch.equal(replayed, model.generate(ids, **how))  # whose cache grows: no graph
    assert len(made) == 2
    assert "forward" not in vars(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_has_the_branches_of_quantized_layers(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels of 2, 4 and 16 bits are multiplied on streams of their own."""
    from anybit.kernels.gpu import layer

    concurrently, forks = layer.concurrently, []

    def counted(device: torch.device, *runs: Callable[[], None]) -> None:
        forks.append(len(runs))
        concurrently(device, *runs)

    monkeypatch.setattr(layer, "concurrently", counted)
    config = builders.options("two-four-sixteen", samples=2, seq_len=32)
    anybit.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text_file))
    model = anybit.load(str(tmp_path / "out"), device="cuda")
    ids = torch.randint(3, 250, (2, 7), device="cuda")
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 15, "min_new_tokens": 15}
    how |= {"disable_compile": True, "do_sample": False}
    with torch.no_grad():
        eager = model.generate(ids, **{CACHE: StaticCache(model.config, max_cache_len=22)}, **how)
        with graphed(model) as make_cache:
            replayed = model.generate(ids, **{CACHE: make_cache(22)}, **how)
    assert torch.equal(replayed, eager) and max(forks) > 1


def test_sliding_windows_do_not_fit() -> None:
    config = Gemma3TextConfig(
        **SIZES, **HEADS, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    assert not fits(config)
