"""Encoders such as BERT: compressed block by block, loaded with `AutoModel`, measured by their embeddings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import rankdata
from torch import Tensor
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    LongformerConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMConfig,
)
from typer.testing import CliRunner

import anybit
from anybit.artifact.sizes import inspect
from anybit.artifact.verify import verify
from anybit.calibration.streaming import StreamedModel, run_block
from anybit.checkpoint.directory import open_checkpoint
from anybit.cli.main import app
from anybit.encoder import pooling_of
from anybit.errors import InputError
from anybit.evaluation import embeddings
from anybit.generate import Generator
from anybit.loader import load, load_tokenizer
from anybit.methods import METHODS
from anybit.plan import make_plan
from tests import builders
from tests.builders import byte_tokenizer, save_encoder, save_random

COMMON = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
DISTIL = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, "vocab_size": 300}
SENTENCES = [
    "a cat sat",
    "dogs ran far away today",
    "rain",
    "the sun is out over the hills",
    "a cat sat down",
]


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "bert": BertConfig(**COMMON),
        "roberta": RobertaConfig(**COMMON),
        "distilbert": DistilBertConfig(**DISTIL, max_position_embeddings=64, initializer_range=0.2),
        "mpnet": MPNetConfig(**COMMON),
        "electra": ElectraConfig(**COMMON, embedding_size=24),
    }


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(configs()["bert"], tmp_path_factory.mktemp("encoders") / "bert")


@pytest.fixture(scope="module")
def quantized(bert: Path) -> Path:
    anybit.quantize(bert, bert.parent / "rtn", builders.options("rtn", bits=4, group_size=16))
    return bert.parent / "rtn"


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "copy"))


def pairs_file(folder: Path, rows: list[Any] | None = None) -> Path:
    scores = [4.5, 1.0, 0.5, 2.0]
    pairs = list(zip(SENTENCES, SENTENCES[1:], scores))
    rows = rows or [{"sentence1": a, "sentence2": b, "score": s} for a, b, s in pairs]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def embedded_alone(model: Any, folder: Path, sentence: str, pooling: str = "mean") -> Tensor:
    """One sentence without padding, pooled and normalised by hand."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(sentence)["input_ids"]])
    with torch.no_grad():
        states = model(input_ids=ids).last_hidden_state[0].double()
    made = states.mean(0) if pooling == "mean" else states[0]
    return made / made.norm()


# ---- quantize and load


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.options.for_encoders])
def test_every_method_of_encoders_end_to_end(
    bert: Path, tmp_path: Path, text_file: Path, method: str
) -> None:
    config = builders.options(method, samples=4, seq_len=32)
    out = tmp_path / method
    anybit.quantize(bert, out, config, calibration=str(text_file))
    assert verify(out)["layers"] == len(inspect(out)["layers"]) == 12
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertModel"]
    assert "AutoModel.from_pretrained" in (out / "README.md").read_text()
    figures = anybit.evaluate(out, base=bert, pairs=pairs_file(tmp_path))
    # 2.84 bits leave little of random weights; what is wired wrongly leaves nothing
    least = {"two-four-sixteen": 0.6, "atom": 0.6}.get(method, 0.85)
    assert least < figures["cosine_min"] <= figures["cosine_mean"] < 0.9999999
    assert figures["bits_per_weight"] == inspect(out)["bits_per_weight"]


def test_gptq_moves_embeddings_less_than_rounding(bert: Path, tmp_path: Path, text_file: Path) -> None:
    """The statistics are those of the layers: with others GPTQ would be worse than rounding."""
    errors, words = {}, text_file.read_text().split()
    sentences = [" ".join(words[i : i + 8]) for i in range(0, 320, 8)]
    rows = [{"sentence1": a, "sentence2": b, "score": i} for i, (a, b) in enumerate(pairwise(sentences))]
    pairs = pairs_file(tmp_path, rows)
    for method in ("rtn", "gptq"):
        config = builders.options(method, bits=3, group_size=16, samples=16, seq_len=32)
        anybit.quantize(bert, tmp_path / method, config, calibration=str(text_file))
        figures = anybit.evaluate(tmp_path / method, base=bert, pairs=pairs)
        errors[method] = 1 - figures["cosine_mean"]
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_transformers_loads_it(bert: Path, quantized: Path) -> None:
    model = AutoModel.from_pretrained(quantized, dtype=torch.float32).eval()
    ids = torch.tensor([[0, 9, 8, 7, 1]])
    with torch.no_grad():
        own = load(quantized)(input_ids=ids)
        made = model(input_ids=ids)
    assert torch.equal(made.last_hidden_state, own.last_hidden_state)
    assert torch.equal(made.pooler_output, own.pooler_output)
    base = load(bert).state_dict()
    assert torch.equal(model.pooler.dense.weight, base["pooler.dense.weight"].half().float())


def test_a_quantized_embedding_table(bert: Path, tmp_path: Path) -> None:
    config = builders.options("rtn", bits=8, embed_bits=8)
    anybit.quantize(bert, tmp_path / "out", config)
    assert inspect(tmp_path / "out")["embeddings"][0]["name"] == "embeddings.word_embeddings"
    assert anybit.evaluate(tmp_path / "out", base=bert, pairs=pairs_file(tmp_path))["cosine_min"] > 0.99


def test_a_checkpoint_with_a_pretraining_head_and_prefixed_names(
    copy: Path, bert: Path, tmp_path: Path
) -> None:
    """As bert-base-uncased has it: `bert.` before the names, and a head that embeddings do not need."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    file = copy / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "cls.predictions.bias": torch.zeros(300)}, file, metadata={"format": "pt"})
    assert StreamedModel(open_checkpoint(copy), torch.float32).left_out() == ["cls.predictions.bias"]
    anybit.quantize(copy, tmp_path / "out", builders.options("rtn", bits=8))
    assert anybit.evaluate(tmp_path / "out", base=bert, pairs=pairs_file(tmp_path))["cosine_min"] > 0.99


def test_a_masked_language_model_has_no_pooler(tmp_path: Path) -> None:
    """As roberta-base is: its encoder is used without the pooler, which embeddings do not need."""
    config = RobertaConfig(**{**COMMON, "max_position_embeddings": 66}, pad_token_id=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        RobertaForMaskedLM(config).save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(tmp_path / "model")
    anybit.quantize(tmp_path / "model", tmp_path / "out", builders.options("rtn", bits=8))
    figures = anybit.evaluate(tmp_path / "out", base=tmp_path / "model", pairs=pairs_file(tmp_path))
    assert figures["cosine_min"] > 0.99
    states = AutoModel.from_pretrained(tmp_path / "out")(torch.tensor([[5, 9, 7]])).last_hidden_state
    ours = load(tmp_path / "out")(torch.tensor([[5, 9, 7]])).last_hidden_state
    torch.testing.assert_close(states, ours)


def test_a_window_beyond_the_positions_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="--seq-len 65 is beyond the model's 64 positions: choose at most 64"
    ):
        anybit.quantize(bert, tmp_path / "out", builders.options("gptq", seq_len=65))


# ---- other families


@pytest.mark.parametrize("family", configs())
def test_block_by_block_gives_the_states_of_the_whole_model(tmp_path: Path, family: str) -> None:
    folder = save_encoder(configs()[family], tmp_path)
    tokens = torch.randint(3, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    streamed = StreamedModel(open_checkpoint(folder), torch.float32)
    hidden: dict[int, Tensor] = {}
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(tokens).last_hidden_state
        for i, call in enumerate(streamed.first_inputs(tokens, hidden.__setitem__)):
            with streamed.block(i) as block:
                hidden = {k: run_block(block, state, call) for k, state in hidden.items()}
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat([hidden[0], hidden[1]]), expected)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "mpnet"])
def test_other_families_end_to_end(tmp_path: Path, text_file: Path, family: str) -> None:
    """RoBERTa's and MPNet's positions begin at 2: 62 of 64 are left."""
    folder = save_encoder(configs()[family], tmp_path / family)
    length = 64 if family == "distilbert" else 62
    with pytest.raises(InputError, match=f"choose at most {length}"):
        anybit.quantize(folder, tmp_path / "out", builders.options("gptq", seq_len=length + 1))
    config = builders.options("gptq", samples=4, seq_len=length)
    anybit.quantize(folder, tmp_path / "out", config, calibration=str(text_file))
    figures = anybit.evaluate(tmp_path / "out", base=folder, pairs=pairs_file(tmp_path))
    assert 0.85 < figures["cosine_min"] < 0.9999999


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AlbertConfig(**COMMON), "no list of 2 transformer blocks"),
        (XLMConfig(vocab_size=300, emb_dim=48, n_layers=2, n_heads=4), "do not run their 2 blocks"),
        (DebertaV2Config(**COMMON), "take more from their blocks than hidden states"),
        (LongformerConfig(**COMMON, attention_window=16), "16 states for 2 tokens"),
    ],
    ids=["albert", "xlm", "deberta", "longformer"],
)
def test_families_that_cannot_be_calibrated(tmp_path: Path, config: PreTrainedConfig, words: str) -> None:
    """Shared blocks, blocks that are only attention, blocks that return more, padded windows."""
    folder = save_encoder(config, tmp_path / "model")
    with pytest.raises(InputError, match=words):
        anybit.quantize(folder, tmp_path / "out", builders.options("gptq", samples=2, seq_len=32))


def test_an_encoder_with_a_head_for_a_task_is_refused(tmp_path: Path) -> None:
    BertForSequenceClassification(configs()["bert"]).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"BertForSequenceClassification .* save the encoder alone \(BertModel\)"
    ):
        StreamedModel(open_checkpoint(tmp_path), torch.float32)


def test_a_bert_that_is_a_decoder_stays_a_language_model(tmp_path: Path) -> None:
    folder = save_random(BertConfig(**COMMON, is_decoder=True), tmp_path)
    assert not StreamedModel(open_checkpoint(folder), torch.float32).encoder


def test_a_norm_between_the_blocks_is_noticed(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = StreamedModel(open_checkpoint(bert), torch.float32)
    forward = streamed.model.encoder.forward

    def doubling(hidden: Tensor, **kwargs: Any) -> Any:
        second = streamed.blocks[1].forward
        streamed.blocks[1].forward = lambda states, *args, **more: second(2 * states, *args, **more)
        return forward(hidden, **kwargs)

    monkeypatch.setattr(streamed.model.encoder, "forward", doubling)
    with pytest.raises(InputError, match="one after another"):
        streamed.check_structure()


# ---- what an encoder cannot do


@pytest.mark.parametrize("method", ["squeezellm", "any-precision", "mixllm", "llm-mq"])
def test_methods_on_gradients_are_refused_before_any_work(bert: Path, tmp_path: Path, method: str) -> None:
    streamed = StreamedModel(open_checkpoint(bert), torch.float32)
    with pytest.raises(InputError, match=r"bert is an encoder: choose rtn, gptq, .* or cmpq"):
        make_plan(streamed, builders.options(method))
    with pytest.raises(InputError, match=f"{method} needs the loss"):
        anybit.quantize(bert, tmp_path / "out", builders.options(method))
    assert not list(tmp_path.iterdir())


def test_a_kv_cache_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no KV-cache"):
        anybit.quantize(bert, tmp_path / "out", builders.options("rtn", kv_bits=4))


def test_generating_is_refused(quantized: Path) -> None:
    with pytest.raises(InputError, match="is an encoder and cannot generate text"):
        Generator(str(quantized))
    for command in (["generate", str(quantized), "-p", "a"], ["chat", str(quantized)]):
        assert "cannot generate" in str(CliRunner().invoke(app, command).exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "builtin-eval"}, r"text \(--text\) is for language models"),
        ({"tasks": ("piqa",)}, r"tasks \(--tasks\) is for"),
        ({"max_tokens": 9}, r"max_tokens \(--max-tokens\) is for"),
        ({"bits": 4}, r"bits \(--bits\) is for"),
        ({"kv_bits": 4}, r"kv_bits \(--kv-bits\) is for"),
        ({"base": None}, "name the model to compare it with"),
        ({"seq_len": 65}, "longer than the 64 positions"),
    ],
)
def test_measuring_what_an_encoder_has_not(
    bert: Path, quantized: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        anybit.evaluate(quantized, **{"base": bert, **options})


def test_language_models_and_encoders_are_not_mixed_up(
    quantized: Path, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"not an encoder: pairs \(--pairs\)"):
        anybit.evaluate(model_dir("llama"), pairs=pairs_file(tmp_path))
    with pytest.raises(InputError, match="is no encoder"):
        anybit.evaluate(quantized, base=model_dir("llama"))


# ---- embeddings


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_figures_against_sentences_one_by_one(copy: Path, tmp_path: Path, pooling: str) -> None:
    """Padding and batches change nothing; the pooling file is followed, and goes with the artifact."""
    modes = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    out = tmp_path / "out"
    anybit.quantize(copy, out, builders.options("rtn", bits=4, group_size=16))
    figures = anybit.evaluate(out, base=copy, pairs=pairs_file(tmp_path))
    own = {s: embedded_alone(load(out), out, s, pooling) for s in SENTENCES}
    base = {s: embedded_alone(load(copy), copy, s, pooling) for s in SENTENCES}
    cosines = torch.stack([own[s] @ base[s] for s in SENTENCES])
    assert figures["pooling"] == pooling and figures["sentences"] == 5 and figures["pairs"] == 4
    assert figures["cosine_mean"] == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert figures["cosine_min"] == pytest.approx(float(cosines.min()), abs=1e-6)
    for key, made in (("spearman", own), ("base_spearman", base)):
        ranks = torch.tensor(rankdata([made[a] @ made[b] for a, b in pairwise(SENTENCES)]))
        expected = torch.corrcoef(torch.stack([ranks, torch.tensor([4.0, 2.0, 1.0, 3.0]).double()]))[0, 1]
        assert figures[key] == pytest.approx(float(expected))


def test_the_same_model_has_cosine_one(bert: Path) -> None:
    figures = anybit.evaluate(bert, base=bert)
    assert figures["cosine_min"] == pytest.approx(1, abs=1e-9) and figures["bits_per_weight"] is None
    assert figures["sentences"] == embeddings.SENTENCES and "spearman" not in figures


def test_sentences_are_cut_to_the_positions_or_to_seq_len(bert: Path) -> None:
    model, tokenizer = load(bert), load_tokenizer(bert)
    long = "word " * 40  # 200 tokens, the positions are 64
    made = embeddings.embed(model, tokenizer, [long, long[:62], long[:6]])
    assert torch.allclose(made[0], made[1]) and not torch.allclose(made[0], made[2])
    made = embeddings.embed(model, tokenizer, [long, long[:6]], seq_len=8)
    assert torch.allclose(made[0], made[1])


def test_a_cut_without_room_for_words_is_refused(bert: Path) -> None:
    for seq_len in (1, 2):
        with pytest.raises(InputError, match="leaves no room for words beside 2 special tokens"):
            anybit.evaluate(bert, base=bert, seq_len=seq_len)


def test_sentences_of_a_text() -> None:
    text = "Title\nOne two three four five. Six seven!\nA b c d e f? One two three four five.\n"
    assert embeddings.sentences_of(text) == ["One two three four five.", "A b c d e f?"]
    many = "\n".join(f"this is the sentence number {i}" for i in range(2 * embeddings.SENTENCES))
    picked = embeddings.sentences_of(many)
    assert len(picked) == embeddings.SENTENCES and picked[1] == "this is the sentence number 2"


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "sets pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "only one of"),
        ({}, "sets no pooling_mode"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, modes: dict[str, bool], words: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 4, **modes}))
    with pytest.raises(InputError, match=words):
        pooling_of(tmp_path)


def test_a_dense_layer_behind_the_pooling_is_refused(tmp_path: Path) -> None:
    kinds = ["Transformer", "Pooling", "Dense"]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="puts a Dense into the embedding"):
        pooling_of(tmp_path)


@pytest.mark.parametrize("text", ["[" * 200_000, '["x"]', "[1]", "{}"])
def test_a_list_of_modules_that_is_none_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(InputError, match=r"modules\.json"):
        pooling_of(tmp_path)


def test_a_list_of_modules_without_end_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "modules.json").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(InputError, match=r"modules\.json has 1000000000000 bytes"):
        pooling_of(tmp_path)


def split_by(pattern: str) -> Callable[[Any], object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda tokenizer: tokenizer.update(pre_tokenizer=split)


DAMAGED: dict[str, tuple[str, Callable[[Any], object], str]] = {  # what is edited, how, what is said of it
    "pattern": ("tokenizer.json", split_by("(x+x+)+y"), "fails on these texts .*retry-limit"),
    "nothing left": (
        "tokenizer.json",
        lambda t: t.update(
            normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}, post_processor=None
        ),
        "makes no token",
    ),
    "vocabulary": (
        "tokenizer.json",
        lambda t: t["model"]["vocab"].update(x=9999),
        "vocabulary has 300",
    ),
    "length": ("tokenizer_config.json", lambda c: c.update(model_max_length="x"), "model_max_length is 'x'"),
    "short": ("tokenizer_config.json", lambda c: c.update(model_max_length=2), "model_max_length is 2"),
    "negative": ("tokenizer_config.json", lambda c: c.update(model_max_length=-1), "model_max_length is -1"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tokenizer_that_fails_on_sentences_is_a_sentence(copy: Path, name: str) -> None:
    file, change, words = DAMAGED[name]
    data = json.loads((copy / file).read_text())
    change(data)
    (copy / file).write_text(json.dumps(data))
    model, tokenizer = load(copy), load_tokenizer(copy)
    with pytest.raises(InputError, match=words):
        embeddings.embed(model, tokenizer, ["x" * 60, "xxxx"])


def test_names_of_inputs_and_lengths_do_not_matter(copy: Path) -> None:
    """The mask is made whatever the tokenizer's files call inputs; a length without end is the model's."""
    model, sentences = load(copy), ["a b c", "a"]
    expected = embeddings.embed(model, load_tokenizer(copy), sentences)
    file = copy / "tokenizer_config.json"
    changed = {"model_input_names": ["x"], "model_max_length": 1e30}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert torch.equal(embeddings.embed(model, load_tokenizer(copy), sentences), expected)


def test_a_tokenizer_that_cannot_pad_is_refused(bert: Path) -> None:
    with pytest.raises(InputError, match="no padding token"):
        embeddings.embed(load(bert), byte_tokenizer(), ["a"])


# ---- the command and its file of pairs


def test_the_command(bert: Path, quantized: Path, tmp_path: Path) -> None:
    command = ["eval", str(quantized), "--base", str(bert), "--pairs", str(pairs_file(tmp_path))]
    ran = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "figures.json")])
    assert ran.exit_code == 0, ran.exception
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert f"mean {figures['cosine_mean']:.5f}, least {figures['cosine_min']:.5f}" in ran.stdout
    assert f"base Spearman     {figures['base_spearman']:.4f} over 4 pairs" in ran.stdout


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_tables_of_pairs(tmp_path: Path, suffix: str) -> None:
    """Columns in any order beside others; quotes and line ends in a .csv, literal quotes in a .tsv."""
    path = tmp_path / f"pairs{suffix}"
    if suffix == ".csv":
        path.write_text('id,score,sentence2,sentence1\n1,2.5,"a, b\nc","d ""e"""\n2,1,f,g\n')
        expected = ['d "e"', "g"], ["a, b\nc", "f"]
    else:
        path.write_text("sentence1\tsentence2\tscore\n\"d e\ta'b\t2.5\ng\tf\t1\n")
        expected = ['"d e', "g"], ["a'b", "f"]
    made = embeddings.read_pairs(path)
    assert (made.first, made.second) == expected and made.scores == [2.5, 1.0]


GOOD = {"sentence1": "a", "sentence2": "b", "score": 1}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", json.dumps(GOOD) + "\n{\n", "line 2 is not valid JSON"),
        ("p.jsonl", "\n" + json.dumps([1]), "line 2 is a list"),
        ("p.jsonl", json.dumps({**GOOD, "sentence2": 3}), 'line 1: field "sentence2" is a int'),
        ("p.jsonl", json.dumps({"sentence1": "a", "score": 1}), 'line 1 has no field "sentence2"'),
        ("p.jsonl", json.dumps({**GOOD, "sentence1": " "}), "line 1 has an empty sentence"),
        ("p.jsonl", json.dumps({**GOOD, "sentence1": "\ud800"}), "line 1: .* half a surrogate pair"),
        ("p.jsonl", json.dumps({"sentence1": "a", "sentence2": "b"}), "line 1: score is None"),
        ("p.jsonl", json.dumps({**GOOD, "score": 10**400}), "line 1: score is 10"),
        ("p.jsonl", json.dumps({**GOOD, "score": "NaN"}), "line 1: score is 'NaN'"),
        ("p.jsonl", json.dumps({**GOOD, "score": True}), "line 1: score is True"),
        ("p.jsonl", json.dumps(GOOD), "1 pairs with 1 different scores"),
        ("p.jsonl", "", "0 pairs with 0 different scores"),
        ("p.csv", "sentence1,sentence2\na,b\n", "line 1 names no column 'score'"),
        ("p.csv", "sentence1,sentence2,score\na,b,1\nc,d,\n", "line 3: score is ''"),
        ("p.csv", "sentence1,sentence2,score\na,b,1\nc\n", 'line 3: field "sentence2" is a NoneType'),
        ("p.csv", 'sentence1,sentence2,score\n"a"x,b,1\n', "line 2 is no row of a table"),
        ("p.tsv", "", "line 1 names no column 'sentence1'"),
        ("p.txt", "a", "expected a .jsonl, .tsv or .csv file"),
        ("no.csv", None, "does not exist"),
    ],
)
def test_faults_of_a_pairs_file(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        embeddings.read_pairs(tmp_path / name)
