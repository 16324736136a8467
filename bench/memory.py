"""Peak memory of `anybit quantize` on a generated model of at least 2 GB, against the size of one decoder block.

Each run is a process of its own; its high-water mark is read when the last shard appears and at the end, so that what
the save step adds is seen. "mixllm search" is the search of rows alone, beside what one block's training activations
take. The last line is one JSON object.

    python bench/memory.py [--layers 24] [--only rtn mixllm] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 5632, 32000


def generate(folder: Path, layers: int) -> int:
    """A Llama of random bfloat16 weights, one shard per block; returns its bytes."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    shards, weight_map = layers + 1, {}

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5, generator=generator)

    for shard in range(shards):
        if shard == 0:
            tensors = {
                "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
                "model.norm.weight": random(HIDDEN),
            }
        else:
            prefix = f"model.layers.{shard - 1}."
            square = {f"self_attn.{p}_proj.weight": random(HIDDEN, HIDDEN) for p in "qkvo"}
            mlp = {f"mlp.{p}_proj.weight": random(INTERMEDIATE, HIDDEN) for p in ("gate", "up")}
            mlp["mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
            norms = {f"{n}_layernorm.weight": torch.ones(HIDDEN) for n in ("input", "post_attention")}
            tensors = {prefix + name: t for name, t in {**square, **mlp, **norms}.items()}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def peak_mb(pid: int) -> float:
    """The kernel's own high-water mark of a process's resident memory, MB; no spike between two looks is missed."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return high_water_mb(status)


def high_water_mb(status: str) -> float:
    """The same from the text of a process's status."""
    line = next((x for x in status.splitlines() if x.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) / 1024


def measure(model: Path, out: Path, options: list[str], shards: int) -> dict[str, float]:
    """Peak memory of one run until its last shard was written and until its end, and its time."""
    command = [sys.executable, "-m", "anybit", "quantize", str(model), "-o", str(out), *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last = f"model-{shards:05d}-of-{shards:05d}.safetensors"
    before = whole = 0.0
    while process.poll() is None:
        whole = max(whole, peak_mb(process.pid))
        if not any(out.parent.glob(f"{out.name}*/**/{last}")):
            before = whole
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return {"peak_mb": before, "peak_with_save_mb": whole, "seconds": time.perf_counter() - start}


def search(model: Path) -> dict[str, float]:
    """In this process: peak memory of MixLLM's search over 1 x 2048 tokens, and what a block keeps for its gradient."""
    from anybit.calibration.streaming import StreamedModel
    from anybit.checkpoint.directory import open_checkpoint
    from anybit.kernels.dispatch import compute_dtype
    from anybit.methods import sensitivity
    from anybit.methods.method import Search
    from anybit.methods.mixllm import MixLLM

    streamed = StreamedModel(open_checkpoint(model), compute_dtype())
    tokens = torch.randint(0, 256, (1, 2048), generator=torch.Generator().manual_seed(0))
    sensitivity.salient_rows(
        Search(streamed, tokens, streamed.all_linears(), MixLLM(wide_rows=0.1).resolve())
    )
    peak = peak_mb(os.getpid())
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, object]]] = []
    block = streamed.blocks[0]
    handle = block.register_forward_pre_hook(lambda m, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        streamed.model.base_model(input_ids=tokens, use_cache=False)
    handle.remove()
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    (hidden, *rest), options = calls[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden.requires_grad_(), *rest, **options)
    return {"peak_mb": peak, "block_activations_mb": sum(kept.values()) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--only", nargs="+", help='some of "import only", rtn, gptq, mixllm, "mixllm search"')
    parser.add_argument("--keep", type=Path, help="generate the model here and leave it")
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.search:
        print(json.dumps(search(args.search)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        model = (args.keep or Path(temporary)) / "model"
        model.mkdir(parents=True, exist_ok=True)
        size = generate(model, args.layers)
        block = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE)
        runs = {
            "import only": None,
            "rtn": ["--method", "rtn"],
            "gptq": ["--method", "gptq", "--samples", "8", "--seq-len", "512"],
            "mixllm": ["--method", "mixllm", "--samples", "1", "--seq-len", "2048"],
            "mixllm search": [],
        }
        runs = {name: options for name, options in runs.items() if name in (args.only or runs)}
        results = {}
        for name, options in runs.items():
            if options is None:
                code = (
                    "import anybit.driver; print(open('/proc/self/status').read())"  # ru_maxrss survives exec
                )
                results[name] = {
                    "peak_mb": high_water_mb(subprocess.check_output([sys.executable, "-c", code], text=True))
                }
            elif not options:
                command = [sys.executable, __file__, "--search", str(model)]
                results[name] = json.loads(subprocess.check_output(command))
            else:
                results[name] = measure(model, Path(temporary) / name, options, args.layers + 1)
            print(name, {k: round(v, 1) for k, v in results[name].items()}, flush=True)
    print(
        json.dumps(
            {
                "bench": "memory",
                "model_mb": size / 2**20,
                "block_mb": block / 2**20,
                "embedding_mb": 2 * VOCABULARY * HIDDEN / 2**20,
                "cpus": os.cpu_count(),
                "runs": results,
            }
        )
    )


if __name__ == "__main__":
    main()
