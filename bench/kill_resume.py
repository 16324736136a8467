"""Do killed runs end in the same bytes? `anybit quantize`, killed at random moments, a hundred times.

    python bench/kill_resume.py [--kills 100] [--seed 0] [--methods anybit,gptq] [--blocks 5]

A random Llama of some blocks is compressed by several methods, once without a kill: those bytes are the oracle. Then
each run is killed once to three times and resumed. Half of the kills come after a random share of the run's processor
time (SIGPROF, which nothing handles), half after a random share of its wall time (SIGKILL). After each there is no OUT,
or a whole one; at the end every file of OUT has the oracle's bytes, and no OUT.partial is left. Runs are forked from a
process that has everything imported, so the time that is shared out is work. The last line is JSON. Exit code: 0 all
the same, 1 a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anybit.cli import main as cli

METHODS = {
    "anybit": "",
    "rtn": "--embed-bits 8",
    "gptq": "--bits 3 --group-size 32",
    "two-four-sixteen": "--finetune --finetune-epochs 1",
    "squeezellm": "--bits 3",
    "any-precision": "--widths 3,5",
    "cmpq": "--bits 2.5",
    "mixllm": "--wide-rows 0.2 --group-size 16",
    "atom": "--group-size 16 --outlier-channels 8",
}
SOONEST, LATEST = 0.02, 1.05  # shares of a whole run after which it is killed


def tiny(folder: Path, blocks: int) -> Path:
    """Random blocks of a Llama; its tokens are bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=blocks, vocab_size=264, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def here(arguments: list[str]) -> int:
    """Compress in this process; exit code."""
    sys.argv = ["anybit", "quantize", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run(
    arguments: list[str], processor: float | None = None, wall: float | None = None
) -> tuple[int, float, float]:
    """Compress in a process of its own, killed after so many seconds; exit code (negative: the signal), both times."""
    begun, pid = time.monotonic(), os.fork()
    if pid == 0:
        if processor is not None:
            signal.setitimer(signal.ITIMER_PROF, processor)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        try:
            os._exit(here(arguments))
        finally:
            os._exit(1)
    if wall is not None:
        time.sleep(wall)
        os.kill(pid, signal.SIGKILL)  # perhaps it has just ended: nobody has waited for it yet
    status, used = os.wait4(pid, 0)[1:]
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, time.monotonic() - begun


def commands(place: Path, model: Path, methods: list[str]) -> dict[str, list[str]]:
    text = place / "text.txt"
    rng = random.Random(0)
    text.write_text(" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(1500)))
    few = ["--samples", "6", "--seq-len", "64", "--calibration", str(text)]
    made = {method: ["--method", method, *METHODS[method].split()] for method in methods}
    return {
        method: [str(model), *options, *([] if method == "rtn" else few), "--threads", "1", "-o"]
        for method, options in made.items()
    }


def trial(
    command: list[str], out: Path, whole: dict[str, str], times: list[float], rng: random.Random
) -> tuple[int, str]:
    """Kill a run once to three times, then let it end; how often it was killed, and what is wrong, if anything."""
    kills, fault = 0, ""
    for _ in range(rng.randint(1, 3)):
        share = rng.uniform(SOONEST, LATEST)
        by = {"processor": share * times[0]} if rng.random() < 0.5 else {"wall": share * times[1]}
        code, *_ = run([*command, str(out)], **by)
        kills += code in (-signal.SIGKILL, -signal.SIGPROF)
        if code > 0:
            fault = f"ended with {code}"
        if out.exists() and digests(out) != whole:
            fault = "a killed run left half an artifact"
        if out.exists() or fault:
            break
    if not fault and not out.exists() and (code := run([*command, str(out)])[0]):
        fault = f"the resumed run ended with {code}"
    if not fault and digests(out) != whole:
        fault = "other bytes: " + ", ".join(n for n, d in whole.items() if digests(out).get(n) != d)
    if not fault and out.with_name(f"{out.name}.partial").exists():
        code = run([*command, str(out), "--overwrite"])[
            0
        ]  # killed while it published: a rerun clears it away
        if code or digests(out) != whole or out.with_name(f"{out.name}.partial").exists():
            fault = f"what was left beside OUT stays (exit code {code})"
    return kills, fault


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; default: all of them")
    parser.add_argument("--blocks", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng, kills, trials, faults = random.Random(args.seed), Counter[str](), Counter[str](), []
    place = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    try:
        lines = commands(place, tiny(place / "model", args.blocks), args.methods.split(","))
        whole, times = {}, {}
        here(
            [*next(iter(lines.values())), str(place / "warm")]
        )  # what is imported on the way is there for all
        for method, line in lines.items():
            code, *times[method] = run([*line, str(place / method)])
            if code:
                raise SystemExit(f"{method} ends with {code} without a kill")
            whole[method] = digests(place / method)
        while kills.total() < args.kills:
            method = min(lines, key=lambda m: kills[m])
            out = place / f"out{trials.total()}"
            found, fault = trial(lines[method], out, whole[method], times[method], rng)
            kills[method] += found
            trials[method] += 1
            if fault:
                faults.append({"method": method, "fault": fault})
            print(f"{method}: {found} kills, {fault or 'the same bytes'}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(f"{out}.partial", ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    figures = {"seed": args.seed, "kills": kills.total(), "runs": trials.total(), "by_method": dict(kills)}
    figures["runs_by_method"] = dict(trials)
    print(json.dumps(figures | {"files_compared": {m: len(d) for m, d in whole.items()}, "faults": faults}))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
