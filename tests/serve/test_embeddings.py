"""/v1/embeddings: the embeddings of Transformers' own model, in every form."""

from __future__ import annotations

import base64
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    DistilBertConfig,
    FNetConfig,
    PreTrainedConfig,
    RobertaConfig,
)
from typer.testing import CliRunner

import anybit
from anybit.cli.main import app
from anybit.cli.serve import Computing, Shares, _load
from anybit.encoder import Encoder
from anybit.engine.engine import Floats, Tokens
from anybit.errors import InputError
from anybit.progress import SILENT
from anybit.serve.api.embeddings import Wanted, answer
from anybit.serve.http.app import State
from anybit.serve.run.embedder import BATCH_TOKENS
from anybit.serve.served import ServedEncoder
from anybit.serve.settings import Settings
from tests.builders import save_encoder
from tests.serve.conftest import SIZES, Client, serving, until

PATH = "/v1/embeddings"
TEXTS = ["rain", "a cat sat down", "dogs ran far away today", "grün", "the sun is out over the hills", "x"]
CLOSE = 2e-6  # coordinates of embeddings of unit length, computed in another order


@pytest.fixture(scope="module")
def server(encoder: Encoder) -> Iterator[tuple[Client, State]]:
    with serving(encoder) as made:
        yield made


def by_hand(folder: Path, text: str, pooling: str = "mean") -> np.ndarray:
    """One text without padding, by Transformers' own classes."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state[0].double()
    made = states.mean(0) if pooling == "mean" else states[0]
    return (made / made.norm()).numpy()


def rows_of(answer: Any) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == [*range(len(answer["data"]))]
    return np.array([one["embedding"] for one in answer["data"]])


# ---- what is answered


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(
    "config",
    [
        RobertaConfig(**SIZES),
        DistilBertConfig(
            vocab_size=300, dim=48, hidden_dim=80, n_layers=2, n_heads=4, max_position_embeddings=64
        ),
    ],
    ids=["roberta", "distilbert"],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, config: PreTrainedConfig, pooling: str) -> None:
    """Of an artifact, whose files say how it pools; many texts at once are padded."""
    folder = save_encoder(config, tmp_path / "model")
    modes = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
    anybit.quantize(folder, tmp_path / "out", anybit.RTN(bits=4, group_size=16))
    encoder = Encoder(str(tmp_path / "out"))
    assert (encoder.pooling, encoder.pooled_by) == (pooling, "by 1_Pooling/config.json")
    with serving(encoder) as (client, _):
        found = rows_of(client.ok(PATH, {"input": TEXTS}))
    wanted = np.stack([by_hand(tmp_path / "out", text, pooling) for text in TEXTS])
    assert np.abs(found - wanted).max() < CLOSE


def test_the_shape_of_an_answer(client: Client, encoder_artifact: Path) -> None:
    made = client.ok(PATH, {"input": "rain", "model": "tiny", "user": "me", "encoding_format": "float"})
    assert made == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": made["data"][0]["embedding"]}],
        "model": "tiny",
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    (row,) = rows_of(made)
    assert np.abs(row - by_hand(encoder_artifact, "rain")).max() < CLOSE
    assert np.linalg.norm(row) == pytest.approx(1, abs=1e-6)


def test_a_text_is_its_tokens_alone_and_beside_others(client: Client) -> None:
    alone = np.concatenate([rows_of(client.ok(PATH, {"input": text})) for text in TEXTS])
    tokens = [client.ok("/tokenize", {"prompt": text})["tokens"] for text in TEXTS]
    assert client.ok("/detokenize", {"tokens": tokens[3]}) == {"prompt": "grün"}
    for inputs in (TEXTS, tokens, [tokens[0], *TEXTS[1:]]):
        made = client.ok(PATH, {"input": inputs})
        assert np.abs(rows_of(made) - alone).max() < CLOSE
        assert made["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert np.abs(rows_of(client.ok(PATH, {"input": tokens[2]}))[0] - alone[2]).max() < CLOSE


def test_bytes_are_the_numbers(client: Client) -> None:
    numbers = rows_of(client.ok(PATH, {"input": TEXTS}))
    data = client.ok(PATH, {"input": TEXTS, "encoding_format": "base64"})["data"]
    found = np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])
    assert np.array_equal(found.astype(np.float64), numbers)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_a_large_answer_is_written_row_by_row(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """One call for all of it would hold up all other threads meanwhile."""
    written: list[str] = []

    def noting(value: Any) -> str:
        written.append(json.dumps(value))
        return written[-1]

    monkeypatch.setattr("anybit.serve.api.embeddings._json", noting)
    monkeypatch.setattr("anybit.serve.api.embeddings.PIECE", 480)
    rows = encoder.embed([np.full(3 + i % 9, 5, np.int32) for i in range(40)])
    wanted = Wanted([np.zeros(3, np.int32)] * 40, 48, form == "base64")
    pieces = [*answer(ServedEncoder(encoder, Settings('tiny "ü\udcff"')), wanted, rows)]
    assert len(pieces) == 4 and len(written) == 40 + 2
    made = json.loads(b"".join(pieces))
    assert (made["model"], made["usage"]["total_tokens"]) == ('tiny "ü\udcff"', 120)
    assert [*map(json.loads, written[:40])] == made["data"]
    if form == "float":
        assert np.array_equal(rows_of(made).astype(np.float32), rows)


def test_an_answer_of_many_pieces(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.serve.api.embeddings.PIECE", 48)
    with serving(encoder) as (client, _):
        made = client.ok(PATH, {"input": TEXTS * 9})
        assert (
            np.abs(rows_of(made) - np.concatenate([rows_of(client.ok(PATH, {"input": TEXTS}))] * 9)).max()
            < CLOSE
        )
        connection, response = client.open(PATH, {"input": TEXTS * 200})
        response.read(10)
        connection.close()  # in the middle of it
        client.ok(PATH, {"input": "rain"})


@pytest.mark.parametrize("form", ["float", "base64"])
def test_fewer_dimensions_have_unit_length_again(client: Client, form: str) -> None:
    whole = rows_of(client.ok(PATH, {"input": TEXTS}))
    for dimensions in (1, 5, 48):
        data = client.ok(PATH, {"input": TEXTS, "dimensions": dimensions, "encoding_format": form})["data"]
        found = np.array(
            [
                np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
                if form == "base64"
                else one["embedding"]
                for one in data
            ]
        )
        wanted = whole[:, :dimensions] / np.linalg.norm(whole[:, :dimensions], axis=1, keepdims=True)
        assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-6


def test_the_width_that_there_is(client: Client) -> None:
    made = client.ok(PATH, {"input": "rain"})
    for how in ({"bits": 4}, {"model": "tiny@4"}, {"model": "tiny@auto"}, {"bits": "auto"}):
        assert client.ok(PATH, {"input": "rain", **how}) == made


def test_requests_at_once_share_batches_within_the_bounds(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, shapes = Encoder.embed, []

    def noting(self: Encoder, texts: Sequence[Tokens]) -> Floats:
        shapes.append((len(texts), max(map(len, texts))))
        time.sleep(0.02)
        return embed(self, texts)

    monkeypatch.setattr(Encoder, "embed", noting)
    monkeypatch.setattr("anybit.serve.run.embedder.BATCH_TOKENS", 120)
    with serving(encoder, running=7) as (client, state):
        wanted = {text: rows_of(client.ok(PATH, {"input": text}))[0] for text in TEXTS}
        shapes.clear()
        apart: list[float] = []

        def ask(i: int) -> None:
            texts = TEXTS[i % 6 :] + TEXTS
            made = rows_of(client.ok(PATH, {"input": texts}))
            apart.append(max(np.abs(row - wanted[text]).max() for row, text in zip(made, texts)))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(apart) == 12 and max(apart) < CLOSE
        assert all(texts <= 7 and (texts == 1 or texts * longest <= 120) for texts, longest in shapes)
        assert sum(texts for texts, _ in shapes) > 2 * len(shapes)
        counters = state.served.runner.counters
        until(lambda: counters.batches == 6 + len(shapes))  # a batch counts when its texts have been answered
        assert counters.texts == 6 + sum(texts for texts, _ in shapes)
    assert BATCH_TOKENS >= 512  # of BERT's own texts several fit


def test_what_there_is_and_figures(client: Client, encoder: Encoder) -> None:
    client.ok(PATH, {"input": TEXTS})
    (card,) = client.ok("/v1/models")["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 64 and card["chat"] is False
    assert (card["dimensions"], card["pooling"], card["levels"]) == (
        48,
        "mean",
        [{"bits": 4.0, "bytes_per_token": None}],
    )
    assert client.ok("/health")["status"] == "ok"
    lines = client.ok("/metrics").splitlines()
    figures = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    assert figures["anybit_embedded_texts_total"] >= 6 and figures["anybit_padding_tokens_total"] > 0
    assert figures['anybit_embedding_seconds_bucket{le="+Inf"}'] >= 1
    assert len({line.split()[2] for line in lines if line.startswith("# TYPE")}) == sum(
        line.startswith("# TYPE") for line in lines
    )
    assert not any("token_seconds" in line or "cache" in line for line in lines)


# ---- what is loaded


@pytest.fixture
def copy(encoder_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(encoder_artifact, tmp_path / "copy"))


def test_the_pooling_is_said_and_where_it_comes_from(copy: Path) -> None:
    cls = Encoder(str(copy), pooling="cls")
    assert (cls.pooling, cls.pooled_by) == ("cls", "by --pooling")
    ids = np.array(cls.tokenizer("rain")["input_ids"], np.int32)
    assert np.abs(cls.embed([ids])[0] - by_hand(copy, "rain", "cls")).max() < CLOSE
    with pytest.raises(InputError, match=r"--pooling 'max': expected one of mean, cls"):
        Encoder(str(copy), pooling="max")
    shutil.rmtree(copy / "1_Pooling")
    plain = Encoder(str(copy))
    assert plain.pooled_by == "as there is no 1_Pooling/config.json that says otherwise"
    (copy / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(InputError, match="puts a Dense into the embedding"):
        Encoder(str(copy), pooling="mean")


def test_both_forms_of_a_pooling_file_are_read_and_other_poolings_refused_by_name(copy: Path) -> None:
    for said, pooling in (("cls", "cls"), (["mean"], "mean")):
        (copy / "1_Pooling/config.json").write_text(
            json.dumps({"pooling_mode": said, "include_prompt": True})
        )
        assert Encoder(str(copy)).pooling == pooling
    for modes, words in (
        ({"pooling_mode": "max"}, "sets pooling_mode max: only one of mean and cls is computed here"),
        ({"pooling_mode": ["cls", "mean"]}, "sets pooling_mode cls and pooling_mode mean: only one"),
        ({"pooling_mode": [[1]]}, r"sets pooling_mode \[1\]: only one"),
        ({"pooling_mode_weightedmean_tokens": True}, "sets pooling_mode_weightedmean_tokens: only one"),
        ({"pooling_mode_lasttoken": True}, "sets pooling_mode_lasttoken: only one"),
    ):
        (copy / "1_Pooling/config.json").write_text(json.dumps(modes))
        with pytest.raises(InputError, match=words):
            Encoder(str(copy))
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "2_Pooling"}]
    (copy / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="has the pooling in '2_Pooling', but only 1_Pooling is read"):
        Encoder(str(copy))
    assert Encoder(str(copy), pooling="mean").pooling == "mean"


def test_how_long_texts_may_be(copy: Path) -> None:
    assert Encoder(str(copy), context=20).context == 20
    with pytest.raises(InputError, match=r"--context 65: .* reaches 64 tokens"):
        Encoder(str(copy), context=65)
    with pytest.raises(InputError, match="2 tokens by --context, but a number above the 2 special ones"):
        Encoder(str(copy), context=2)
    file = copy / "sentence_bert_config.json"
    for said, length in ((30, 30), (None, 64), (500, 64)):
        file.write_text(json.dumps({"max_seq_length": said}))
        assert Encoder(str(copy)).context == length
    for said in ("x", -1, [5]):
        file.write_text(json.dumps({"max_seq_length": said}))
        with pytest.raises(InputError, match="by max_seq_length"):
            Encoder(str(copy))
    assert Encoder(str(copy), context=40).context == 40


def test_a_model_that_sees_padding_is_refused(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FNetConfig(
        vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2, max_position_embeddings=64
    )
    save_encoder(config, tmp_path / "fnet")
    with pytest.raises(
        InputError, match="cannot be served: a text's embedding is another beside a longer text"
    ):
        Encoder(str(tmp_path / "fnet"))
    monkeypatch.setattr(encoder.model, "forward", lambda input_ids: input_ids)
    with pytest.raises(InputError, match="cannot be served: it takes no texts with a mask"):
        encoder._probed()


def test_transformers_draws_no_bars(encoder_artifact: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Encoder(str(encoder_artifact))
    assert "Loading weights" in capfd.readouterr().err
    made = _load(str(encoder_artifact), {}, Shares(), Computing(), SILENT)
    assert isinstance(made, Encoder) and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-bits", "8"], "is an encoder, which has no KV-cache: leave --kv-bits out"),
        (["--kv-memory", "1GB"], "is an encoder, which has no KV-cache: leave --kv-memory out"),
        (["--pooling", "max"], "--pooling 'max': expected one of mean, cls"),
        (["--context", "65"], "--context 65"),
        (["--bits", "3"], "has one width, 4.00 bits, not 3"),
    ],
)
def test_options_that_an_encoder_has_no_use_for(
    encoder_artifact: Path, options: list[str], words: str
) -> None:
    made = CliRunner().invoke(app, ["serve", str(encoder_artifact), "--port", "0", *options])
    assert isinstance(made.exception, InputError) and words in str(made.exception)


def test_a_language_model_has_nothing_to_pool(anybit_artifact: Path) -> None:
    made = CliRunner().invoke(app, ["serve", str(anybit_artifact), "--port", "0", "--pooling", "mean"])
    assert "is no encoder, and has no embeddings to pool" in str(made.exception)
