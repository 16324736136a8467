"""anybit, GPTQModel and llm-compressor side by side: same weights, same tokens, one evaluator.

    python bench/peers/compare.py --model HF_DIR --calibration TEXT --text TEXT [TEXT ...]

Needs the peers' environments (setup.sh) and runs in anybit's. Contenders run one after another, interleaved:
all of them on one configuration before the next. Prints a table; the last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from anybit.calibration.texts import calibration_set

HERE = Path(__file__).parent

# ours: the defaults, and without what is ours in it (group reorder stays)
OURS: dict[str, tuple[str, ...]] = {"anybit": (), "anybit-textbook": ("--no-attention-weights", "--no-clip")}
# the method anybit, in no more bytes; embedding and head as the others have them
ANY_SIZE = "anybit-any-size"
# contender -> (peer, options); each peer's defaults, then its quality options that cost nothing at inference
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gptqmodel": ("gptqmodel", ()),
    "gptqmodel-mse": ("gptqmodel", ("mse=2.0",)),
    "gptqmodel-damp0.01": ("gptqmodel", ("damp_percent=0.01",)),
    "llmcompressor": ("llmcompressor", ()),
    "llmcompressor-mse": ("llmcompressor", ('observer="memoryless_mse"',)),
    "autoround": ("autoround", ()),
    "autoround-light": ("autoround", ("iters=50", "lr=0.005")),  # its own recipe of that name
}
USUAL = [name for name in (*OURS, ANY_SIZE, *PEERS) if not name.startswith("autoround")]  # which take hours
COLUMNS = ("method", "bits", "group", "sym", "desc_act", "perplexity", "kld", "seconds", "peak_mb")


@dataclass(frozen=True)
class Config:
    """What is asked of every contender."""

    bits: int
    group_size: int
    symmetric: bool
    desc_act: bool

    def name(self) -> str:
        """Distinct and fit for a file name, such as `4b-g64-asym-desc`."""
        ends = ("sym" if self.symmetric else "asym") + ("-desc" if self.desc_act else "")
        return f"{self.bits}b-g{self.group_size}-{ends}"

    @property
    def bpw(self) -> float:
        """Codes, a scale of 16 bits and a zero point for each group."""
        return self.bits + (16 + self.bits) / self.group_size

    def flags(self) -> list[str]:
        """The arguments that `anybit quantize` and the peers' runners have in common."""
        symmetry = "--symmetric" if self.symmetric else "--asymmetric"
        order = "--desc-act" if self.desc_act else "--no-desc-act"
        return ["--bits", str(self.bits), "--group-size", str(self.group_size), symmetry, order]


@dataclass(frozen=True)
class Inputs:
    """What every run reads; `tokens` are exactly the windows that anybit makes of `calibration`."""

    model: Path
    calibration: Path  # text cut to the wanted windows
    tokens: Path  # .npy, int64 [samples, seq_len]
    samples: int
    seq_len: int
    peers: Path  # one virtual environment per peer
    threads: int


@dataclass
class Outcome:
    """One contender on one configuration; `seconds` of every repeat."""

    perplexity: float | None = None
    kld: float | None = None
    texts: dict[str, Any] = field(default_factory=dict)  # both, of every text
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def cut_calibration(model: Path, text: Path, samples: int, seq_len: int, work: Path) -> tuple[Path, Path]:
    """Write the text of the first `samples` windows and its tokens to `work`; returns both files.

    anybit picks windows at random where a text has more than it was asked for, so it is given no more.
    Raises ValueError if the text is too short or its cut does not tokenize to its own beginning.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = text.read_bytes().decode("utf-8")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, count = encoded["input_ids"], samples * seq_len
    if len(ids) < count:
        raise ValueError(f"{text} has {len(ids)} tokens; expected {count} or more")
    beginning = whole[: encoded["offset_mapping"][count - 1][1]]
    if tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"] != ids[:count]:
        raise ValueError(f"{text} cut after {count} tokens tokenizes differently; change --samples")
    cut, tokens = work / "calibration.txt", work / "tokens.npy"
    cut.write_bytes(beginning.encode("utf-8"))
    np.save(tokens, calibration_set(tokenizer, str(cut), samples, seq_len, seed=0).tokens.numpy())
    return cut, tokens


def run_measured(command: list[str], log: Path, threads: int) -> tuple[float, float]:
    """Wall seconds and peak resident MB of a process, its output in `log`; RuntimeError if it fails."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env = os.environ | limits | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        _, status, usage = os.wait4(process.pid, 0)  # unlike wait(), tells this child's own peak memory
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}, see {log}: {last_line(log)[-300:]}")
    return seconds, usage.ru_maxrss / 1024  # Linux counts KiB


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, or ""."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def run_anybit(inputs: Inputs, contender: str, config: Config, out: Path) -> dict[str, Any]:
    """Quantize with `anybit quantize`; its seconds hold loading and writing too, which the peers' do not."""
    report = out.with_suffix(".json")
    if contender == ANY_SIZE:
        options = ["--method", "anybit", "--embed-bits", "16", "--bpw", str(config.bpw)]
    else:
        options = ["--method", "gptq", *config.flags(), *OURS[contender]]
    command = [sys.executable, "-m", "anybit", "quantize", str(inputs.model), "-o", str(out), "--overwrite",
               *options, "--calibration", str(inputs.calibration),
               "--samples", str(inputs.samples), "--seq-len", str(inputs.seq_len),
               "--threads", str(inputs.threads), "--json", str(report)]  # fmt: skip
    _, peak = run_measured(command, out.with_suffix(".log"), inputs.threads)
    figures = json.loads(report.read_text())
    return {"seconds": figures["seconds"], "peak_mb": peak, "settings": {}, "versions": {}}


def run_peer(inputs: Inputs, contender: str, config: Config, out: Path) -> dict[str, Any]:
    """Quantize with a contender of PEERS in its own environment; what its runner printed last."""
    peer, options = PEERS[contender]
    python = inputs.peers / peer / "bin" / "python"
    command = [str(python), str(HERE / f"{peer}_run.py"), "--model", str(inputs.model), "-o", str(out),
               *config.flags(), "--tokens", str(inputs.tokens), "--threads", str(inputs.threads),
               *(f"--option={option}" for option in options)]  # fmt: skip
    log = out.with_suffix(".log")
    run_measured(command, log, inputs.threads)
    return json.loads(last_line(log))


def evaluate(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What ppl.py says of a model directory: of every text perplexity, and divergence from the unquantized model."""
    command = [sys.executable, str(HERE / "ppl.py"), str(model), "--text", *map(str, args.text),
               "--windows", str(args.windows), "--seq-len", str(args.eval_seq_len)]  # fmt: skip
    if model != args.model:
        command += ["--base", str(args.model)]
    log = args.work / f"{model.name}.ppl.log"
    run_measured(command, log, args.threads)
    return json.loads(last_line(log))


def add_run(
    outcome: Outcome, inputs: Inputs, contender: str, config: Config, args: argparse.Namespace
) -> None:
    """Run a contender once more and evaluate it the first time; a failure is noted and ends nothing."""
    out = args.work / f"{contender}-{config.name()}"
    shutil.rmtree(out, ignore_errors=True)  # never measure a resumed run
    try:
        run = run_peer if contender in PEERS else run_anybit
        made = run(inputs, contender, config, out)
        outcome.seconds.append(made["seconds"])
        outcome.peak_mb = max(outcome.peak_mb, made["peak_mb"])
        outcome.settings, outcome.versions = made["settings"], made["versions"]
        if outcome.perplexity is None:
            outcome.texts = evaluate(out, args)
            first = outcome.texts[args.text[0].stem]
            outcome.perplexity, outcome.kld = first["perplexity"], first["kld"]
    except (RuntimeError, OSError) as error:
        outcome.error = str(error)
    shutil.rmtree(out, ignore_errors=True)


def row(contender: str, config: Config, outcome: Outcome) -> dict[str, Any]:
    """One row of the table: the columns of COLUMNS, then everything else that is known."""
    shared = {"method": contender, "bits": config.bits, "group": config.group_size,
              "sym": config.symmetric, "desc_act": config.desc_act}  # fmt: skip
    seconds = statistics.median(outcome.seconds) if outcome.seconds else None
    return shared | asdict(outcome) | {"seconds": seconds, "all_seconds": outcome.seconds}


def print_table(rows: list[dict[str, Any]]) -> None:
    """COLUMNS of the rows, aligned; a failed run shows its error."""
    line = "{:20} {:>4} {:>5} {:>5} {:>8} {:>10} {:>7} {:>8} {:>8}  {}"
    print(line.format(*COLUMNS, ""))
    for entry in rows:
        digits = [4 if column == "kld" else 2 for column in COLUMNS]
        cells = [
            f"{entry[c]:.{d}f}" if isinstance(entry[c], float) else str(entry[c])
            for c, d in zip(COLUMNS, digits)
        ]
        print(line.format(*cells, entry.get("error") or ""))


def parse_arguments() -> argparse.Namespace:
    default_peers = Path(os.environ.get("PEERS_DIR", "build/peers"))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, required=True, help="fp32 model directory (export_gguf.py)")
    parser.add_argument("--calibration", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, nargs="+", help="texts to evaluate on")
    parser.add_argument("--samples", type=int, default=16, help="calibration windows")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per calibration window")
    parser.add_argument("--windows", type=int, default=16, help="evaluation windows")
    parser.add_argument("--eval-seq-len", type=int, default=1024, help="tokens per evaluation window")
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--symmetry", nargs="+", choices=("asym", "sym"), default=["asym", "sym"])
    parser.add_argument("--desc-act", nargs="+", choices=("on", "off"), default=["off", "on"])
    parser.add_argument("--contenders", nargs="+", choices=(*OURS, ANY_SIZE, *PEERS), default=USUAL)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; seconds is their median")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-dir", type=Path, default=default_peers, help="environments of setup.sh")
    parser.add_argument("--work", type=Path, help="scratch directory [PEERS_DIR/runs]")
    parser.add_argument("--json", type=Path, help="also write the last line to this file")
    args = parser.parse_args()
    args.work = (args.work or args.peers_dir / "runs").absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def compare(args: argparse.Namespace, inputs: Inputs) -> list[dict[str, Any]]:
    """Every contender on every configuration, `--repeats` times around."""
    configs = [
        Config(bits, args.group_size, symmetry == "sym", order == "on")
        for bits, symmetry, order in product(args.bits, args.symmetry, args.desc_act)
    ]
    pairs = [(contender, config) for config in configs for contender in args.contenders]
    outcomes = {pair: Outcome() for pair in pairs}
    for (contender, config), repeat in ((pair, repeat) for repeat in range(args.repeats) for pair in pairs):
        print(f"run {repeat + 1}/{args.repeats}: {contender} {config.name()}", file=sys.stderr, flush=True)
        add_run(outcomes[contender, config], inputs, contender, config, args)
    return [row(contender, config, outcomes[contender, config]) for contender, config in pairs]


def main() -> int:
    args = parse_arguments()
    try:
        cut, tokens = cut_calibration(args.model, args.calibration, args.samples, args.seq_len, args.work)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    peers = args.peers_dir.absolute()  # not resolved: a virtual environment's python is a link
    inputs = Inputs(args.model, cut, tokens, args.samples, args.seq_len, peers, args.threads)
    base = {text: found["perplexity"] for text, found in evaluate(args.model, args).items()}
    rows = compare(args, inputs)
    print(
        "perplexity of the unquantized model:", ", ".join(f"{text} {own:.3f}" for text, own in base.items())
    )
    print_table(rows)
    summary = json.dumps({"base_perplexity": base, "threads": args.threads, "rows": rows})
    if args.json:
        args.json.write_text(summary + "\n")
    print(summary)
    return 1 if any(entry["error"] for entry in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
