"""Turn a `.gguf` model into a plain fp32 Hugging Face directory: what every contender starts from."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def export_gguf(gguf: Path, out: Path) -> None:
    """Write the dequantized fp32 weights and the tokenizer of `gguf` to the directory `out`."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without dequantize=True the model stays marked as quantized and save_pretrained refuses.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="a .gguf file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the directory to write")
    args = parser.parse_args()
    if not args.gguf.is_file():
        parser.error(f"{args.gguf} is not a file; give the path of a .gguf model")
    export_gguf(args.gguf, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
