"""`anybit bench kernels --device cuda`: what of it needs no GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.bench import gpu as bench
from anybit.bench import gpu_attention, gpu_matmul, gpu_quantize, gpu_targets, graphs
from anybit.errors import InputError
from anybit.kernels import gpu

if not gpu.available():
    pytest.skip(f"the GPU's kernels do not run: {gpu.why_not()}", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Every variant runs once, on the CPU without a GPU, and took a second, or what is set here; 0: it fails."""
    seconds: dict[str, float] = {}

    def times(
        variants: dict[str, graphs.Variant], rounds: int, failed: dict[str, str], where: str = ""
    ) -> dict[str, float]:
        for name, variant in variants.items():
            with graphs.noted(failed, name + where):
                variant.runs[-1]()
                assert seconds.get(name) != 0, "no time"
        return {name: seconds.get(name, 1.0) for name in variants if name + where not in failed}

    if not torch.cuda.is_available():
        monkeypatch.setattr(graphs, "cuda", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setattr(graphs, "copy", lambda device: graphs.Variant(0, [lambda: None]))
    monkeypatch.setattr(graphs, "copies", lambda nbytes: 2)
    monkeypatch.setattr(graphs, "times", times)
    monkeypatch.setattr(gpu_matmul, "RATE", 32)
    return seconds


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_small_run_checks_and_times_nothing(part: str) -> None:
    only = ("W4A8", "codebook 4") if part in bench.TAKEN else ()
    figures = bench.run(part, small=True, only=only)
    assert figures["part"] == part
    if part == "quantize":
        assert figures["gptq"]["codes_differ"] == 0 and figures["kmeans"]["ns_per_weight"] > 0
        assert figures["seconds_per_billion"]["gptq"] > 0
        compared = {row["what"]: row for row in figures["agreement"] if row["beside"] != "the native k-means"}
        assert list(compared) == [
            "GPTQ, 4 bits",
            "k-means, 4 bits",
            "k-means, 3 bits",
            "k-means, 8 bits, cut from 3",
        ]
        for row in compared.values():
            assert row["equal_codes"] == 1 and abs(row["error"]) < 1e-6 and row["codes"] == 96
    else:
        assert figures["checked"] and figures["rows"] == []
    assert json.loads(list(bench.lines(figures))[-1]) == json.loads(json.dumps(figures))


def test_what_is_wrong_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from anybit.kernels import reference

    right = reference.int_matmul
    monkeypatch.setattr(reference, "int_matmul", lambda x, weight: right(x, weight) * 1.02)
    with pytest.raises(InputError, match=r"W4A8 fails: .* off; do not use it"):
        bench.run("gemm", small=True, only=("W4A8",))


def test_what_fails_is_left_out(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = gpu_matmul._error

    def error(name: str, *arguments: Any) -> float:
        if name == "W8":
            raise RuntimeError("out of registers")
        return usual(name, *arguments)

    monkeypatch.setattr(gpu_matmul, "_error", error)
    figures = bench.run("gemm", shapes=("128x256",), tokens=(2,), only=("W8", "W8A8"))
    assert figures["failed"] == {"W8": "RuntimeError: out of registers"} and list(figures["checked"]) == [
        "W8A8"
    ]
    assert list(figures["rows"][0]["variants"]) == ["cuBLAS float16", "cuBLAS bfloat16", "W8A8"]
    assert "W8 is left out" in capsys.readouterr().err
    assert "left out: W8, RuntimeError: out of registers" in list(bench.lines(figures))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="expected one of gemv"):
        bench.run("gemmv")
    with pytest.raises(InputError, match="no variant begins with 'W9'"):
        bench.run("gemv", small=True, only=("W9",))
    for part, option in (
        ("attention", "only"),
        ("quantize", "dtype"),
        ("gemv", "tokens"),
        ("decode", "shapes"),
    ):
        with pytest.raises(InputError, match=f"--{option} would be ignored"):
            bench.run(part, **{option: ("W4",)})
    with pytest.raises(InputError, match="--shapes would be ignored"):
        bench.run("gemm", small=True, shapes=("64x64",))
    with pytest.raises(InputError, match=r"shape '64': expected OUTxIN"):
        bench.run("gemm", shapes=("64",))
    with pytest.raises(InputError, match=r"'float32': .* float16 and bfloat16"):
        bench.run("gemm", small=True, dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rates_and_their_shares(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    monkeypatch.setattr(gpu_matmul, "_error", lambda *_: 0.0)
    clock |= {"copy": 1e-3, "W4A8": 2e-6, "W4": 4e-6, "cuBLAS float16": 8e-6, "cuBLAS bfloat16": 1e-5}
    clock |= {"float16": 4e-10, "bfloat16": 8e-10, "int8": 2e-10}  # of the large products
    options = {"shapes": ("128x256",), "tokens": (1, 3), "dtype": dtype, "only": ("W4", "W4A")}
    figures = bench.run("gemm", json_file=tmp_path / "gemm.json", **options)
    assert json.loads((tmp_path / "gemm.json").read_text()) == figures and figures["dtype"] == dtype
    first, last = figures["rows"]
    assert [first["tokens"], last["tokens"]] == [1, 3] and last["copy_gb_per_s"] == 2 * 2**30 / 1e6
    assert list(last["variants"]) == ["cuBLAS float16", "cuBLAS bfloat16", "W4", "W4A8", "W4A4"]
    nbytes = 128 * 256 // 2 + 128 * 2 * 2 + 128 * 2 // 2  # codes, scales and zero points
    got = last["variants"]["W4A8"]
    assert got["us"] == pytest.approx(2) and got["tflops"] == pytest.approx(3 * 2 * 128 * 256 / 2e6)
    assert got["gb_per_s"] == pytest.approx(nbytes / 2e3, rel=0.02)  # and what else is stored
    assert got["of_copy"] == pytest.approx(got["gb_per_s"] / last["copy_gb_per_s"])
    assert got["over_float16"] == pytest.approx(4) and got["over_bfloat16"] == pytest.approx(5)
    rates = {"int8": 2 * 32**3 / 2e-10 / 1e12, "float16": 2 * 32**3 / 4e-10 / 1e12}
    rates["bfloat16"] = rates["float16"] / 2
    assert figures["matrix_rates"] == pytest.approx(rates)
    for name, unit in {"W4A8": "int8", "W4A4": "int8", "W4": dtype, "cuBLAS bfloat16": "bfloat16"}.items():
        variant = last["variants"][name]
        assert variant["of_matrix_rate"] == pytest.approx(variant["tflops"] / rates[unit])
    assert figures["averages"]["W4A8"] == pytest.approx(4) and figures["targets"] == []
    table = "\n".join(bench.lines(figures))
    for heading in ("us", "GB/s", "% of copy", "TOP/s", "% of rate", "x float16", "x bfloat16"):
        assert heading in table


@pytest.mark.parametrize(
    "begin", [(), ("bench", "kernels", "--device", "cuda", "--part")], ids=["module", "cli"]
)
def test_both_commands(
    clock: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    begin: tuple[str, ...],
) -> None:
    pytest.importorskip("matplotlib")
    files = "--json", f"{tmp_path}/gemm.json", "--plot", f"{tmp_path}/gemm.png"
    what = "--shapes", "128x256", "--tokens", "2,3", "--dtype", "bfloat16", "--only", "W8A8", "--rounds", "1"
    monkeypatch.setattr(sys, "argv", ["command", *begin, "gemm", *what, *files])
    if begin:
        pytest.importorskip("typer")
        from anybit.cli import main as cli

        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
    else:
        bench.main()
    figures = json.loads((tmp_path / "gemm.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert figures["dtype"] == "bfloat16" and [row["tokens"] for row in figures["rows"]] == [2, 3]
    assert list(figures["checked"]) == ["W8A8"] and (tmp_path / "gemm.png").stat().st_size > 5000


def test_what_time_does_not_allow_is_said(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MINUTES", 0)
    figures = bench.run("gemm", shapes=("128x256",), tokens=(1, 2), only=("W8A8",))
    assert figures["rows"] == [] and figures["left_out"] == ["128x256, 1 token(s)", "128x256, 2 token(s)"]
    assert "out of time, left out: 128x256, 2 token(s)" in list(bench.lines(figures))


@pytest.mark.parametrize("missing", ["copy", "cuBLAS float16", "cuBLAS bfloat16", "W8A8"])
@pytest.mark.parametrize("part", ["gemv", "gemm"])
def test_a_row_without_one_of_its_peers(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, part: str, missing: str
) -> None:
    monkeypatch.setattr(gpu_matmul, "_error", lambda *_: 0.0)
    clock[missing] = 0
    only = ("W8A8", "W4") if part == "gemm" else ("W4", "W8", "W8A8")
    figures = bench.run(
        part, shapes=("128x256",), only=only, **({"tokens": (1, 2)} if part == "gemm" else {})
    )
    rows = figures["rows"]
    assert len(rows) == (2 if part == "gemm" else 1) and list(figures["failed"]) == [
        f"{missing}, 128x256, {row['tokens']} token(s)" for row in rows
    ]
    for row in rows:
        assert ("copy_gb_per_s" in row) == (missing != "copy") and missing not in row["variants"]
        for variant in row["variants"].values():
            assert variant["us"] > 0 and ("of_copy" in variant) == (missing != "copy")
            for peer in ("float16", "bfloat16"):
                assert (f"over_{peer}" in variant) == (missing != f"cuBLAS {peer}")
    assert any(line.startswith(f"left out: {missing}, 128x256") for line in bench.lines(figures))
    for panel in bench._panels(figures):
        assert bool(panel.points) == (missing != "cuBLAS float16")


def test_a_decode_step_without_its_peer(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_matmul, "BLOCK", ((64, 128),))
    clock |= {"float16": 0, "copy": 0}
    figures = bench.run("decode", tokens=(4,), only=("W8A8",))
    (row,) = figures["rows"]
    assert list(row["variants"]) == ["W8A8"] and "over_float16" not in row["variants"]["W8A8"]
    assert row["variants"]["W8A8"]["tokens_per_s"] == 4 and "float16, 4 token(s)" in figures["failed"]


def test_inputs_without_their_peers(clock: dict[str, float]) -> None:
    clock |= {"torch norm": 0, "copy": 0, "alone": 0}
    figures = gpu_attention.quantize(tokens=(2,), columns=(256,))
    (row,) = figures["rows"]
    assert list(row["variants"]) == ["norm", "norm, reordered"] and "copy_gb_per_s" not in row
    assert set(row["variants"]["norm"]) == {"us", "gb_per_s"}
    assert row["variants"]["norm, reordered"]["over_torch"] == 1
    assert sorted(figures["failed"]) == [
        f"{name}, 256 columns, 2 token(s)" for name in ("alone", "copy", "torch norm")
    ]


def test_wrong_widths_and_roundings_are_left_out(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "MODELS", {"tiny": (4, 2, 64)})
    attend, rounded = gpu_attention.paged_attention, gpu_attention.quantize_inputs

    def attention(query: Any, cache: Any, *given: Any, **more: Any) -> Any:
        return attend(query, cache, *given, **more) * (1.1 if cache.bits == 8 else 1)

    def quantize(x: Any, grid: Any, **more: Any) -> Any:
        codes, scales = rounded(x, grid, **more)
        return codes, scales * (1.1 if "cols" in more else 1)

    monkeypatch.setattr(gpu_attention, "paged_attention", attention)
    monkeypatch.setattr(gpu_attention, "quantize_inputs", quantize)
    failed: dict[str, str] = {}
    assert list(
        gpu_attention._check_attention((4, 2, 64), (1, 40), graphs.any_device(), failed, ", tiny")
    ) == [
        "int4",
        "fp16",
    ]
    assert "do not use it" in failed["int8, tiny"] and len(failed) == 1
    figures = gpu_attention.quantize(tokens=(2,), columns=(256,))
    assert list(figures["rows"][0]["variants"]) == ["alone", "norm"]
    assert list(figures["failed"]) == ["norm, reordered, 256 columns"]
    checked = {"int4": 0.0, "fp16": 0.0}
    monkeypatch.setattr(gpu_attention, "_check_attention", lambda *_: checked)
    figures = gpu_attention.attention(batches=(1,), lengths=(20,), models=("tiny",))
    assert sorted(figures["rows"][0]["variants"]) == ["fp16", "int4", "sdpa"]
    with pytest.raises(InputError, match=r"norm, reordered, 300 columns fails: .* do not use it"):
        bench.run("activations", small=True)


@pytest.mark.parametrize("part", ["attention", "activations", "quantize"])
def test_every_part_stops_in_time(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    monkeypatch.setattr(graphs, "MINUTES", 0)
    if part == "quantize":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "no GPU")
        monkeypatch.setattr(gpu, "why_not", lambda: None)
    else:
        monkeypatch.setattr(gpu_attention, "_check_attention", lambda *_: {})
        monkeypatch.setattr(gpu_attention, "_check_quantize", lambda *_: {})
    figures = bench.run(part, json_file=tmp_path / "part.json")
    left_out = {
        "attention": (12, "Llama-7B, batch 1, length 1024"),
        "activations": (12, "4096 columns, 1 token(s)"),
        "quantize": (9, "k-means, 4096x4096"),
    }[part]
    assert (len(figures["left_out"]), figures["left_out"][0]) == left_out
    assert f"out of time, left out: {left_out[1]}" in list(bench.lines(figures))
    assert bench._panels(figures) == []


def test_a_step_of_quantizing_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu_quantize, "_gptq_beside_cpu", compared)
    monkeypatch.setattr(gpu_quantize, "_kmeans_beside_cpu", lambda *_: iter([{}, {}, {}]))  # takes its time
    seen: list[str] = []
    with pytest.raises(InputError, match="GPTQ beside the CPU's fails: RuntimeError: no memory"):
        gpu_quantize.quantize(small=True, save=lambda figures: seen.append(json.dumps(figures)))
    kept = [json.loads(figures) for figures in seen]
    assert [len(figures["kmeans"]["rows"]) for figures in kept[:2]] == [0, 1] and "gptq" in kept[2]
    assert list(kept[4]["seconds_per_billion"]) == ["rtn", "gptq"]
    assert len(kept[-1]["agreement"]) >= 3 and list(kept[-1]["failed"]) == ["GPTQ beside the CPU's"]
    partial = {"part": "quantize", "device": "a GPU", "kmeans": {"rows": []}}
    partial |= {"seconds_per_billion": {}, "agreement": [], "failed": {"GPTQ": "no"}}
    assert "left out: GPTQ, no" in list(bench.lines(partial)) and gpu_targets.targets(partial) == []


def test_a_variant_that_fails_while_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def replayed(graph: Any, count: int) -> float:
        calls.append(graph)
        if graph == "b" and calls.count("b") == 4:
            raise RuntimeError("misaligned address")
        return len(calls)

    def graph(runs: Any) -> tuple[Any, int]:
        return runs[0](), 1

    monkeypatch.setattr(graphs, "_graph", graph)
    monkeypatch.setattr(graphs, "_replayed", replayed)
    variants = {name: graphs.Variant(0, [lambda name=name: name]) for name in "ab"}  # type: ignore[misc]
    variants["c"] = graphs.Variant(0, [lambda: 1 // 0])
    failed: dict[str, str] = {}
    assert graphs.times(variants, 3, failed, " here") == {"a": 7}
    assert failed["b here"] == "RuntimeError: misaligned address" and calls[-1] == "a"
    assert failed["c here"].startswith("ZeroDivisionError")
    assert "c here is left out" in capsys.readouterr().err


def test_a_gpu_that_answers_no_more_ends_the_part(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = graphs.times

    def times(
        variants: dict[str, graphs.Variant], rounds: int, failed: dict[str, str], where: str = ""
    ) -> Any:
        if where == ", 128x256, 2 token(s)":
            clock["W8A8"] = 0
            monkeypatch.setattr(graphs, "_lost", lambda: True)
        return usual(variants, rounds, failed, where)

    monkeypatch.setattr(graphs, "times", times)
    file = tmp_path / "gemm.json"
    figures = bench.run("gemm", json_file=file, shapes=("128x256",), tokens=(1, 2, 3), only=("W8A8",))
    assert [row["tokens"] for row in figures["rows"]] == [1] and json.loads(file.read_text())["rows"]
    assert list(figures["failed"]) == ["W8A8, 128x256, 2 token(s)"]
    (said,) = (line for line in bench.lines(figures) if line.startswith("ended early: after W8A8, 128x256"))
    assert said.endswith("run the part again with `--only` and the other variants")


def test_a_decode_step(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_matmul, "BLOCK", ((64, 128), (128, 128)))
    monkeypatch.setattr(gpu_matmul, "BLOCKS", 2)
    monkeypatch.setattr(gpu_matmul, "OWN_BLOCKS", 1)
    clock |= {"copy": 1.0, "W8A8": 0.5, "bfloat16": 2.0, "int8": 1e-9}
    (row,) = bench.run("decode", tokens=(4,), dtype="bfloat16", only=("W8A8",))["rows"]
    base, ours = row["variants"]["bfloat16"], row["variants"]["W8A8"]
    assert base["tokens_per_s"] == 2 and ours["tokens_per_s"] == 8 and ours["over_bfloat16"] == 4
    assert base["gb_per_s"] == pytest.approx(2 * 2 * 192 * 128 / 2e9)
    assert ours["tflops"] == pytest.approx(2 * 2 * 4 * 192 * 128 / 0.5e12)
    assert ours["of_matrix_rate"] == pytest.approx(ours["tflops"] / (2 * 32**3 / 1e-9 / 1e12))


def test_attention_and_inputs_are_timed(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "MODELS", {"tiny": (4, 2, 64)})
    checked = {"int4": 0.0, "int8": 0.0, "fp16": 0.0}  # of 700 tokens
    monkeypatch.setattr(gpu_attention, "_check_attention", lambda *_: checked)
    clock |= {"copy": 1e-3, "int4 default": 1e-6, "int8 default": 2e-6, "fp16 default": 4e-6, "sdpa": 3e-6}
    seen: list[int] = []
    sizes = {"batches": (2,), "lengths": (20, 40), "models": ("tiny",)}
    figures = gpu_attention.attention(**sizes, save=lambda found: seen.append(len(found["rows"])))  # type: ignore[arg-type]
    int4 = figures["rows"][1]["variants"]["int4"]
    assert (
        seen == [0, 1, 2] and int4["over_fp16"] == pytest.approx(4) and int4["over_sdpa"] == pytest.approx(3)
    )
    nbytes = 2 * 48 * 2 * 2 * (64 // 2 + 4)  # batch, places of three pages, heads, keys and values with grids
    assert int4["gb_per_s"] == pytest.approx(nbytes / 1e3)
    assert int4["of_copy"] == pytest.approx(int4["gb_per_s"] / figures["rows"][1]["copy_gb_per_s"])
    inputs = gpu_attention.quantize(tokens=(2,), columns=(256,), save=lambda found: seen.append(0))
    assert inputs["rows"][0]["variants"]["norm"]["over_torch"] == 1 and seen[-1] == 0


def test_what_runs_unless_it_is_said() -> None:
    everything = gpu_matmul._names(())
    assert len(everything) == 41 and not any(
        name.startswith("codebook") and "A8" in name for name in everything
    )
    for usual in (gpu_matmul.GEMM, gpu_matmul.DECODE):
        assert set(usual) < set(everything) and sorted(gpu_matmul._names((), usual)) == sorted(usual)
    assert gpu_matmul._names(("nested 2", "W5"), usual) == ["W5", "nested 2"]
    assert gpu_matmul._names(("nested 2 ", "W5A"), usual) == ["W5A8", "nested 2 to 5"]
    # the kernels of what is timed are those that are checked
    assert [gpu_matmul._awkward(m) for m in gpu_matmul.TOKENS] == [1, 13, 13, 13, 13, 50, 200, 300, 300]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_nothing_is_timed_without_a_gpu() -> None:
    with pytest.raises(InputError, match="no CUDA device"):
        bench.run("gemm", only=("W4A8",))


def timed(part: str) -> dict[str, Any]:
    """Made-up figures of a part, with all that tables and plots read."""
    variant = {"us": 10.0, "gb_per_s": 1000.0, "of_copy": 0.5, "over_float16": 2.0, "over_fp16": 1.5}
    variant |= {"tokens_per_s": 1e5, "over_torch": 3.0, "over_sdpa": 1.2}
    head = {"bench": "gpu", "part": part, "device": "a GPU", "checked": {}}
    rows: list[dict[str, Any]]
    if part == "quantize":
        kmeans = {"rows": [{"shape": [64, 64], "layers": 4, "ms": 1.5, "ns_per_weight": 0.4}]}
        layer = {"shape": [64, 64], "ms": 2.0, "plain_ms": 30.0, "codes_differ": 0}
        seconds = {"rtn": 0.1, "gptq": 2.5}
        kmeans |= {"model_seconds": 4.0, "ns_per_weight": 0.4}
        apart = {"what": "GPTQ, 4 bits", "beside": "the CPU", "codes": 4096, "equal_codes": 0.99}
        agreement = [apart | {"error": -0.002, "tolerance": 1e-3}]
        more = {"seconds_per_billion": seconds, "agreement": agreement}
        return head | {"gptq": layer, "kmeans": kmeans} | more
    if part == "attention":
        rows = [{"model": "a model", "length": n, "batch": b} for n in (128, 256) for b in (1, 16)]
    elif part == "activations":
        rows = [{"columns": c, "tokens": m} for c in (4096, 11008) for m in (1, 16)]
    elif part == "decode":
        rows = [{"tokens": m} for m in (1, 16, 128)]
    else:
        tokens = (1,) if part == "gemv" else (1, 16, 256)
        rows = [{"out": out, "in": 4096, "tokens": m} for out in (4096, 11008) for m in tokens]
        head |= {"averages": {"W4": 2.0}, "matrix_rates": {"int8": 1000.0}}
    names = ("fp16", "int4", "W4", "W8A8", "cuBLAS float16", "codebook 3")
    made = {name: {k: v * (1 + i) for k, v in variant.items()} for i, name in enumerate(names)}
    return head | {"rows": [row | {"copy_gb_per_s": 2000.0, "variants": made} for row in rows]}


@pytest.mark.parametrize(
    ("part", "title", "points"),
    [
        ("gemv", "4096 x 4096", {"codebooks by row": [(8e3 * 6e3 * 60 / 4096**2, 12.0)]}),
        ("gemm", "11008 x 4096", {"W4": [(1, 6.0), (16, 6.0), (256, 6.0)]}),
        ("decode", "all linears of a Llama-7B", {"fp16": [(1, 1e5), (16, 1e5), (128, 1e5)]}),
        ("attention", "a model, 256 tokens in the cache", {"int4": [(1, 3.0), (16, 3.0)]}),
        ("activations", "4096 columns", {"W4": [(1, 30.0), (16, 30.0)]}),
        ("quantize", "methods", {}),
    ],
)
def test_figures_are_shown_and_drawn(
    tmp_path: Path, part: str, title: str, points: dict[str, list[tuple[float, float]]]
) -> None:
    figures = timed(part)
    shown = "\n".join(bench.lines(figures))
    if part == "gemv":
        assert "out 11008, in 4096, tokens 1; copy 2000 GB/s" in shown
        assert any(line.startswith("W4 ") and "150.00" in line for line in shown.splitlines())
    (panel,) = (panel for panel in bench._panels(figures) if panel.title == title)
    assert {label: panel.points[label] for label in points} == points
    assert panel.bars == figures.get("seconds_per_billion", {})
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"{part}.png"
    bench.plot(figures, picture)
    assert picture.stat().st_size > 5000


def made_up(
    times: dict[str, float], out: int = 11008, columns: int = 4096, tokens: int = 1, **more: Any
) -> dict[str, Any]:
    """A row with these microseconds, where cuBLAS float16 takes 100."""
    variants = {name: {"us": us, "over_float16": 100 / us} for name, us in times.items()}
    return {
        "out": out,
        "in": columns,
        "tokens": tokens,
        "copy_gb_per_s": 2000.0,
        "variants": variants,
    } | more


def targets_of(part: str, rows: list[dict[str, Any]]) -> dict[str, tuple[float, bool]]:
    made = gpu_targets.targets({"part": part, "rows": rows})
    assert all(target["wanted"][:2] in (">=", "<=") for target in made)
    return {target["target"]: (pytest.approx(target["measured"], rel=1e-3), target["met"]) for target in made}


def test_targets_of_one_token() -> None:
    # 11008 x 4096 weights are 16.908, 22.544 and 45.089 MB at 3, 4 and 8 bits; a copy takes 8.454, 11.27, 22.54 us
    some = made_up({"W3": 17.0, "W4": 16.0, "W8": 25.0})
    slow = made_up({"W8": 56.0}, 4096, 11008)
    small = made_up({"W3": 90.0, "W8": 90.0}, 4096, 4096)  # does not count
    assert targets_of("gemv", [some, slow, small]) == {
        "group int, 8 bits: share of a copy, packed weights alone": (0.40258, False),
        "group int, 8 bits: speed over cuBLAS float16": (1.7857, False),
        "group int, 4 bits: share of a copy, packed weights alone": (0.70451, True),
        "group int, 4 bits: speed over cuBLAS float16": (6.25, True),
        "group int, 3 bits: share of a copy, packed weights alone": (0.49730, False),
        "group int, 3 bits: speed over cuBLAS float16": (5.8824, True),
    }
    widths = {f"codebook {b}": float(10 * b) for b in range(3, 9)}
    order = "codebooks by row, 3 to 8 bits: time over that of the next width"
    assert targets_of("gemv", [made_up(widths)])[order] == (0.875, True)  # 70 / 80
    widths["codebook 5"] = 66.0
    assert targets_of("gemv", [made_up(widths)])[order] == (1.1, False)  # 66 / 60


def test_targets_of_many_tokens() -> None:
    tokens = (1, 2, 4, 8, 16, 64, 256, 512, 1024)
    times = {"W4A8": 50.0, "W8A8": 40.0, "MixLLM p10": 55.0, "Atom W4A4": 50.0}
    rows = [made_up(times, tokens=m) for m in tokens]
    average = "1 to 1024 tokens: speed over cuBLAS float16"
    wanted = {
        f"W4A8, {average}": (2.0, True),
        f"W8A8, {average}": (2.5, True),
        "W4.4A8 (MixLLM p10), the same: over W4A8's": (50 / 55, False),
        "Atom W4A4, 512 tokens: speed over W8A8": (0.8, False),
        "Atom W4A4, 512 tokens: speed over cuBLAS float16": (2.0, True),
    }
    assert targets_of("gemm", rows) == wanted
    slow = [made_up({"W4A8": 100.0}, 4096, 4096, m) for m in tokens]
    assert targets_of("gemm", rows + slow)[f"W4A8, {average}"] == (1.5, False)  # of 2 and 1
    assert targets_of("gemm", rows + slow[:-1]) == wanted  # a shape without 1024 tokens is none
    assert list(targets_of("gemm", rows[:-2])) == []
    assert list(targets_of("gemm", [made_up({"Atom W4A4": 60.0}, tokens=512)])) == [list(wanted)[-1]]


def test_targets_of_attention_and_quantizing() -> None:
    def row(batch: int, length: int, **times: float) -> dict[str, Any]:
        return made_up(times, model="M", batch=batch, length=length)

    met = targets_of(
        "attention", [row(128, 1024, fp16=80.0, sdpa=70.0, int4=20.0), row(1, 1024, fp16=9, int4=1)]
    )
    assert list(met.values()) == [(3.5, True)]
    assert list(targets_of("attention", [row(128, 1024, fp16=60.0, int4=20.0)]).values()) == [(3.0, False)]
    assert targets_of("attention", [row(128, 4096, fp16=60.0, int4=20.0)]) == {}
    figures = timed("quantize") | {"gptq": {"shape": [4096, 4096], "ms": 300.0, "plain_ms": 900.0}}
    assert [(t["wanted"], t["measured"], t["met"]) for t in gpu_targets.targets(figures)] == [
        ("<= 60", 4.0, True),
        ("<= 1000", 300.0, True),
        (">= 1", 3.0, True),
        ("<= 0.001", 0.002, False),
    ]
    assert gpu_targets.targets(timed("decode")) == []


def test_targets_are_shown() -> None:
    figures = timed("gemm") | {
        "targets": gpu_targets.targets({"part": "gemv", "rows": [made_up({"W8": 25.0})]})
    }
    shown = list(bench.lines(figures))
    at = next(i for i, line in enumerate(shown) if line.startswith("\ntarget"))
    assert shown[at + 1].split()[-4:] == [">=", "0.8", "0.9018", "met"]
    assert json.loads(shown[-1])["targets"][1]["met"] is True


def test_exact_clusters_are_the_best() -> None:
    weight = torch.tensor([[5.0, 0.0, 1.0, 9.0, 4.0, 10.0]])
    codes, tables = gpu_quantize.exact(weight, torch.tensor([[1.0, 1.0, 3.0, 1.0, 1.0, 1.0]]), 1, 2)
    assert codes.tolist() == [[1, 0, 0, 2, 1, 3]]  # 0 1 4 5 | 9 10, then 0 1 | 4 5 | 9 | 10
    assert tables[1].tolist() == [[2.0, 9.5]] and tables[2].tolist() == [[0.75, 4.5, 9.0, 10.0]]


def test_without_matplotlib_the_plot_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench.plot(timed("gemm"), tmp_path / "gemm.png")
    assert "matplotlib is not there" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_plot_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"speed.bmp: expected a name that ends in .png"):
        bench.check_plot(Path("speed.bmp"), False)
    with pytest.raises(InputError, match="with --small there are no times"):
        bench.check_plot(Path("speed.png"), True)


def test_the_commands_of_the_docs_run_from_a_source_tree() -> None:
    root = Path(__file__).parent.parent
    text = (root / "docs/results/gpu.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if "anybit.bench.gpu " in line or "-m pytest -n" in line]
    assert all(line.startswith("PYTHONPATH=src python -m ") for line in commands)
    tests = {word for line in commands for word in line.split() if word.startswith("tests/")}
    assert {f"tests/{file.name}" for file in (root / "tests").glob("test_gpu_*.py")} < tests
    assert all((root / test).is_file() for test in tests)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--rounds", "0"), "argument --rounds: '0': expected a whole number from 1 up"),
        (("--tokens", "1,0"), "argument --tokens: '0': expected a whole number from 1 up"),
        (("--tokens=-1",), "argument --tokens: '-1': expected"),
        (("--tokens", "a,b"), "argument --tokens: 'a': expected"),
    ],
)
def test_wrong_numbers_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "gemm", *given])
    with pytest.raises(SystemExit):
        bench.main()
    assert said in capsys.readouterr().err


def test_a_small_run_without_a_gpu_says_what_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda: "PyTorch finds no GPU here")
    with pytest.raises(InputError, match="finds no GPU here; without a GPU TRITON_INTERPRET=1 runs it"):
        bench.run("gemv", small=True)
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "TRITON_INTERPRET=1" in capsys.readouterr().out
