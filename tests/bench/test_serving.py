"""`anybit bench serve`: what clients note, what systems may take, and one small run of everything."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anybit.bench import reading, serving
from anybit.bench.load import Asked, Client
from anybit.bench.servers import QUEUES, Programs, Server, Share, command, free_port, started, version
from anybit.bench.serving import Plan, ratios, serve
from anybit.bench.serving_figures import Bounds
from anybit.bench.systems import Peer, System, common_context, kv_memory, parsed
from anybit.bench.traces import Request, Trace
from anybit.cli.main import app
from anybit.errors import InputError
from anybit.kernels import cpu
from tests.bench.decoding import gguf, mistralrs

Json = dict[str, Any]
TRACE = Trace("ten", "0" * 12, tuple(Request(0.2 * i, 20 + i, 4) for i in range(10)))
OTHER = Trace("ten", "1" * 12, TRACE.requests)
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:4{i}.6805900,{20 + i},4\n" for i in range(10)
)

needs_native = pytest.mark.skipif(not cpu.available(), reason="the native extension is not built")


# ---- clients


@contextmanager
def standing_in(answer: Callable[[BaseHTTPRequestHandler, Json], None]) -> Iterator[int]:
    """The port of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(handler: BaseHTTPRequestHandler, *made: Json) -> None:
    handler.send_response(200)
    handler.end_headers()
    for event in made:
        handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    handler.wfile.write(b"data: [DONE]\n\n")


def asked(kind: str, at: float = 0.0, answer: int = 2) -> Asked:
    return Asked(at, 10, answer, json.dumps({"kind": kind}).encode())


TOKEN: Json = {"choices": [{"text": "a", "finish_reason": None}]}
END: Json = {"choices": [{"text": "", "finish_reason": "length"}]}


def stand_in(handler: BaseHTTPRequestHandler, body: Json) -> None:
    kind = body["kind"]
    if kind in ("busy", "wrong"):
        handler.send_error(429 if kind == "busy" else 400)
    elif kind == "cut":
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"40\r\ndata: ")  # and the connection ends
    elif kind == "error":
        events(handler, TOKEN, {"error": {"message": "it broke"}})
    elif kind == "short":
        events(handler, TOKEN, END)
    else:
        usage = {"choices": [], "usage": {"completion_tokens": 2}, "timings": {"bits": {"mean": 3.5}}}
        events(handler, TOKEN, TOKEN, END, usage)


def test_clients_note_what_came_of_each_request() -> None:
    kinds = "good", "busy", "wrong", "cut", "error", "short"
    with standing_in(stand_in) as port:
        answers = Client(port).at_times([asked(kind) for kind in kinds], 10)
    assert [answer.status for answer in answers] == ["ok", "refused", "failed", "failed", "failed", "failed"]
    good, busy, wrong, cut, error, short = answers
    assert (len(good.times), good.tokens, good.bits, good.error) == (2, 2, {"mean": 3.5}, "")
    assert good.asked <= good.times[0] <= good.times[1] <= (good.ended or 0)
    assert busy.error.startswith("429") and wrong.error.startswith("400") and "Incomplete" in cut.error
    assert "it broke" in error.error
    assert short.error == "1 tokens came, 2 were asked for"


def test_tokens_are_counted_as_the_server_says() -> None:
    def event(text: str, finish: str | None = None, told: int | None = None, **more: Any) -> Json:
        timings = {} if told is None else {"timings": {"predicted_n": told}}
        return {"choices": [{"text": text, "finish_reason": finish}], **timings, **more}

    streams = {
        "with every event": [
            event("", told=0),
            event("ab", told=2),
            event("", told=3),
            event("", "length", told=5),
        ],
        "the last without": [event("a", told=4), event("b", told=5), event("", "length", told=5)],
        "at the end": [event("ab"), event("c"), event("", "length", usage={"completion_tokens": 5})],
        "with the last": [event("ab"), event("c", "length", usage={"completion_tokens": 5})],
    }

    def told(handler: BaseHTTPRequestHandler, body: Json) -> None:
        events(handler, *streams[body["kind"]])

    with standing_in(told) as port:
        answers = Client(port).at_times([asked(kind, answer=5) for kind in streams], 10)
    assert [(a.status, a.tokens) for a in answers] == [("ok", 5)] * 4
    assert [a.counts for a in answers] == [[2, 1, 2], [4, 1], [2.5, 2.5], [2.5, 2.5]]


def test_llamacpp_is_asked_for_its_count_with_every_event(model_dir: Any, tmp_path: Path) -> None:
    ours = System("bf16", str(model_dir("llama")))
    peer = Peer(
        "x",
        str(gguf(tmp_path / "x.gguf", ours.config.hidden_size)),
        engine="llama.cpp",
        asked_kv=16,
        like=ours,
    )
    with subprocess.Popen(["true"]) as process:
        askers = [serving.Asker(system, TRACE, Server(process, 1)) for system in (ours, peer)]
    bodies = [json.loads(asker.asked(TRACE, "load")[0].body) for asker in askers]
    assert [body.get("timings_per_token") for body in bodies] == [None, True]


def test_requests_come_at_their_times_and_what_is_late_is_cut() -> None:
    held = threading.Event()

    def slow(handler: BaseHTTPRequestHandler, body: Json) -> None:
        if body["kind"] == "slow":
            held.wait(10)
        stand_in(handler, body)

    with standing_in(slow) as port:
        answers = Client(port).at_times([asked("good", 0.2), asked("slow", 0.3), asked("good", 0.6)], 1.5)
        held.set()
    assert [answer.status for answer in answers] == ["ok", "unfinished", "ok"]
    assert answers[0].asked >= 0.2


def test_as_many_ask_together_as_may() -> None:
    now, most, lock = 0, 0, threading.Lock()

    def count(handler: BaseHTTPRequestHandler, body: Json) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.05)
        with lock:
            now -= 1
        stand_in(handler, body)

    with standing_in(count) as port:
        answers = Client(port).together([asked("good") for _ in range(9)], 3, 10)
    assert [answer.status for answer in answers] == ["ok"] * 9
    assert most == 3


def test_nobody_there_is_a_failure() -> None:
    with standing_in(stand_in) as port:
        pass
    (answer,) = Client(port).at_times([asked("good")], 2)
    assert answer.status == "failed" and "Connection" in answer.error


# ---- systems


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bf16=model", ("bf16", "model", None, None, None)),
        ("four=out@4", ("four", "out", 4.0, None, None)),
        ("all=out@auto", ("all", "out", None, 3.0, None)),
        ("some=a/b@2.5-4.5+kv8", ("some", "a/b", 4.5, 2.5, 8)),
        ("x=user@home/out@3", ("x", "user@home/out", 3.0, None, None)),
        ("atom=atom+kv4", ("atom", "atom", None, None, 4)),
    ],
)
def test_systems_are_named(text: str, found: tuple[object, ...]) -> None:
    made = parsed(text)
    assert (made.name, made.model, made.bits, made.least, made.asked_kv) == found


@pytest.mark.parametrize(
    ("text", "says"), [("out@4", "expected NAME=MODEL"), ("a=out@3+kv5", "16, 8, 4 bits")]
)
def test_other_systems_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parsed(text)


def test_a_budget_is_shared_by_weights_keys_and_values(model_dir: Any, anybit_artifact: Path) -> None:
    plain, file = System("bf16", str(model_dir("llama"))), System("all", str(anybit_artifact))
    config = plain.config
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    token = config.num_hidden_layers * config.num_key_value_heads * 2 * head * 2  # of 16 bits
    assert plain.kv_token == token
    weights = sum(path.stat().st_size for path in Path(plain.model).glob("*.safetensors"))
    assert 0.95 * weights < plain.weight_bytes <= weights
    assert kv_memory(plain, plain.weight_bytes + 70 * token) == 70 * token
    narrow = System("narrow", file.model, bits=3.0)
    assert narrow.weight_bytes < file.weight_bytes < plain.weight_bytes
    assert System("auto", file.model, least=3.0).step_bytes == narrow.step_bytes < narrow.weight_bytes
    most = plain.weight_bytes + 70 * token
    assert common_context([plain, file], most, 32) == 64  # whole pages of the one with the least
    with pytest.raises(InputError, match=r"its weights take .* give more"):
        kv_memory(plain, plain.weight_bytes)


@pytest.mark.parametrize("bits", [None, 16, 8])
def test_a_step_reads_no_embedding_beside_a_head(
    bits: int | None, model_dir: Any, artifact_of: Callable[..., Path]
) -> None:
    def system(family: str) -> System:
        return System("x", str(model_dir(family) if bits is None else artifact_of(family, embed_bits=bits)))

    tied, untied = system("llama-tied"), system("llama")
    embedding = untied.weight_bytes - tied.weight_bytes
    assert tied.step_bytes == tied.weight_bytes
    assert untied.step_bytes == untied.weight_bytes - embedding
    plain = {None: 4, 16: 2, 8: 1}[bits] * untied.config.vocab_size * untied.config.hidden_size
    assert plain <= embedding < 1.5 * plain  # it may have scales


def test_a_step_of_a_peer_reads_no_embedding_beside_a_head(tmp_path: Path) -> None:
    peers = [
        Peer("x", str(gguf(tmp_path / f"{untied}.gguf", untied=untied)), engine="llama.cpp", asked_kv=16)
        for untied in (False, True)
    ]
    tied, untied = peers
    assert tied.step_bytes == tied.weight_bytes == untied.step_bytes
    assert untied.weight_bytes - untied.step_bytes == 320 * 64 * 2


def test_what_cannot_be_measured_is_refused_before_any_work(model_dir: Any, tmp_path: Path) -> None:
    plain = System("bf16", str(model_dir("llama")))
    memory = plain.weight_bytes + 10**7

    def check(systems: list[System], **given: Any) -> None:
        Plan(**{"systems": systems, "traces": [TRACE], "memory": memory} | given).check()

    if not cpu.available():
        pytest.skip("the native extension is not built")
    check([plain])
    with pytest.raises(InputError, match="a name of its own"):
        check([plain, plain])
    with pytest.raises(InputError, match="ten: give every trace a name of its own"):
        check([plain], traces=[TRACE, OTHER])
    with pytest.raises(InputError, match="there is no system"):
        check([])
    with pytest.raises(InputError, match="five: a load has 10 requests or more: give more --requests"):
        check([plain], traces=[Trace("five", "", TRACE.requests[:5])])
    with pytest.raises(InputError, match="expected a share of saturation"):
        check([plain], load=0.0)
    with pytest.raises(InputError, match=r"llama\.cpp needs its program and a --gguf"):
        check([plain], programs=Programs(llama=tmp_path / "llama-server"))
    other = Peer("x", str(gguf(tmp_path / "x.gguf", hidden=80)), engine="llama.cpp", asked_kv=16, like=plain)
    with pytest.raises(InputError, match="unlike bf16"):
        check([plain, other], programs=Programs(llama=tmp_path / "llama-server"))


def test_servers_get_their_share() -> None:
    share = Share(kv_bytes=5_000_000, kv_tokens=3000, context=2048, running=4, threads=2)
    ours = command(parsed("auto=out@3-4.5+kv8"), share, Programs(), 1234)
    given = dict(zip(ours[5::2], ours[6::2]))
    assert given == {
        "--port": "1234", "--kv-memory": "5000000", "--context": "2048", "--kv-bits": "8", "--max-running": "4",
        "--max-waiting": "1000", "--threads": "2", "--drain-seconds": "1", "--bits": "4.5", "--auto-bits": "3",
    }  # fmt: skip
    peer = Peer("llama.cpp", "x.gguf", engine="llama.cpp", asked_kv=16)
    theirs = command(peer, share, Programs(llama=Path("llama-server")), 1234)
    assert theirs[0] == "llama-server" and {"-c", "3000", "-np", "4", "--metrics"} <= set(theirs)


def test_a_cell_has_a_key_of_all_that_its_figures_depend_on(model_dir: Any, tmp_path: Path) -> None:
    systems = [System(name, str(model_dir("llama"))) for name in ("a", "b")]
    memory = systems[0].weight_bytes + 10**7
    base: Json = {"systems": systems, "traces": [TRACE], "memory": memory, "threads": 1}

    def key(system: System = systems[1], trace: Trace = TRACE, **given: Any) -> str:
        return json.dumps(Plan(**base | given).key(system, trace), sort_keys=True)

    others = [
        key(systems[0]), key(System("b", systems[1].model, bits=4.0)), key(System("b", systems[1].model, least=3.0)),
        key(System("b", systems[1].model, asked_kv=8)), key(trace=OTHER), key(trace=replace(TRACE, name="x")),
        key(trace=replace(TRACE, requests=TRACE.requests[:-1])), key(memory=memory + 1), key(load=0.5),
        key(seconds=1), key(saturation=1), key(drain=1), key(running=1), key(slots=1), key(threads=2),
        key(bounds=Bounds(first=1)), key(systems=systems[::-1]),
    ]  # fmt: skip
    assert key() == key() and len({key(), *others}) == 1 + len(others)
    assert systems[0].model not in key()


def test_ratios_are_of_the_cells_of_one_plan() -> None:
    def cell(trace: str, rate: float, reference: bool = False) -> Json:
        part = {"tokens_per_second": rate}
        names = {"trace": trace, "system": f"{rate}", "reference": reference}
        return {**names, "saturation": part, "predicted": part}

    cells = [cell("x", 2, True), cell("x", 3), cell("y", 4, True)]
    assert [row["measured"] for row in ratios(cells)] == [1, 1.5, 1]
    with pytest.raises(InputError, match="x has 2 references: expected the cells of one plan"):
        ratios([*cells, cell("x", 5, True)])
    with pytest.raises(InputError, match="z has 0 references"):
        ratios([*cells, cell("z", 5)])


def test_the_file_of_the_results_has_the_cells_of_one_plan() -> None:
    file = serving.read(Path(__file__).parents[2] / "bench/results/serve-trace.json")
    assert file is not None and ratios(file["cells"])[0]["measured"] == 1
    assert len({json.dumps(cell["key"]) for cell in file["cells"]}) == len(file["cells"]) == 9


def test_a_peer_is_known_by_the_version_that_it_states(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"

    def stating(line: str) -> str:
        program.write_text(f"#!/bin/sh\necho '{line}' >&2\n")
        program.chmod(0o755)
        return version("llama.cpp", program)

    assert stating("version: 5590 (0d398442)") == "5590 (0d398442)"
    one, other = stating("version: 0 (unknown)"), stating("version: 0 (unknown) ")
    assert one != other and all(re.fullmatch("[0-9a-f]{12}", found) for found in (one, other))
    plain = mistralrs(tmp_path)  # a package without a version
    before = version("mistral.rs", plain)
    (tmp_path / "package/mistralrs.py").write_text("")
    assert version("mistral.rs", plain) != before
    (tmp_path / "package/mistralrs-0.9.dist-info").mkdir()
    (tmp_path / "package/mistralrs-0.9.dist-info/METADATA").write_text("Name: mistralrs\nVersion: 0.9\n")
    (tmp_path / "package/mistralrs-0.9.dist-info/top_level.txt").write_text("mistralrs\n")
    assert version("mistral.rs", plain) == "mistralrs 0.9"


def test_a_peer_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not start, so llama\.cpp cannot be measured"):
        version("llama.cpp", tmp_path / "llama-server")
    with pytest.raises(InputError, match="expected a Python interpreter that has the package xllamacpp"):
        version("llama.cpp", mistralrs(tmp_path))


BORROWED = """
import threading, time
send, one = Runner.send_chat_completion_request, threading.Lock()

def alone(self, request):
    if not one.acquire(blocking=False):
        raise RuntimeError("Already borrowed")
    time.sleep(0.1)
    one.release()
    return send(self, request)

Runner.send_chat_completion_request = alone
"""


@pytest.mark.e2e
def test_mistralrs_gets_a_server(tmp_path: Path) -> None:
    """Its package refuses calls of two threads at once."""
    file, programs, port = gguf(tmp_path / "x.gguf"), Programs(mistralrs=mistralrs(tmp_path)), free_port()
    package = tmp_path / "package/mistralrs.py"
    package.write_text(package.read_text() + BORROWED)
    share = Share(kv_bytes=1, kv_tokens=1, context=1, running=2, threads=1)
    asked_of = command(Peer("x", str(file), engine="mistral.rs", asked_kv=16), share, programs, port)
    body = json.dumps({"prompt": [1] * 10, "max_tokens": 3}).encode()
    with started(asked_of, port, 1) as server:
        answers = Client(port).at_times([Asked(0, 10, 3, body)] * 2, 10)
        assert server.figures(*QUEUES["mistral.rs"]) == [0]
        assert server.alive
    assert [(a.status, len(a.times), a.tokens) for a in answers] == [("ok", 3, 3)] * 2
    assert not server.alive


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho no such model >&2; exit 3\n")
    program.chmod(0o755)
    with (
        pytest.raises(InputError, match="ended with 3; it said: no such model"),
        started([str(program)], 1, 1),
    ):
        pass


class Telling(Server):
    """A server that says what runs and what waits, each time the next of some pages."""

    def __init__(self, *pages: str, alive: bool = True) -> None:
        self.left, self._alive = list(pages), alive

    @property
    def alive(self) -> bool:
        return self._alive

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return self.left.pop(0) if self.left else ""


def page(engine: str, *figures: int) -> str:
    return "".join(f"{name} {figure}\n" for name, figure in zip(QUEUES[engine], figures))


@pytest.mark.parametrize("engine", ["anybit", "llama.cpp"])
def test_rest_lasts_until_nothing_runs_and_nothing_waits(
    engine: str, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSE", 0)
    system = System("it", str(model_dir("llama")), engine=engine)
    idle, some = page(engine, 0, 0), page(engine, 1, 1)
    busy = [page(engine, 2, 3), page(engine, 1, 0), page(engine, 0, 1), "", idle, page(engine, 1, 0)]
    server = Telling(*busy, idle, idle, some)
    serving.Asker(system, TRACE, server).rest()
    assert server.left == [some]
    monkeypatch.setattr(serving, "REST", 0.05)
    for silent in (Telling(), Telling(*[some] * 10**4)):
        with pytest.raises(InputError, match=r"it does not say within 0\.05 seconds that it has dropped"):
            serving.Asker(system, TRACE, silent).rest()
    with pytest.raises(InputError, match="it ended when its requests were cut off"):
        serving.Asker(system, TRACE, Telling(alive=False)).rest()


# ---- all of it


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(serving, "COSTS", 1)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.native
@needs_native
def test_a_run_and_another_that_goes_on(
    small: None, model_dir: Any, anybit_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, file = System("bf16", str(model_dir("llama"))), System("auto", str(anybit_artifact), least=3.0)
    memory, out = plain.weight_bytes + 10**6, tmp_path / "serve.json"
    plan: Json = {"traces": [TRACE], "memory": memory, "seconds": 20, "saturation": 20, "drain": 20}
    plan |= {"running": 4, "threads": 1}
    alone = serve(Plan(systems=[plain], **plan), out)
    assert json.loads(out.read_text()) == alone
    made = serve(Plan(systems=[plain, file], **plan), out)
    reference, auto = made["cells"]
    assert reference == alone["cells"][0] and (reference["reference"], auto["reference"]) == (True, False)
    assert str(tmp_path) not in out.read_text() and plain.model not in out.read_text()
    for cell in (reference, auto):
        for part in (cell["saturation"], cell["load"]):
            assert (part["offered"], part["completed"], part["errors"]) == (10, 10, [])
        assert cell["kv_bytes"] == memory - cell["weight_bytes"]
        assert cell["load"]["preemptions"] == 0
        assert cell["load"]["offered_tokens"] == TRACE.tokens
        offered = cell["load"]["tokens_per_second_offered"]
        assert 0 < offered < 1.1 * cell["load"]["tokens_per_second_asked"]
    assert auto["load"]["tokens_per_second_asked"] == 0.8 * reference["saturation"]["tokens_per_second"]
    low, high = auto["load"]["bits"]["min"], auto["load"]["bits"]["max"]
    assert 2.5 < low <= high and reference["load"]["bits"]["mean"] == 16
    assert next(row["measured"] for row in ratios(made["cells"])) == 1

    def never(*_: Any) -> None:
        raise AssertionError("a cell that is there was measured again")

    monkeypatch.setattr(serving, "started", never)
    assert serve(Plan(systems=[plain, file], **plan), out) == made
    for other in (
        {"running": 3},
        {"seconds": 21},
        {"load": 0.7},
        {"memory": memory + 1},
        {"traces": [OTHER]},
    ):
        with pytest.raises(AssertionError, match="measured again"):
            serve(Plan(systems=[plain, file], **plan | other), out)
    assert json.loads(out.read_text()) == made

    monkeypatch.undo()
    stale = made["cells"][0] | {"key": {"memory": 1}, "system": "stale"}
    other_code = auto | {"made_by": auto["made_by"] | {"source": "other"}}
    serving.write({**made, "cells": [stale, reference, other_code]}, out)
    monkeypatch.setattr(serving, "_measure", lambda *_: {"saturation": auto["saturation"], "new": True})
    again = serve(Plan(systems=[plain, file], **plan), out)["cells"]
    assert (again[0], again[1]["new"]) == (reference, True)
    assert json.loads(out.read_text())["cells"] == [stale, *again]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.native
@needs_native
def test_the_command_prints_and_draws(small: None, model_dir: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, trace, plot = str(model_dir("llama")), tmp_path / "ten.csv", tmp_path / "serve.png"
    trace.write_text(CSV)
    run = ["bench", "serve", f"bf16={model}", "--trace", str(trace), "--requests", "10", "--memory", "2MB"]
    run += ["--seconds", "20", "--saturation", "20", "--running", "2", "--threads", "1", "--plot", str(plot)]
    made = CliRunner().invoke(app, [*run, "-o", str(tmp_path / "serve.json")])
    assert made.exit_code == 0, made.output
    assert (
        "ten: 10 requests, 0 shortened" in made.output and "2 MB for weights, keys and values" in made.output
    )
    assert "goodput: requests/s with the first token within 2 s" in made.output
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "No such file"),
        (["--gguf", "x.gguf"], "give a file and who serves it"),
        (["--plot", "x.txt"], "expected a name that ends in"),
    ],
)
def test_the_command_refuses(options: list[str], says: str, model_dir: Any) -> None:
    run = ["bench", "serve", f"bf16={model_dir('llama')}", "--trace", "none.csv", "--memory", "2MB", *options]
    made = CliRunner().invoke(app, run)
    assert made.exit_code != 0
    assert says in " ".join((made.output + str(made.exception)).split())


@pytest.mark.parametrize("missing", ["--memory", "--trace"])
def test_the_command_says_what_is_missing(missing: str) -> None:
    given = {"--memory": "2MB", "--trace": "none.csv"}
    options = [word for name, value in given.items() if name != missing for word in (name, value)]
    made = CliRunner().invoke(app, ["bench", "serve", "a=b", *options])
    assert made.exit_code == 2
    assert f"Missing option '{missing}'" in made.output


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for other in (
        '{"bench": "decode"}',
        '{"bench": "serve", "cells": [{"trace": "x"}]}',
        '{"bench": "serve"}',
    ):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(InputError, match="no file of `anybit bench serve`"):
            serving.read(tmp_path / "other.json")
    assert serving.read(tmp_path / "none.json") is None
