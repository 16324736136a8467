"""Finetuning of 2/4/16: what is trained is what is stored, the layout stays, and the held-out error falls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from anybit import driver
from anybit import estimate as estimate_module
from anybit.artifact.verify import verify
from anybit.calibration.moments import Activations, Collector
from anybit.calibration.streaming import BlockCall, StreamedModel
from anybit.checkpoint.directory import open_checkpoint
from anybit.errors import InputError
from anybit.estimate import estimate
from anybit.formats import TwoFour
from anybit.formats.weight import QuantizedWeight, layout_of, pack
from anybit.methods import finetune, two_four_blocks
from anybit.methods.finetune import Task, Trainable
from anybit.plan import make_plan
from tests import builders
from tests.builders import random, two_four_spec, weight_and_stats
from tests.probes import Recorder, digests, stop_at

SHAPES = [(20, 64), (33, 192), (5, 40), (16, 7), (1, 16)]
CONFIG = builders.options(
    "two-four-sixteen", wide_groups=0.3, exclusive_outliers=0.01, samples=9, seq_len=24, finetune=True
)


def started(shape: tuple[int, int], group_size: int = 16) -> Trainable:
    weight, stats = weight_and_stats(*shape)
    return Trainable(*two_four_blocks.compensate(weight, stats, two_four_spec(0.25, group_size, 0.02)))


def tile_of(weight: QuantizedWeight) -> TwoFour:
    (tile,) = weight.tiles
    assert isinstance(tile, TwoFour)
    return tile


def assert_equal(a: QuantizedWeight, b: QuantizedWeight) -> None:
    left, right = pack(a), pack(b)
    assert left.layout == right.layout
    for field, tensor in left.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), right.tensors[field].view(torch.uint8)), field


# ---- one weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [16, 8])
def test_what_is_trained_is_what_is_stored(shape: tuple[int, int], group_size: int) -> None:
    """Forward passes see the stored weights bit for bit: at the start, which is the quantized weight, and after."""
    weight = started(shape, group_size)
    assert_equal(weight.stored(), weight.start)
    for seed in (7, 8):
        weight.backward(random(*shape, seed=seed))
        rates = [{"params": [weight.codes], "lr": 0.7}, {"params": weight.others(), "lr": 0.3}]
        torch.optim.Adam(rates).step()
        weight.confine()
    stored = weight.stored()
    assert torch.equal(weight.rounded().dequantize(), stored.dequantize())
    assert not torch.equal(stored.dequantize(), weight.start.dequantize())
    assert layout_of(stored) == layout_of(weight.start)
    tile, before = tile_of(stored), tile_of(weight.start)
    for field in ("wide", "zeros", "scale_zeros", "wide_zeros"):
        assert torch.equal(getattr(tile, field), getattr(before, field)), field
    assert (tile.codes <= weight.top).all() and (tile.scale_codes <= weight.scale_top).all()
    if weight.start.sparse is not None:
        assert stored.sparse is not None
        assert torch.equal(stored.sparse.columns, weight.start.sparse.columns)
        at = (stored.sparse.rows, stored.sparse.columns)
        assert torch.equal(tile.codes[at], before.codes[at])  # the dense part still holds 0 there
        torch.testing.assert_close(stored.dequantize()[at], stored.sparse.values.float(), rtol=0, atol=0)


def test_gradients() -> None:
    """Straight through for codes; of scales and outliers, the derivative of what is stored."""
    weight = started((33, 192))
    gradient = random(33, 192, seed=7)
    weight.backward(gradient)
    tile, sparse = tile_of(weight.start), weight.start.sparse
    assert sparse is not None
    narrow, wide = TwoFour.channels(tile.wide, 192)
    scale = torch.empty(33, 192)
    scale[:, narrow] = tile.scales().repeat_interleave(16, 1)
    scale[:, wide] = tile.wide_scales.float()[:, None]
    expected = (gradient * scale).index_put((sparse.rows, sparse.columns), torch.tensor(0.0))
    torch.testing.assert_close(weight.codes.grad, expected)
    assert len(sparse.values) and weight.wide_factors.grad is not None
    torch.testing.assert_close(weight.wide_factors.grad, (gradient * tile.dequantize())[:, wide].sum(1))
    per_group = (gradient * tile.dequantize())[:, narrow].view(33, -1, 16).sum(2)
    assert weight.scale_factors.grad is not None
    torch.testing.assert_close(
        weight.scale_factors.grad[2], per_group[32], rtol=1e-4, atol=1e-4
    )  # one row's part
    units = tile.codes.float()[:, narrow].view(33, -1, 16) - tile.zeros.float()[..., None]
    by_code = (gradient[:, narrow].view(33, -1, 16) * units).sum(2)
    torch.testing.assert_close(
        weight.scale_codes.grad, by_code * tile.scale_scales.float().repeat_interleave(16, 0)[:33]
    )
    assert weight.value_factors.grad is not None
    torch.testing.assert_close(
        weight.value_factors.grad, gradient[sparse.rows, sparse.columns] * sparse.values.float()
    )


# ---- one block


class Block(nn.Module):
    """Two linears and what is between them, called as decoder blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=i) / 6)

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden + self.second(nn.functional.gelu(self.first(hidden))),)


def tiny_task(windows: int = 16) -> tuple[Task, dict[str, Trainable]]:
    block, inputs, targets = Block(), Activations(windows, Path()), Activations(windows, Path())
    linears = {"first": block.first, "second": block.second}
    mixing = torch.eye(32) + random(32, 32, seed=99) / 4
    with torch.no_grad(), Collector(linears, hessian=True) as collector:
        for i in range(windows):
            inputs.put(i, random(1, 512, 32, seed=100 + i) @ mixing)
            targets.put(i, block(inputs.get(i))[0])
            collector.finish_forward()
    weights = {
        name: Trainable(
            *two_four_blocks.compensate(
                module.weight.detach(), collector.stats[name], two_four_spec(0.25, outliers=0.01)
            )
        )
        for name, module in linears.items()
    }
    return Task(block, BlockCall((), {}), inputs, targets), weights


def test_the_held_out_error_falls() -> None:
    task, weights = tiny_task()
    kept = {name: p.detach().clone() for name, p in task.block.named_parameters()}
    made, errors = finetune.finetune(task, weights, 8, 0)
    assert min(errors) < 0.9 * errors[0]
    again = {name: Trainable(weight, weight.dequantize()) for name, weight in made.items()}
    _, held_out = finetune.split(16)
    assert finetune.error_of(task, again, held_out) == min(errors)
    for name, parameter in task.block.named_parameters():  # the block itself stays as it was
        assert torch.equal(parameter, kept[name]) and parameter.grad is None
    for name, weight in weights.items():
        assert layout_of(made[name]) == layout_of(weight.start)
        assert torch.equal(tile_of(made[name]).wide, tile_of(weight.start).wide)


def test_it_stops_early_and_never_makes_it_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "CODE_RATE", 5.0)
    task, weights = tiny_task()
    told = []
    made, errors = finetune.finetune(task, weights, 20, 0, told.append)
    assert len(errors) == 1 + finetune.PATIENCE and min(errors[1:]) > errors[0]
    assert sum(told) == finetune.passes(16, 20)
    for name, weight in weights.items():
        assert_equal(made[name], weight.start)


def test_the_same_again_and_another_seed() -> None:
    runs = [finetune.finetune(*tiny_task(), 2, seed)[0] for seed in (0, 0, 1)]
    for name in runs[0]:
        assert_equal(runs[0][name], runs[1][name])
    assert any(not torch.equal(runs[0][n].dequantize(), runs[2][n].dequantize()) for n in runs[0])


@pytest.mark.parametrize(("windows", "held_out"), [(2, [1]), (8, [7]), (16, [7, 15]), (17, [0, 8, 16])])
def test_windows_are_held_out(windows: int, held_out: list[int]) -> None:
    training, found = finetune.split(windows)
    assert sorted(found) == held_out
    assert sorted(training + found) == list(range(windows)) and training


# ---- a whole model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_artifacts(family: str, model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    report = Recorder()
    driver.quantize(model_dir(family), tmp_path / "out", CONFIG, calibration=str(text_file), report=report)
    verify(tmp_path / "out")
    assert sum("error on held-out windows" in text for text in report.said) == 2
    for description, (done, total) in report.done.items():
        assert done == total, description
    assert "--finetune" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_it_resumes_to_the_same_bytes(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: str, config: builders.Options = CONFIG) -> dict[str, str]:
        report = Recorder()
        driver.quantize(model_dir("llama"), tmp_path / out, config, calibration=str(text_file), report=report)
        assert all(done == total for done, total in report.done.values())
        return digests(tmp_path / out)

    whole = run("whole")
    stop_at(monkeypatch, 3)
    with pytest.raises(InputError, match="2 of 3 shards are kept"):
        run("stopped")
    monkeypatch.undo()
    with pytest.raises(InputError, match="unfinished run with another model, text, machine or options"):
        run("stopped", builders.changed(CONFIG, finetune=False))
    assert run("stopped") == whole
    assert run("plain", builders.changed(CONFIG, finetune=False)) != whole


def test_the_estimate_knows_of_it(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "_matmul_speed", lambda dtype: (1e10, 1.0))
    streamed = StreamedModel(open_checkpoint(model_dir("llama")), torch.float32)
    plain = builders.changed(CONFIG, finetune=False)
    with_it, without = (
        estimate(streamed, make_plan(streamed, config), config, tmp_path) for config in (CONFIG, plain)
    )
    assert with_it["seconds"] > 2 * without["seconds"]
    assert with_it["peak_memory_bytes"] > without["peak_memory_bytes"]
    assert with_it["size_bytes"] == pytest.approx(without["size_bytes"], abs=100)


def test_one_window_is_not_enough(model_dir: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    config = builders.options("two-four-sixteen", samples=2, seq_len=100, finetune=True)
    text = tmp_path / "short.txt"
    text.write_text(text_file.read_text()[:150])
    with pytest.raises(InputError, match=r"one window of 100 tokens.*--seq-len"):
        driver.quantize(model_dir("llama"), tmp_path / "out", config, calibration=str(text))
    assert not (tmp_path / "out.partial").exists()
