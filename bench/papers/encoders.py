"""An encoder's embeddings at every width (2/4/16's table 2 has BERT): cosine with the base, Spearman on sentence pairs.

    python bench/papers/encoders.py MODEL --calibration wiki.valid.tokens --pairs sts.tsv

Without `--pairs`, neighbouring and random sentences of `--text` are paired and scored by the base's own cosine: that
measures how well the ranking is preserved, not how good it is.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from anybit import evaluate, methods, quantize
from anybit.calibration import texts
from anybit.encoder import pooling_of
from anybit.evaluation.embeddings import COLUMNS, embed, split_sentences
from anybit.loader import load, load_tokenizer
from anybit.progress import Terminal

PAIRS = 250  # sentences that are paired, twice each
ROWS: dict[str, dict[str, Any]] = {
    "RTN 4": {"name": "rtn", "bits": 4},
    "GPTQ 4": {"name": "gptq", "bits": 4},
    "RTN 3": {"name": "rtn", "bits": 3},
    "GPTQ 3": {"name": "gptq", "bits": 3},
    "2/4/16, 25 % at 4 bits": {"name": "two-four-sixteen", "wide_groups": 0.25},
}


def write_pairs(model: str, text: str, file: Path) -> None:
    """`PAIRS` sentences of a text, each with the one behind it and with one of another place, scored by the model."""
    found = [s for s in split_sentences(texts.read_text(text)) if not s.startswith("<")]  # no markup
    picked = sorted(random.Random(0).sample(range(len(found) - 1), PAIRS))
    chosen = [pair for i, j in zip(picked, picked[1:] + picked[:1]) for pair in ((i, i + 1), (i, j + 1))]
    wanted = sorted({i for pair in chosen for i in pair})
    sentences = [found[i] for i in wanted]
    made = embed(load(model), load_tokenizer(model), sentences, pooling=pooling_of(Path(model)))
    of = dict(zip(wanted, made))
    rows = [(found[i], found[j], float(of[i] @ of[j])) for i, j in chosen]
    file.write_text("".join(json.dumps(dict(zip(COLUMNS, row))) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="HF directory")
    parser.add_argument("--pairs", type=Path, help="sentence1, sentence2 and score: .jsonl, .tsv or .csv")
    parser.add_argument("--text", default="builtin-eval", help="text to make pairs of, where there are none")
    parser.add_argument("--calibration", default="builtin", help="text to calibrate on")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("build/papers/encoders"), help="artifacts")
    parser.add_argument(
        "--only", nargs="+", default=list(ROWS), choices=list(ROWS), help="rows; all by default"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pairs = args.pairs or args.work / "pairs.jsonl"
    if args.pairs is None:
        write_pairs(args.model, args.text, pairs)
    windows = {"samples": args.samples, "seq_len": args.seq_len}
    base = evaluate(args.model, base=args.model, pairs=pairs)
    print(f"{base['sentences']} sentences, {base['pairs']} pairs")
    print("| | bits per weight | cosine, mean | cosine, least | Spearman |\n|---|---|---|---|---|")
    print(f"| unquantized | 32 | 1 | 1 | {base['spearman']:.4f} |", flush=True)
    for label in args.only:
        out = args.work / label.replace("/", "-").replace(" ", "-")
        asked = methods.options(**ROWS[label], **windows)
        quantize(args.model, out, asked, calibration=args.calibration, overwrite=True, report=Terminal())
        f = evaluate(out, base=args.model, pairs=pairs)
        cells = [f["bits_per_weight"], f["cosine_mean"], f["cosine_min"], f["spearman"]]
        print(f"| {label} | {cells[0]:.3f} | " + " | ".join(f"{x:.4f}" for x in cells[1:]) + " |", flush=True)


if __name__ == "__main__":
    main()
