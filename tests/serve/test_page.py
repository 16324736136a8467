"""The page in a browser: what a person sees, by mouse and by keyboard, in light and dark, wide and narrow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from anybit import Engine
from anybit.encoder import Encoder
from anybit.in_transformers import InTransformers
from anybit.kernels import cpu
from anybit.serve.api import exchange
from anybit.serve.http.guard import Guard
from anybit.serve.run.one_text import OneText
from tests.serve.browser import PROGRAM, Browser, browser
from tests.serve.conftest import serving, slow_steps

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.native,
    pytest.mark.skipif(not cpu.available(), reason="the native extension is not built"),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium"),
]
ENTER, ESCAPE, RIGHT = ("Enter", 13, "\r"), ("Escape", 27), ("ArrowRight", 39)
ANSWERS = "document.querySelectorAll('.made').length"


async def say(page: Browser, text: str) -> None:
    await page.run("document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press(*ENTER)


@asynccontextmanager
async def visiting(url: str, tokens: int, dark: bool = False) -> AsyncIterator[Browser]:
    """The page once the model is there, whose answers have so many tokens; it may complain of nothing."""
    async with browser() as page:
        await page.open(url, dark=dark)
        await page.until("document.title.startsWith('tiny')")
        await page.run(f"document.getElementById('max_tokens').value = {tokens}")
        yield page
        assert page.complaints == []


async def a_visit(url: str, widths: list[float]) -> None:
    async with browser() as page:
        await page.open(url)
        # The key is asked for, and an answer comes in pieces.
        await page.until("document.getElementById('key')?.open")
        await page.type("secret")
        await page.press(*ENTER)
        await page.until("document.title.startsWith('tiny')")
        await page.run("document.getElementById('max_tokens').value = 20")
        await page.run("document.getElementById('seed').value = 4")
        await say(page, "hello")
        await page.until(f"{ANSWERS} === 1")
        assert await page.run("document.querySelector('.turn.user').textContent") == "hello"
        for figure in ("rate", "first", "read", "memory"):
            assert await page.run(f"/\\d/.test(document.querySelector('.{figure}').textContent)")
        # Arrow keys go from level to level.
        shown = "Number.parseFloat(document.querySelector('.bits').textContent)"
        before = await page.run(shown)
        await page.run("document.querySelector('.slider').focus()")
        await page.press(*RIGHT)
        after = await page.run(shown)
        assert after > before and min(abs(width - after) for width in widths) < 0.006
        # Two widths side by side, of which each answers the same prompt.
        await page.run("document.getElementById('compare').click()")
        await say(page, "again")
        await page.until(f"{ANSWERS} === 2")
        bits = await page.run("Array.from(document.querySelectorAll('.bits'), (shown) => shown.textContent)")
        assert len({*bits}) == 2
        # Settings are sent as they were typed, and the server says what is wrong with one.
        sent = "JSON.stringify(settings().numbers)"
        await page.run("document.getElementById('min_p').value = '0.005'")
        await page.run("document.getElementById('temperature').value = ' 0.75 '")
        assert await page.run(sent) == '{"temperature":0.75,"min_p":0.005,"seed":4,"max_tokens":20}'
        await page.run("document.getElementById('temperature').value = '0,75'")
        await say(page, "wrong")
        await page.until("document.querySelectorAll('.turn.error').length === 2")
        assert "0,75" in await page.run("document.querySelector('.turn.error').textContent")
        await page.run(
            "for (const name of ['min_p', 'temperature']) document.getElementById(name).value = ''"
        )
        # A conversation that is too long is said to be.
        await say(page, "word " * 40)
        await page.until("document.querySelectorAll('.turn.error').length === 4")
        last = "[...document.querySelectorAll('.turn.error')].at(-1).textContent"
        assert "the context holds 128" in await page.run(last)
        # Dark and light.
        light = await page.run("getComputedStyle(document.body).backgroundColor")
        await page.run("document.getElementById('theme').click()")
        assert await page.run("getComputedStyle(document.body).backgroundColor") != light
        # Narrow: nothing is wider than the screen, with settings open, too.
        await page.run("document.getElementById('settings').click()")
        await page.resize(360, 700)
        assert await page.run("document.documentElement.scrollWidth") <= 360
        # The only complaints are of the requests without a key and of those that are too long.
        assert [text for text in page.complaints if "status of 40" not in text] == []


def test_a_visit(other_engine: Engine) -> None:
    with serving(other_engine, Guard(keys=("secret",))) as (client, _):
        asyncio.run(a_visit(f"http://127.0.0.1:{client.port}/", other_engine.widths))


async def a_visit_to_an_encoder(url: str) -> None:
    async with browser() as page:
        await page.open(url)
        await page.until("document.title.startsWith('tiny')")
        assert "does not chat" in await page.run("document.getElementById('model').textContent")
        assert await page.run("document.getElementById('composer').offsetParent === null")
        assert page.complaints == []


def test_an_encoder_does_not_pretend_to_chat(encoder: Encoder) -> None:
    with serving(encoder) as (client, _):
        asyncio.run(a_visit_to_an_encoder(f"http://127.0.0.1:{client.port}/"))


async def a_stop(url: str) -> None:
    async with visiting(url, 100, dark=True) as page:
        assert await page.run("document.documentElement.dataset.theme") == "dark"
        await say(page, "hello")
        await page.until("document.querySelector('.turn.assistant')?.said")
        await page.press(*ESCAPE)
        await page.until("document.getElementById('send').textContent === 'Send'")
        assert await page.run("document.querySelectorAll('.turn.running, .turn.error').length") == 0


def test_escape_stops_an_answer(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(other_engine) as (client, state), slow_steps(monkeypatch, 0.05):
        asyncio.run(a_stop(f"http://127.0.0.1:{client.port}/"))
        assert state.served is not None


async def a_wait(url: str) -> None:
    async with visiting(url, 2) as page:
        await say(page, "hello")
        await page.until(f"{ANSWERS} === 1 || document.querySelector('.turn.error')")
        assert await page.run("document.querySelector('.turn.error')?.textContent ?? ''") == ""


def test_an_answer_may_let_people_wait(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.02)
    with serving(other_engine) as (client, _), slow_steps(monkeypatch, 0.2):
        asyncio.run(a_wait(f"http://127.0.0.1:{client.port}/"))


async def a_visit_to_one_width(url: str) -> None:
    async with visiting(url, 5) as page:
        assert await page.run("document.querySelector('.slider').hidden")
        await say(page, "hello")
        await page.until(f"{ANSWERS} === 1 || document.querySelector('.turn.error')")
        assert await page.run("document.querySelector('.turn.error')?.textContent ?? ''") == ""


def test_a_model_inside_transformers_answers(model_dir: Callable[[str], Path]) -> None:
    inside = OneText(InTransformers(str(model_dir("gpt2"))), "tiny")
    with serving(inside, pages=1, running=1) as (client, _):
        asyncio.run(a_visit_to_one_width(f"http://127.0.0.1:{client.port}/"))


async def a_thought(url: str) -> None:
    async with visiting(url, 5) as page:
        await say(page, "hello")
        await page.until(f"{ANSWERS} === 1")
        assert await page.run("document.querySelector('.turn.assistant .thought').textContent.length > 0")
        assert await page.run("document.querySelector('.turn.assistant').said") == ""


def test_a_thought_stands_apart(other_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}"
    monkeypatch.setattr(other_engine.tokenizer, "chat_template", template)
    with serving(other_engine) as (client, _):
        asyncio.run(a_thought(f"http://127.0.0.1:{client.port}/"))


async def a_new_conversation(url: str) -> None:
    async with visiting(url, 60) as page:
        await say(page, "hello")
        await page.until("document.querySelector('.turn.assistant')?.said")
        await page.run("document.getElementById('clear').click()")
        await page.until("document.getElementById('send').textContent === 'Send'")
        await page.run("document.getElementById('max_tokens').value = 3")
        await say(page, "again")
        await page.until(f"{ANSWERS} === 1")
        said = await page.run("panes[0].messages.map((message) => message.role).join()")
        assert said == "user,assistant"


def test_an_answer_that_was_cleared_away_is_not_part_of_the_next(
    other_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(other_engine) as (client, _), slow_steps(monkeypatch, 0.05):
        asyncio.run(a_new_conversation(f"http://127.0.0.1:{client.port}/"))
