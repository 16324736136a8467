"""Fixtures of the whole suite: one thread, no network, tiny models of several families, a byte tokenizer."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the suite shares its machine
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

if "ANYBIT_BUILD" in os.environ:  # `make check-native`: that build instead of the editable install's
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    sys.path.insert(0, os.environ["ANYBIT_BUILD"])

import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before triton

import gc
import random
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import anybit
from anybit.calibration import texts
from tests import builders
from tests.builders import ANYBIT, FAMILIES, byte_tokenizer, config_of
from tests.interpreted import spare_the_interpreter

settings.register_profile("shared", deadline=None)  # the machine, too: times say nothing
settings.load_profile("shared")


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections between blocks need not walk it, 0.2 s each."""
    gc.collect()
    gc.freeze()
    spare_the_interpreter()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_dir(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """`model_dir("llama")`: a complete directory with random float32 weights; never change it."""
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            with torch.random.fork_rng():
                torch.manual_seed(FAMILIES.index(family))
                model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):  # they start at zero, where a lost one would not show
                        torch.nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def model_copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`model_copy("llama")`: a directory of one's own to break."""

    def make(family: str) -> Path:
        return Path(shutil.copytree(model_dir(family), tmp_path / f"copy-of-{family}"))

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4000 tokens of reproducible words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(60)]
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=2000))[:4000])
    return path


@pytest.fixture(scope="session", autouse=True)
def short_texts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first 100 kB of the texts in the package: the byte tokenizer takes half a second for all."""
    folder, data = tmp_path_factory.mktemp("builtin"), resources.files("anybit.calibration").joinpath("data")
    for name, file in texts.BUILTIN.items():
        (folder / file).write_text(
            data.joinpath(file).read_text(encoding="utf-8")[:100_000], encoding="utf-8"
        )
        texts.BUILTIN[name] = str(folder / file)


@pytest.fixture(scope="session")
def anybit_artifact(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path], text_file: Path
) -> Path:
    out = tmp_path_factory.mktemp("anybit") / "out"
    anybit.quantize(model_dir("llama"), out, ANYBIT, calibration=str(text_file))
    return out


@pytest.fixture
def anybit_copy(anybit_artifact: Path, tmp_path: Path) -> Path:
    """An artifact of one's own to break."""
    return Path(shutil.copytree(anybit_artifact, tmp_path / "copy"))


@pytest.fixture(scope="session")
def artifact_of(
    model_dir: Callable[[str], Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`artifact_of("llama", embed_bits=8)`: made once per set of options; never change it."""
    root = tmp_path_factory.mktemp("artifacts")

    def make(family: str, **options: Any) -> Path:
        out = root / "-".join([family, *(f"{key}{value}" for key, value in options.items())])
        if not out.exists():
            config = builders.options(
                **{"method": "rtn", "bits": 4, "group_size": 32, "samples": 3, "seq_len": 24, **options}
            )
            anybit.quantize(model_dir(family), out, config, calibration=str(text_file))
        return out

    return make
