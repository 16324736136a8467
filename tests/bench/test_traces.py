"""Traces of requests, and what of a load's answers becomes figures: against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from anybit.bench.load import Answer
from anybit.bench.prediction import Work
from anybit.bench.serving_figures import Bounds, figures, most_at_once, offered, percentile, steady_rate
from anybit.bench.traces import Request, Trace, read_trace
from anybit.errors import InputError

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = """2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,396,109
2023-11-16 18:15:50.6805900,20,6
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_its_first_requests(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD + ROWS), 2)
    assert trace.requests == (Request(0.0, 374, 44), Request(1.5, 396, 109))
    assert (trace.name, trace.tokens, trace.prompt, trace.answer) == ("trace", 923, 385, 76.5)


def test_times_may_name_a_zone_and_lines_may_be_blank(tmp_path: Path) -> None:
    text = """
2024-05-10 00:00:00.009930+00:00,10,1

2024-05-10 00:00:00.2599300Z,20,2
2024-05-10 00:00:01+00:00,30,3
 \t
2024-05-10 03:00:01.5099300+03:00,40,4
2024-05-10 00:00:02.00993,50,5
"""
    trace = read_trace(written(tmp_path, "\n" + HEAD + text), 5)
    assert [r.at for r in trace.requests] == pytest.approx([0, 0.25, 0.99007, 1.5, 2])
    assert [r.prompt for r in trace.requests] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the first line is to name the columns"),
        ("time,prompt,answer\n" + ROWS, "TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEAD + ROWS, "has 3 requests, and 4 were asked for"),
        (HEAD + "yesterday,374,44\n" + ROWS, "line 2: expected a time and two numbers"),
        (HEAD + ROWS + "2023-11-16 18:15:50.6805900,20\n", "line 5: expected a time and two numbers"),
        (HEAD + ROWS + "2023-11-16 18:15:50.7,20,0\n", "line 5: a request has at least one token"),
        (HEAD + ROWS + "2023-11-16 18:15:49.0,20,5\n", "line 5: its time is before that of line 4"),
        (HEAD + ROWS + "\n\n2023-11-16 18:15:49.0,20,5\n", "line 7: its time is before that of line 4"),
        (HEAD + ROWS + "\n2023-11-16 18:15:51+00:0,20,5\n", "line 6: expected a time and two numbers"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        read_trace(written(tmp_path, text), 4)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv", 1)
    (tmp_path / "other.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is no CSV file"):
        read_trace(tmp_path / "other.csv", 1)


def test_requests_are_shortened(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD + ROWS), 3).within(128)
    assert [(r.prompt, r.answer) for r in trace.requests] == [(84, 44), (64, 64), (20, 6)]
    assert (trace.clipped, trace.tokens) == (2, 282)


def even(*at: float) -> Trace:
    return Trace("even", "", tuple(Request(time, 9, 1) for time in at))


def test_a_load_is_the_longest_beginning_that_fits_at_its_rate() -> None:
    """A sparse beginning, ten tokens a request: 2 tokens/s for 60 seconds are 12 requests, whenever they came."""
    trace = even(*range(0, 1200, 100), *range(1100, 1188))
    sent = trace.at_rate(2, 60)
    assert len(sent.requests) == 12
    assert [r.at for r in sent.requests] == pytest.approx([60 / 1100 * 100 * i for i in range(12)])
    assert len(trace.at_rate(2, 59.9).requests) == 11
    whole = trace.at_rate(2, 10**4)
    assert (len(whole.requests), whole.requests[-1].at) == (100, pytest.approx(500))
    assert (whole.name, whole.state, whole.clipped) == (trace.name, trace.state, trace.clipped)


def test_a_load_of_too_few_requests_or_at_once_is_refused() -> None:
    with pytest.raises(InputError, match=r"at 2 tokens/s 9 requests fit within 49 seconds.* more --seconds"):
        even(*range(100)).at_rate(2, 49)
    with pytest.raises(InputError, match="all requests come at once"):
        even(*[0] * 10, 1).at_rate(1, 100)


def test_what_was_offered_is_counted_as_it_was_sent() -> None:
    answers = [answer(0, 1.0), answer(4, status="refused"), answer(2, 3.0, 4.0)]
    assert offered(answers) == {"offered_tokens": 33, "tokens_per_second_offered": 33 / 4}
    assert offered([answer(0, 1.0)])["tokens_per_second_offered"] is None


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3
    assert [percentile(range(1, 101), share) for share in (0.01, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    assert percentile([4.0, 1.0, 2.0], 0.5) == 2


def answer(asked: float, *times: float, status: str = "ok", prompt: int = 10, bits: float = 4) -> Answer:
    widths = {"min": bits, "mean": bits, "max": bits}
    made = Answer(prompt, len(times), asked, list(times), times[-1] if times else None, status, len(times))
    made.bits = widths if times else None
    return made


def test_figures_of_a_load() -> None:
    """Five requests: a good one, one whose first token is late, a slow one, one refused, one cut off."""
    answers = [
        answer(0, 1.0, 1.1, 1.2),
        answer(0.5, 4.0, 4.1),
        answer(1, 2.0, 3.0, bits=3),
        answer(2, status="refused"),
        answer(3, 5.0, status="unfinished"),
    ]
    found = figures(answers, Bounds(first=2.0, per_prompt_token=0.01, gap=0.5))
    assert [found[name] for name in ("offered", "completed", "refused", "failed", "unfinished")] == [
        *(5, 3, 1, 0, 1)
    ]
    assert found["seconds"] == 5
    assert found["requests_per_second"] == pytest.approx(3 / 5)
    assert found["output_tokens_per_second"] == pytest.approx(8 / 5)
    assert found["tokens_per_second"] == pytest.approx((8 + 40) / 5)
    assert (found["first_token_p50"], found["first_token_p99"]) == (1.0, 3.5)
    assert (found["gap_p50"], found["gap_p99"]) == (pytest.approx(0.1), 1.0)
    assert (found["good"], found["goodput"]) == (1, pytest.approx(1 / 5))
    assert found["most_at_once"] == 1
    assert found["bits"] == {"min": 3, "mean": pytest.approx((5 * 4 + 2 * 3 + 4) / 8), "max": 4}


def test_texts_at_once_and_none() -> None:
    assert most_at_once([answer(0, 1, 5), answer(0, 2, 3), answer(0, 3, 4), answer(0, 6)]) == 3
    nothing = figures([], Bounds())
    assert (nothing["goodput"], nothing["first_token_p50"], nothing["bits"]) == (0, None, None)


def test_saturation_counts_behind_its_beginning() -> None:
    answers = [answer(0, 2, 4, 6, 8), answer(0, 1, 2), answer(0, 5, 7)]
    # From 3 to 9: of the first 4, 6 and 8, and the last one's prompt of 10 with both its tokens.
    assert steady_rate(answers, 9, False) == pytest.approx((3 + 10 + 2) / 6)
    assert steady_rate([answer(0)], 9, False) == 0


def test_where_requests_ran_out_saturation_ends_as_the_last_begins() -> None:
    answers = [answer(0, 1, 2, 4, 6, 8), answer(3, 5, 7), answer(6, 7, 8)]
    # From 2 to 6: of the first 4 and 6, and the second's prompt of 10 with its first token.
    assert steady_rate(answers, 9, True) == pytest.approx((2 + 10 + 1) / 4)
    assert steady_rate(answers, 5.4, True) == pytest.approx((2 + 10 + 1) / 3.6)  # time was over before
    assert steady_rate([answer(0, 2, 4), answer(0, 5)], 9, True) == pytest.approx((3 + 20) / 5)  # all at once


def test_saturation_counts_tokens_and_not_events() -> None:
    told = Answer(10, 8, 0, [1, 4, 6], status="unfinished", told=[2, 3, 8], tokens=8)
    ended = Answer(10, 9, 0, [2, 4, 5], 5, "ok", tokens=9)
    unknown = Answer(10, 9, 0, [2, 4, 5], status="unfinished")
    assert [a.counts for a in (told, ended, unknown, Answer(1, 1, 0))] == [[2, 1, 5], [3] * 3, [1] * 3, []]
    assert steady_rate([told], 9, False) == pytest.approx((1 + 5) / 6)
    assert steady_rate([ended], 9, False) == pytest.approx(6 / 6)
    assert steady_rate([unknown], 9, False) == pytest.approx(2 / 6)
    found = figures([told, ended, unknown], Bounds())
    assert found["tokens_counted"] == {"by_server": 17, "by_events": 3}


def test_goodput_is_by_tokens_and_not_events() -> None:
    one = Answer(10, 9, 0, [1, 1.3, 1.6], 1.6, "ok", tokens=9)  # 0.3 seconds for three tokens
    assert Bounds(gap=0.11).keeps(one) and not Bounds(gap=0.09).keeps(one)
    assert Bounds(gap=0.0).keeps(Answer(10, 4, 0, [1], 1, "ok", tokens=4))


def test_what_computing_bytes_and_pages_predict() -> None:
    roomy = Work(
        prompt=100,
        answer=50,
        running=4,
        kv_tokens=10**6,
        step_bytes=1e8,
        kv_token=1e4,
        read_rate=1e10,
        prompt_token=1e-3,
    )
    assert roomy.together == 4
    assert roomy.step == pytest.approx(
        (1e8 + 4 * 125 * 1e4) / 1e10
    )  # reading takes longer than 4 ms of computing
    assert roomy.tokens_per_second == pytest.approx(150 / (0.1 + 50 * 0.0105 / 4))
    tight = Work(
        prompt=100,
        answer=50,
        running=4,
        kv_tokens=300,
        step_bytes=0,
        kv_token=1e4,
        read_rate=1e10,
        prompt_token=1e-3,
    )
    assert tight.together == 2
    assert tight.step == pytest.approx(2e-3)  # computing
