"""End-to-end tuning (`--tune`): gradients by autograd, resuming, what may not get worse, and whole artifacts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import anybit
from anybit import estimate as estimate_module
from anybit.artifact.verify import verify
from anybit.artifact.writer import ArtifactWriter
from anybit.calibration.stats import LinearStats
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
from anybit.estimate import estimate
from anybit.formats import Nested
from anybit.kernels import cpu
from anybit.loader import load
from anybit.methods import anybit as method
from anybit.methods import end_to_end, nested_codes
from anybit.methods.end_to_end import Training
from anybit.methods.ordering import order
from anybit.plan import make_plan
from tests import builders
from tests.probes import Killed, Recorder, digests, interrupt, logits, stored

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no native extension: {cpu.why_not()}")
FAMILIES = ["llama", "llama-tied", "qwen3", "gemma3", "gpt2", "opt"]
CONFIG = builders.options(
    "anybit", samples=4, gradient_samples=2, seq_len=64, effort="quick", tune=True, kept_channels=0.05
)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(method.EFFORTS["quick"], steps=8)
    monkeypatch.setitem(method.EFFORTS, "quick", quick)


def training(
    folder: Path,
    place: Path,
    kept: int = 2,
    count: int = 6,
    embedding: bool = True,
    kept_bits: int = 8,
    **rest: Any,
) -> Training:
    """Of a tiny model all of whose matrices are nested, codes rounded without statistics."""
    streamed = StreamedModel(open_checkpoint(folder), torch.float32)
    tiles: dict[str, Nested] = {}
    losses: dict[str, Tensor] = {}
    spec = builders.options("anybit", kept_channels=kept / 100, kept_bits=kept_bits, descent=0).layer_spec()

    def add(name: str, weight: Tensor) -> None:
        stats = LinearStats.empty(weight.shape[1], hessian=True)
        stats.add(
            torch.randn(2 * weight.shape[1], weight.shape[1], generator=torch.Generator().manual_seed(1))
        )
        made = nested_codes.quantize(weight, stats, spec)
        (tile,) = made.tiles
        assert isinstance(tile, Nested) and made.losses is not None
        tiles[name], losses[name] = tile, made.losses

    matrices: dict[str, tuple[str, ...]] = {}
    for name in streamed.all_linears():
        add(name, streamed.weight(name))
        matrices[name] = (name,)
    model = streamed.model
    own, head = (
        end_to_end.name_of(model, m) for m in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    beside = []
    if embedding:
        assert own is not None and head is not None
        tied = f"{head}.weight" not in streamed.names
        for name in (own,) if tied else (own, head):
            add(name, streamed.read(f"{name}.weight").float())
            matrices[name] = (own, head) if tied else (name,)
            beside.append(name)
    columns = {name: tile.codes.shape[1] for name, tile in tiles.items()}
    tokens = torch.randint(3, 100, (8, 24), generator=torch.Generator().manual_seed(0))
    return Training(
        streamed, tiles.__getitem__, matrices, order(losses, columns, beside=beside), 8.0, tokens[:6], tokens[6:],
        count, 0, place, **rest,
    )  # fmt: skip


def weights_of(run: end_to_end._Run, counts: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights as a function of the parameters that autograd can follow."""
    made, student = {}, run.student
    for name, matrix in student.matrices.items():
        tile = run.training.tile(name)
        codes = tile.codes.clone()
        for bits, first, last in Nested.spans(counts[name]):
            codes[first:last] >>= 8 - bits
        without = replace(
            tile, counts=tuple(counts[name]), codes=codes, kept_values=torch.zeros_like(tile.kept_values)
        )
        scale = parameters["scales"][matrix.of_scales].exp()[tile.order.argsort(), None]
        values, moved = tile.kept_weights, parameters["kept"][matrix.of_kept]
        if tile.kept_scales is None:
            size = values.square().mean(1, keepdim=True).sqrt() if values.numel() else 0
            values = values + moved.view_as(values) * size
        else:
            values = values * parameters["scales"][matrix.of_scales].exp()[:, None] * moved.exp()
        dense = without.dequantize() * scale
        dense = dense.index_add(1, tile.kept, values[tile.order.argsort()])
        module = student.model.get_submodule(name)
        shape = module.weight.shape
        made[f"{name}.weight"] = (
            dense.T if dense.shape != shape or type(module).__name__ == "Conv1D" else dense
        )
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "kept_bits"), [(2.3, 8), (4.0, 8), (4.0, 16)])
def test_gradients_are_those_of_autograd(
    family: str,
    bits: float,
    kept_bits: int,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_to_end, "_draws", lambda training: [[(0, bits), (1, bits)]])
    run = end_to_end._Run(training(model_dir(family), tmp_path, kept_bits=kept_bits))
    student, counts = run.student, run._counts(bits)
    base = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32).eval()
    leaves = {name: torch.zeros_like(p).requires_grad_() for name, p in student.parameters.items()}
    loss = torch.zeros(())
    for window in (0, 1):
        tokens = run.training.tokens[window][None]
        wanted = logits(base, tokens).log_softmax(-1)
        own = functional_call(
            base, weights_of(run, counts, leaves), (), {"input_ids": tokens}
        ).logits.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - own)).sum(-1).mean()
        loss = loss + (divergence + end_to_end.FLOOR).log() / 2
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    run._step(0)
    for name, parameter in student.parameters.items():
        assert parameter.grad is not None
        largest = float(expected[name].abs().max())
        assert largest > 0
        torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-3, atol=1e-4 * largest)


@pytest.mark.parametrize("kept_bits", [8, 16])
def test_the_model_is_the_one_that_is_stored(
    kept_bits: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """At every width, also after parameters have moved."""
    run = end_to_end._Run(training(model_dir("llama-tied"), tmp_path, kept_bits=kept_bits))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in run.student.parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    tensors = run.student.stored()
    for bits in (2.0, 3.1, 8.0):
        counts = run._counts(bits)
        run.student.become(counts)
        for name in run.student.matrices:
            tile = replace(
                run.training.tile(name),
                **{
                    field: tensors[f"{name}.{field}"]
                    for field in ("scales", "kept_values", "kept_scales")
                    if f"{name}.{field}" in tensors
                },
            )
            layout = tile.layout().with_counts(counts[name])
            r, c = len(tile.order), tile.codes.shape[1] + len(tile.kept)
            whole = tile.tensors()
            planes = {f"plane_{p}": whole[f"plane_{p}"][:n] for p, n in enumerate(counts[name], 1)}
            expected = layout.read(whole | planes, r, c).dequantize()
            assert torch.equal(run.student.model.get_submodule(name).weight, expected)


def test_windows_come_nearer(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of few tokens are also those that are trained on: what is learnt of them says nothing of others."""
    made = training(model_dir("llama"), tmp_path, count=40)
    run = end_to_end._Run(replace(made, highest=3.0, held_out=made.tokens))
    run.all_steps()
    assert len(run.history) == 1 + end_to_end.EXAMINATIONS
    assert min(run.history) < run.history[0] - 0.02


@pytest.mark.parametrize("kept_bits", [8, 16])
def test_it_never_makes_it_worse(
    kept_bits: int, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps far too long, what there was is what comes out."""
    for rate in ("SCALE_RATE", "KEPT_RATE"):
        monkeypatch.setattr(end_to_end, rate, 3.0)
    made = training(model_dir("llama"), tmp_path, count=4, kept_bits=kept_bits)
    found = end_to_end.end_to_end(made)
    for name in made.matrices:
        assert torch.equal(found[f"{name}.scales"], made.tile(name).scales)
        field = "kept_scales" if kept_bits == 8 else "kept_values"
        assert torch.equal(found[f"{name}.{field}"], getattr(made.tile(name), field))


def test_it_resumes_to_the_same_tensors(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_to_end, "SAVED_EVERY", 2)
    whole = end_to_end.end_to_end(training(model_dir("llama-tied"), tmp_path / "whole"))
    original = end_to_end._Run._step

    def stopping(run: Any, step: int) -> None:
        if step == 5:
            raise Killed
        original(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(end_to_end._Run, "_step", stopping)
        with pytest.raises(Killed):
            end_to_end.end_to_end(training(model_dir("llama-tied"), tmp_path / "stopped"))
    report = Recorder()
    again = end_to_end.end_to_end(training(model_dir("llama-tied"), tmp_path / "stopped", report=report))
    assert "resumes: 4 of 6 steps of tuning are done" in report.said
    assert report.done["tunes for all widths at once"] == [6, 6]
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_state_is_not_taken_over(
    damage: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = end_to_end.end_to_end(training(model_dir("llama"), tmp_path / "whole"))
    other = "llama-tied" if damage == "other" else "llama"
    end_to_end.end_to_end(training(model_dir(other), tmp_path / "again"))
    state = tmp_path / "again" / end_to_end.STATE
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-100])
    again = end_to_end.end_to_end(training(model_dir("llama"), tmp_path / "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_a_full_disk_is_said(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(end_to_end, "save_file", full)
    with pytest.raises(InputError, match=r"the state of the tuning before is kept"):
        end_to_end.end_to_end(training(model_dir("llama"), tmp_path))
    assert not list(tmp_path.iterdir())


def test_without_kept_channels_and_with_the_embedding_as_it_is(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    made = end_to_end.end_to_end(training(model_dir("llama"), tmp_path, kept=0, embedding=False))
    assert not any("kept" in name for name in made)
    assert "model.embed_tokens.scales" not in made


def test_every_window_is_read_before_any_is_read_again() -> None:
    made = Training(
        None, None, {}, None, 8.0, torch.zeros(5, 2), torch.zeros(1, 2), 10, 3, Path()  # type: ignore[arg-type]
    )  # fmt: skip
    draws = end_to_end._draws(made)
    windows = [window for step in draws for window, _ in step]
    assert all(sorted(windows[a : a + 5]) == list(range(5)) for a in range(0, 20, 5))
    middle = (end_to_end.LOWEST * 8) ** 0.5
    assert all(low <= middle <= high <= 8 for (_, low), (_, high) in draws)
    narrow = end_to_end._draws(replace(made, highest=2.5))
    assert all(end_to_end.LOWEST <= bits <= 2.5 for step in narrow for _, bits in step)
    assert draws == end_to_end._draws(made) != end_to_end._draws(replace(made, seed=4))


@pytest.mark.parametrize(
    "windows, wanted, held_out",
    [(16, 2, [4, 12]), (3, 2, [1]), (2, 6, [1]), (1, 6, []), (12, 6, [1, 3, 5, 7, 9, 11])],
)
def test_windows_are_held_out(windows: int, wanted: int, held_out: list[int]) -> None:
    training, found = end_to_end.parted(windows, wanted)
    assert found == held_out
    assert sorted(training + found) == list(range(windows)) and training


# ---- a whole model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "gpt2"])
def test_artifacts(
    family: str, few_steps: None, model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    """Only scales and kept channels are others than without; the model runs, at every width."""
    report = Recorder()
    path, plain = tmp_path / "tuned", tmp_path / "plain"
    anybit.quantize(model_dir(family), path, CONFIG, calibration=str(text_file), report=report)
    untuned = builders.changed(CONFIG, tune=False)
    anybit.quantize(model_dir(family), plain, untuned, calibration=str(text_file))
    verify(path)
    for description, (done, total) in report.done.items():
        assert done == total, description
    before, after = stored(plain), stored(path)
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name.rpartition(".")[2] for name in changed} <= {"scales", "kept_scales"}
    assert any(name.endswith(".kept_scales") for name in changed)
    assert any(name.endswith(".scales") for name in changed)
    assert (path / "README.md").read_text().count("--tune") == 1
    ids = torch.arange(3, 40)[None]
    for bits in (2.5, 4, 8):
        assert not torch.equal(logits(load(path, bits=bits), ids), logits(load(plain, bits=bits), ids))


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bytes(
    few_steps: None,
    model_dir: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_to_end, "SAVED_EVERY", 2)

    def run(out: str) -> dict[str, str]:
        anybit.quantize(model_dir("llama"), tmp_path / out, CONFIG, calibration=str(text_file))
        return digests(tmp_path / out)

    whole = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "begin_split", interrupt)
        with pytest.raises(Killed):
            run("stopped")
    state = tmp_path / "stopped.partial" / "tuning" / end_to_end.STATE
    assert int(load_file(state)["step"]) == 8
    with pytest.raises(InputError, match="unfinished run with another model, text, machine or options"):
        untuned = builders.changed(CONFIG, tune=False)
        anybit.quantize(model_dir("llama"), tmp_path / "stopped", untuned, calibration=str(text_file))
    assert run("stopped") == whole
    assert not (tmp_path / "stopped.partial").exists()


def test_the_estimate_knows_of_it(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e10, 1.0))
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), torch.float32)
    plain = builders.changed(CONFIG, tune=False)
    with_it, without = (
        estimate(streamed, make_plan(streamed, config), config, tmp_path) for config in (CONFIG, plain)
    )
    assert with_it["seconds"] > without["seconds"]
    assert math.isclose(with_it["size_bytes"], without["size_bytes"], abs_tol=100)
