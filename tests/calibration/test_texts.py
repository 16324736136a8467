"""Text sources, the built-in text, and windows of calibration tokens."""

import hashlib
import json
import re
import sys
import types
from importlib import resources
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from anybit.calibration import texts
from anybit.calibration.texts import calibration_set, default_bos, read_text, token_ids
from anybit.errors import InputError

HALVES = {"builtin": "calibration.txt", "builtin-eval": "evaluation.txt"}
WIKI = (  # as the data set's file begins
    " \n = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . \n"
    " In 2002 he had a guest @-@ starring role , é \u2028 on one line . \n \n \n = = Career = = \n \n"
)
WORDS = [f"w{i}" for i in range(100)]


def word_tokenizer(bos: bool = False, eos: bool = False, limit: int = 16) -> PreTrainedTokenizerFast:
    """Words "w0" to "w99" are tokens 3 to 102; <s> is 0, </s> is 1, anything else 2."""
    vocabulary = {"<s>": 0, "</s>": 1, "?": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=limit
    )


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A file of exactly 50 tokens: 3, 4, ... 52."""
    path = tmp_path / "words.txt"
    path.write_text(" ".join(WORDS[:50]))
    return str(path)


def paragraphs(text: str) -> set[str]:
    return {line for line in text.split("\n") if len(line) > 80}


def test_builtin_text_is_large_clean_and_disjoint(monkeypatch):
    monkeypatch.setattr(texts, "BUILTIN", HALVES)  # the whole ones, which other tests go without
    halves = [read_text(source) for source in HALVES]
    for text in halves:
        assert len(text.encode()) >= 1_200_000
        assert not re.search("gutenberg|\r|�|<[a-z/]", text, re.IGNORECASE)
        long = [line for line in text.split("\n") if len(line) > 80]
        assert len(long) == len(set(long)), "a paragraph occurs twice"
    assert not paragraphs(halves[0]) & paragraphs(halves[1])


def test_source_file_states_true_hashes_and_sizes():
    folder = resources.files("anybit.calibration").joinpath("data")
    stated = folder.joinpath("SOURCE.md").read_text(encoding="utf-8")
    for name in HALVES.values():
        data = folder.joinpath(name).read_bytes()
        assert f"| {name} | {len(data)} | {hashlib.sha256(data).hexdigest()} |" in stated


def test_plain_file_is_read_as_it_is(tmp_path):
    data = "\ufeff one \r\n\r\n two\u2028\n\n".encode()
    (tmp_path / "a.raw").write_bytes(data)
    assert read_text(str(tmp_path / "a.raw")).encode() == data


def test_jsonl_joins_documents_by_an_empty_line(tmp_path):
    rows = [{"text": "first\nline", "url": 1}, {"text": "sec\u2028ond"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n")
    assert read_text(str(path)) == "first\nline\n\nsec\u2028ond"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ("[1]", "line 2 is a list"),
        ('{"body": "x"}', r"line 2 has no field \"text\" \(it has \['body'\]\)"),
        ('{"text": 3}', 'line 2: field "text" is a int'),
        ('{"text": null}', 'line 2: field "text" is a NoneType'),
        (r'{"text": "\ud800"}', "line 2: .* half a surrogate pair"),
    ],
)
def test_jsonl_faults_name_the_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message):
        read_text(str(path))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    cases = {
        "latin.txt": "byte 2",
        "empty.jsonl": "no lines",
        "none.txt": "does not exist",
        "": "is a directory",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            read_text(str(tmp_path / name))
    for source in ("", "none.jsonl", "./none", "/" + "x" * 5000):
        with pytest.raises(InputError, match="does not exist"):
            read_text(source)


class HubStub(types.ModuleType):
    """Stands in for `datasets`: remembers what was asked for."""

    def __init__(self, rows: list[dict] | Exception) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.asked: list[tuple] = []

    def load_dataset(self, name, config, split):
        self.asked.append((name, config, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def test_hub_names_are_parsed(monkeypatch):
    hub = HubStub([{"text": "a"}, {"text": "b"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read_text("org/set:conf:part") == read_text("org/set:conf") == read_text("org/set") == "a\n\nb"
    read_text("wikitext2", split="train")
    assert hub.asked == [
        ("org/set", "conf", "part"),
        ("org/set", "conf", "test"),
        ("org/set", None, "test"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    ]


def test_wikitext_rows_give_the_file_back(monkeypatch):
    rows = [{"text": f"{line}\n" if line.strip() else ""} for line in WIKI.split("\n")[:-1]]
    monkeypatch.setitem(sys.modules, "datasets", HubStub(rows))
    assert read_text("wikitext2") == WIKI


def test_hub_failures_are_sentences(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", HubStub(ConnectionError("no route\nto host")))
    with pytest.raises(InputError, match=r"ConnectionError: no route\); check"):
        read_text("org/set")
    monkeypatch.setitem(sys.modules, "datasets", HubStub([{"text": "a"}, {"content": "b"}]))
    with pytest.raises(InputError, match="row 1 has no field"):
        read_text("org/set")
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(InputError, match=r"install anybit\[eval\]"):
        read_text("org/set")


def test_texts_too_long_for_memory_are_refused_unread(tmp_path, monkeypatch):
    """Files of up to 100 MB are taken whole, as their windows are drawn from all of it."""
    monkeypatch.setattr(texts, "LONGEST", 40)
    for name, line, command in (
        ("a.txt", "a b c d\n", "head -c"),
        ("a.jsonl", '{"text": "a b"}\n', "head -n"),
    ):
        file = tmp_path / name
        file.write_text(line * (40 // len(line)))
        assert len(calibration_set(word_tokenizer(), str(file), 1, 2, 0).tokens) == 1
        file.write_text(line * (40 // len(line) + 1))
        with monkeypatch.context() as patch:
            patch.setattr(texts, "read_utf8", None)
            with pytest.raises(InputError, match=f"MB are tokenized; give a part of it, such as `{command}"):
                calibration_set(word_tokenizer(), str(file), 1, 2, 0)
        read_text(str(file))

    def rows():
        yield from ({"text": "a b c d"} for _ in range(6))
        raise AssertionError("more was read")

    monkeypatch.setitem(sys.modules, "datasets", HubStub(rows()))
    with pytest.raises(InputError, match=r"give a part of it .* such as org/set:conf:train\[:"):
        calibration_set(word_tokenizer(), "org/set:conf", 1, 2, 0)


def test_default_bos():
    assert default_bos(word_tokenizer()) is None
    assert default_bos(word_tokenizer(bos=True)) == 0
    assert default_bos(word_tokenizer(eos=True)) is None
    assert default_bos(word_tokenizer(bos=True, eos=True)) == 0


def test_token_ids_have_no_special_tokens_and_no_warning(words, caplog, recwarn):
    ids = token_ids(word_tokenizer(bos=True, eos=True, limit=16), read_text(words))
    assert ids.dtype == torch.int64
    assert ids.tolist() == list(range(3, 53))
    assert "longer than" not in caplog.text
    assert not recwarn.list


def test_windows_in_text_order_without_overlap(words):
    got = calibration_set(word_tokenizer(), words, samples=9, seq_len=8, seed=0)
    assert got.tokens.tolist() == [list(range(3 + 8 * i, 11 + 8 * i)) for i in range(6)]  # 2 tokens left over
    text = Path(words).read_bytes()
    assert got.describe() == {
        "source": Path(words).name,  # not where it lies on this machine
        "sha256": hashlib.sha256(text).hexdigest(),
        "samples": 6,
        "seq_len": 8,
        "seed": 0,
        "requested": 9,
        "own_windows": 0,
    }
    json.dumps(got.describe())


def test_windows_begin_with_bos_if_the_tokenizer_adds_it(words):
    got = calibration_set(word_tokenizer(bos=True), words, samples=9, seq_len=8, seed=0)
    assert got.tokens.tolist() == [[0, *range(3 + 7 * i, 10 + 7 * i)] for i in range(7)]


def test_one_token_windows_keep_their_text(words):
    for bos in (False, True):
        got = calibration_set(word_tokenizer(bos=bos), words, samples=100, seq_len=1, seed=0)
        assert got.tokens.flatten().tolist() == list(range(3, 53))


def test_seeded_choice_of_windows(words):
    def starts(seed: int) -> list[int]:
        return calibration_set(word_tokenizer(), words, samples=6, seq_len=4, seed=seed).tokens[:, 0].tolist()

    state = torch.get_rng_state()
    picks = {tuple(starts(seed)) for seed in range(20)}
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    assert starts(3) == starts(3)
    assert len(picks) > 10
    for pick in picks:
        assert list(pick) == sorted(set(pick)) and len(pick) == 6
        assert all((start - 3) % 4 == 0 for start in pick)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 51}, "has 50 tokens, fewer than one window of 51; .*--seq-len"),
        ({"samples": 0}, "samples is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_calibration_requests_that_cannot_be_met(words, options, message):
    request = {"samples": 2, "seq_len": 8, "seed": 0} | options
    with pytest.raises(InputError, match=message):
        calibration_set(word_tokenizer(), words, **request)


def test_calibration_of_a_hub_set_takes_its_training_half(monkeypatch):
    hub = HubStub([{"text": "w1 w2 w3"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    calibration_set(word_tokenizer(), "wikitext2", samples=1, seq_len=2, seed=0)
    assert hub.asked[0][2] == "train"
