"""Artifacts that run without PyTorch: what is read from files is what Transformers loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import anybit
from anybit import Engine
from anybit.artifact.coded_planes import PlaneReader, PlaneRows, enhancement, expanded
from anybit.artifact.enhancements import Enhancements, read_enhancements
from anybit.artifact.entry import Entry
from anybit.artifact.reader import open_stored
from anybit.config import Json
from anybit.engine.description import Unsupported
from anybit.engine.stored import StoredModel, grown
from anybit.errors import InputError
from anybit.formats import NestedLayout
from anybit.formats.layout import LayerLayout
from anybit.generate import Generator
from anybit.kernels import cpu
from tests import builders
from tests.builders import Said
from tests.engine.models import FAMILIES, random_model, saved

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
]
TOKENS = list(range(3, 60))


def both(folder: Path, tokenizer: Any, **how: Any) -> tuple[Engine, Engine]:
    """An engine of the files, and one of what Transformers has loaded."""
    stored = Engine(folder, codebook_precision="fp16", threads=2, **how)
    assert isinstance(stored._source, StoredModel)
    return stored, Engine(
        anybit.load(folder), tokenizer=tokenizer, codebook_precision="fp16", threads=2, **how
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Every configuration that an artifact has is read as Transformers reads it: nothing falls back to it."""
    model = random_model(family, vocab_size=len(tokenizer))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = anybit.quantize(tmp_path / "model", tmp_path / "out", anybit.RTN(bits=8, group_size=8)).path
    stored, loaded = both(out, tokenizer)
    assert np.array_equal(stored.logits(TOKENS), loaded.logits(TOKENS))
    assert stored.context == loaded.context


@pytest.mark.parametrize(
    "options",
    [
        anybit.RTN(bits=4, group_size=32, embed_bits=8),
        anybit.RTN(bits=3, group_size=32, embed_bits=16),
        anybit.MixLLM(samples=2, seq_len=24),
        anybit.Atom(samples=2, seq_len=24),
        anybit.SqueezeLLM(bits=3, samples=2, seq_len=24),
        anybit.AnyPrecision(samples=2, seq_len=24),
        anybit.CMPQ(bits=2.5, samples=2, seq_len=24),
        anybit.TwoFourSixteen(samples=2, seq_len=24),
    ],
    ids=lambda options: options.name,
)
def test_every_format(
    model_dir: Callable[[str], Path], tmp_path: Path, text_file: Path, tokenizer: Any, options: Any
) -> None:
    out = anybit.quantize(model_dir("llama"), tmp_path / "out", options, calibration=str(text_file)).path
    stored, loaded = both(out, tokenizer)
    assert stored.widths == loaded.widths
    for bits in stored.widths:
        assert np.array_equal(stored.logits(TOKENS, bits), loaded.logits(TOKENS, bits))


def test_every_level_and_the_budget(anybit_artifact: Path, tokenizer: Any) -> None:
    stored, loaded = both(anybit_artifact, tokenizer)
    assert stored.widths == loaded.widths and len(stored.widths) > 3
    for bits in stored.widths[::7]:
        assert np.array_equal(stored.logits(TOKENS, bits), loaded.logits(TOKENS, bits))
    middle = stored.widths[len(stored.widths) // 2]
    narrow = Engine(anybit_artifact, codebook_precision="fp16", bits=middle)
    assert narrow.widths == stored.widths[: stored.widths.index(middle) + 1]
    assert np.array_equal(narrow.logits(TOKENS), stored.logits(TOKENS, middle))
    with pytest.raises(InputError, match="average widths from"):
        Engine(anybit_artifact, bits=12)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bit'"):
        Engine(anybit_artifact, bit=4)  # type: ignore[call-arg]


@pytest.mark.e2e
def test_neither_pytorch_nor_transformers_is_imported(
    anybit_artifact: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By the commands, whatever they do with an artifact or a plain checkpoint of a family that the engine has."""
    plain = saved(tmp_path / "plain", tokenizer)
    script = (
        "import sys\n"
        "from anybit.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    for asked in (
        ["generate", str(anybit_artifact), "-p", "ab", "--max-new-tokens", "3"],
        ["chat", str(anybit_artifact)],
        ["generate", str(plain), "-p", "ab", "--max-new-tokens", "3"],
        ["chat", str(plain), "--max-new-tokens", "3"],
    ):
        ran = subprocess.run(
            [sys.executable, "-c", script, *asked], input="hi\n", capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert "LOADED []" in ran.stdout, ran.stdout


def edited(folder: Path, change: Callable[[Json], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_default_that_is_left_out_is_left_to_transformers(anybit_copy: Path) -> None:
    whole = Generator(str(anybit_copy), codebook_precision="fp16")
    assert whole.native
    expected = whole.generate(whole.encode("ab"), 8)
    edited(anybit_copy, lambda config: config.pop("hidden_act"))
    report = Said()
    without = Generator(str(anybit_copy), report=report)
    assert not without.native
    assert report.lines == ["runs inside Transformers: its config.json has no hidden_act"]
    assert without.generate(without.encode("ab"), 8) == expected
    with pytest.raises(InputError, match="does not run this: its config"):
        Generator(str(anybit_copy), engine="native")


def test_texts_end_by_config_json_where_there_is_no_generation_config(
    anybit_copy: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (anybit_copy / "generation_config.json").unlink()
    edited(anybit_copy, lambda config: config.update(eos_token_id=[7, 9]))
    stored, loaded = both(anybit_copy, tokenizer)
    assert stored.ends == loaded.ends == {7, 9}


def test_an_empty_norm_is_refused(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    """It would be a norm that the family does not have."""
    folder = Path(shutil.copytree(artifact_of("llama"), tmp_path / "copy"))
    name = "model.layers.0.input_layernorm.weight"
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    save_file(load_file(file) | {name: torch.zeros(0)}, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"input_layernorm\.weight is of \[0\], expected a row"):
        Engine(folder)


def test_what_does_not_fit(anybit_copy: Path) -> None:
    edited(anybit_copy, lambda config: config.update(intermediate_size=config["intermediate_size"] * 2))
    with pytest.raises(InputError, match=r"gate is .* expected"):
        Engine(anybit_copy)
    edited(anybit_copy, lambda config: config.update(vocab_size=10**9))
    with pytest.raises(InputError, match="vocab_size is 1000000000, but"):
        Engine(anybit_copy)


def test_a_tensor_without_a_use_is_named(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact_of("llama", embed_bits=16), tmp_path / "copy"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    save_file(load_file(file) | {"model.extra.weight": torch.zeros(3)}, file, {"format": "pt"})
    index["weight_map"]["model.extra.weight"] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match=r"it has the tensor model\.extra\.weight"):
        Engine(folder)
    with pytest.raises(InputError, match=r"model\.extra\.weight"):
        Generator(str(folder))


def test_damaged_tensors_are_refused(artifact_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact_of("llama", embed_bits=16), tmp_path / "copy"))
    for file in folder.glob("model*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][3, 4] = torch.nan
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"embed_tokens\.weight holds NaN or Inf: its file is damaged"):
        Engine(folder)


def test_enhancement_layers_read_by_threads(anybit_artifact: Path) -> None:
    """In any number, they fill the same rows; one that is damaged is named, and nobody waits for it."""
    artifact = open_stored(anybit_artifact)
    found = artifact.enhancements
    assert found is not None
    counts = found.counts(found.present - 1)
    wide = found.layouts_at(counts[-1])

    def arrays() -> dict[str, dict[str, np.ndarray]]:
        made = {}
        for name, layout in wide.items():
            fields = artifact.stored.packed[name].stored_tensors()
            held = {field: artifact.tensors[f"{name}.{field}"].array() for field in fields}
            made[name] = grown(expanded(name, artifact.stored.packed[name], held), layout)
        return made

    one, many = arrays(), arrays()
    for level in range(1, len(counts)):
        found.read_into(level, counts[level], counts[level - 1], one)
    found.read_all(counts, many, 5)
    for name, fields in one.items():
        for field, array in fields.items():
            assert np.array_equal(array, many[name][field]), (name, field)


def test_plain_planes_between_coded_ones_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread decodes plane 4 of one file when plane 2 of an earlier one is late, and plane 3 lies open between."""
    rows, width = 64, 96
    random = np.random.default_rng(0)
    words = {1: random.integers(0, 2**32, (rows, width // 32), np.uint32)}
    for plane in (2, 3, 4):  # mostly inner halves: coding pays
        outer = np.packbits(random.random((rows, width)) < 0.1, axis=1, bitorder="little").view(np.uint32)
        words[plane] = outer ^ words[1]
    shapes = np.zeros(rows // 2, np.uint8)

    class Held:
        columns: ClassVar = {"layer": width}

        def rows(self, name: str, plane: int, first: int, last: int) -> torch.Tensor:
            return torch.from_numpy(words[plane][first:last])

        def shapes(self, name: str) -> torch.Tensor:
            return torch.from_numpy(shapes)

    entries = [Entry("", 0, "", 1.0, 0.0, "", 0, 0)]
    for plane in (2, 3, 4):
        made = enhancement(Held(), [("layer", plane, 0, rows)], coded=plane != 3)
        assert ("coded" in made) == (plane != 3)
        save_file(made, tmp_path / f"{plane}")
        entries.append(Entry(f"{plane}", 0, "", float(plane), 0.0, "", 0, 0))
    base = {"layer": LayerLayout((rows, width), (NestedLayout.of([rows], 0),))}
    found = Enhancements(tmp_path, base, (), {}, tuple(entries), len(entries))
    read = PlaneReader.read

    def late(self: PlaneReader, asked: PlaneRows, to: np.ndarray) -> None:
        time.sleep(0.1 if asked.plane == 2 else 0)
        read(self, asked, to)

    monkeypatch.setattr(PlaneReader, "read", late)
    fields = {f"plane_{p}": np.zeros_like(words[p]) for p in (2, 3, 4)}
    arrays = {"layer": {"plane_1": words[1], "shapes": shapes, **fields}}
    found.read_all([{"layer": (rows,) * n} for n in (1, 2, 3, 4)], arrays, 3)
    for plane in (2, 3, 4):
        assert np.array_equal(arrays["layer"][f"plane_{plane}"], words[plane]), plane


def test_a_damaged_enhancement_layer_is_named(tmp_path: Path, model_dir: Any, text_file: Path) -> None:
    options = builders.options("anybit", samples=2, seq_len=24, coded=True)
    out = anybit.quantize(model_dir("llama"), tmp_path / "out", options, calibration=str(text_file)).path
    artifact = open_stored(out)
    found = artifact.enhancements
    assert found is not None
    counts = found.counts(found.present - 1)
    coded = [i for i in range(1, len(counts)) if "coded" in found._read(i)]
    assert coded
    file = out / found.entries[coded[0]].file
    tensors, after = load_file(file), found.entries[coded[0] - 1].chain
    tensors["coded"][:] = 255
    save_file(tensors, file, {"after": after})
    again = read_enhancements(out, artifact.quantization["progressive"], artifact.stored)
    assert again is not None
    arrays = {
        name: {f: np.zeros(shape, dtype.numpy) for f, (dtype, shape) in layout.stored_tensors().items()}
        for name, layout in again.layouts_at(counts[-1]).items()
    }
    with pytest.raises(InputError, match=f"{file.name}.*damaged|damaged"):
        again.read_all(counts, arrays, 3)
