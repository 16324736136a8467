"""The server's addresses, on Starlette."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anybit.config import Json
from anybit.serve.api import anthropic, embeddings, openai, responses
from anybit.serve.api.exchange import Exchange
from anybit.serve.api.replies import Apart, Replies
from anybit.serve.api.turns import Turn
from anybit.serve.chat.conversation import conversation
from anybit.serve.errors import Closing, Refused, refused
from anybit.serve.fields import Fields, read_json
from anybit.serve.http import static
from anybit.serve.http.guard import Guard
from anybit.serve.http.metrics import Metrics
from anybit.serve.run.worker import STOPPING
from anybit.serve.schedule.batches import Asked
from anybit.serve.served import Named, Served, ServedEncoder

LOG = logging.getLogger(__name__)
BODY_SECONDS = 30.0  # that a body may take to come
PARSERS = 4  # threads that render templates, cut texts into tokens, compile forms and write embeddings

T = TypeVar("T")

Answer = Callable[[Any, Json, Request], Awaitable[Response]]  # of a served model of some kind


@dataclass
class State:
    """What all requests see."""

    guard: Guard
    most_bytes: int  # of a body
    most_requests: int  # at a time
    created: int = 0  # when the model was loaded, in seconds since 1970
    served: Served | ServedEncoder | None = None  # None: it is loading
    loader: threading.Thread | None = None  # that does so
    metrics: Metrics = field(default_factory=Metrics)
    requests: int = 0  # that are answered now
    of_keys: Counter[str] = field(default_factory=Counter)  # those of each key
    parsers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PARSERS, "parser"))
    turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)  # of each key at these threads

    def ready(self) -> Served | ServedEncoder:
        if self.served is None:
            raise Refused(503, "the model is loading: try again later", "loading")
        return self.served

    def turn(self, key: str) -> asyncio.Semaphore:
        """What a key's jobs of the parsers wait for: where several keys share them, none has all."""
        several = len(self.guard.keys) > 1
        return self.turns.setdefault(key, asyncio.Semaphore(PARSERS - several))


def app(state: State, lifespan: Any = None) -> Starlette:
    """The application.

    Args:
        state: `served` is set when the model is there.
        lifespan: Starlette's.
    """
    posts = {
        "/v1/chat/completions": _post(Served, _answer(openai.chat, Replies)),
        "/v1/completions": _post(Served, _answer(openai.completions, Replies)),
        "/v1/responses": _post(
            Served, _answer(responses.responses, lambda exchange, _: responses.Response(exchange))
        ),
        anthropic.MESSAGES: _post(
            Served, _answer(anthropic.messages, lambda exchange, _: anthropic.Message(exchange))
        ),
        anthropic.COUNT: _post(Served, _count),
        "/v1/embeddings": _post(ServedEncoder, _embeddings),
        "/tokenize": _post(Named, _tokenize),
        "/detokenize": _post(Named, _detokenize),
    }
    gets = {"/v1/models": _models, "/v1/models/{name:path}": _model, "/health": _health, "/metrics": _metrics}
    routes = [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
    routes += static.routes()
    middleware = [Middleware(Door, state=state, paths={*posts, *gets, *static.FILES})]
    if state.guard.origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=state.guard.origins, allow_headers=["*"], allow_methods=["*"]
        )
        middleware.insert(0, cors)
    missing: dict[Any, Any] = {404: _missing, 405: _missing}
    made = Starlette(routes=routes, middleware=middleware, exception_handlers=missing, lifespan=lifespan)
    made.state.shared = state
    return made


class Door:
    """Lets requests in, one counter and one form of error for all.

    Args:
        app: behind it.
        state: what all requests see.
        paths: that are counted by name.
    """

    def __init__(self, app: ASGIApp, state: State, paths: set[str]) -> None:
        self._app, self._state, self._paths = app, state, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, status = self._state, 0
        key: str | None = None  # whose it is; None: nobody's who may ask

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state.requests += 1
        try:
            request = Request(scope)
            scope["anybit.asked"] = time.perf_counter()
            scope["anybit.key"] = key = state.guard.check(scope["path"], request.headers)
            state.of_keys[key] += 1
            if scope["method"] == "POST":
                _refuse_late(state)
                _refuse_many(state, key)
            await self._app(scope, receive, counting)
        except ClientDisconnect:
            status = 499  # as nginx counts who left
        except Exception as error:
            if refused(error).status == 500:  # all others are what its client got wrong, or too much to do
                LOG.error("a request has failed", exc_info=error)
            if status == 0:
                await _error(error, scope["path"])(scope, receive, counting)
        finally:
            state.requests -= 1
            if key is not None:
                state.of_keys[key] -= 1
            path = scope["path"] if scope["path"] in self._paths else "other"
            state.metrics.answers[path, status] += 1


def _refuse_late(state: State) -> None:
    """Requests that come when the server stops; those that came before have until its end.

    Raises:
        Closing: it does.
    """
    if state.served is not None and state.served.runner.closing:
        raise Closing(STOPPING)


def _refuse_many(state: State, key: str) -> None:
    """Where several keys share a server, each may have as many requests as it leaves places for others.

    Raises:
        Refused: 429.
    """
    several, free = len(state.guard.keys) > 1, state.most_requests - state.requests
    if free < 0:
        raise Refused(429, f"{state.most_requests} requests are answered already: try again later", "busy")
    if several and state.of_keys[key] > free + 1:
        raise Refused(
            429,
            f"{state.of_keys[key] - 1} requests of this key are answered already: try again later",
            "busy",
        )


def _error(error: Exception, path: str) -> Response:
    found = refused(error)
    theirs = path == anthropic.MESSAGES or path.startswith(f"{anthropic.MESSAGES}/")
    body = anthropic.error_body(found) if theirs else found.body()
    return JSONResponse(body, found.status, found.headers)


def _missing(request: Request, error: Exception) -> Response:
    path = request.url.path
    if getattr(error, "status_code", 404) == 405:
        found = Refused(405, f"{path:.100} does not take {request.method}", "method_not_allowed")
    else:
        found = Refused(404, f"{path:.100} is no address of this server", "not_found")
    return _error(found, path)


def _post(kind: type[Named], answer: Answer) -> Any:
    """An address that takes a JSON object; whatever is wrong with it has an answer.

    Args:
        kind: of the models that it asks; others refuse.
        answer: makes the answer.
    """

    async def handle(request: Request) -> Response:
        state: State = request.app.state.shared
        served = state.ready()
        if not isinstance(served, kind):
            raise Refused(400, f"{served.name} {served.instead}", "wrong_kind_of_model")
        body = read_json(await _body(request, state.most_bytes))
        return await answer(served, body, request)

    return handle


async def _body(request: Request, most: int) -> bytes:
    too_large = Refused(
        413, f"the body has more than {most} bytes, which is this server's limit", "too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:g} seconds") from None
    return b"".join(parts)


async def _parsed(request: Request, parse: Callable[..., Any], served: Named, body: Json) -> Any:
    """What a body says, found in a thread: templates, tokenizers and forms take their time.

    Raises:
        ClientDisconnect: its client has left meanwhile.
    """
    return await _unless_gone(request, _apart(request, parse, served, body, request.scope["anybit.key"]))


async def _apart(request: Request, function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns that would hold up others."""
    state: State = request.app.state.shared
    async with state.turn(request.scope["anybit.key"]):
        return await asyncio.get_running_loop().run_in_executor(state.parsers, function, *given)


# ---- texts


def _answer(
    parse: Callable[[Served, Json, str], openai.Wanted], form: Callable[[Exchange, Apart], Replies | Turn]
) -> Answer:
    def exchange_of(served: Served, body: Json, key: str) -> Exchange:
        return Exchange(served, parse(served, body, key))

    async def answer(served: Served, body: Json, request: Request) -> Response:
        exchange: Exchange = await _parsed(request, exchange_of, served, body)
        replies, metrics = form(exchange, partial(_apart, request)), request.app.state.shared.metrics
        exchange.submit(request.scope["anybit.asked"])
        if exchange.wanted.stream:
            return Events(exchange, replies, metrics)
        try:
            pieces = await _unless_gone(request, replies.whole())
        finally:
            _close(exchange, metrics)
        if not exchange.wanted.logprobs:  # a long answer is long by these
            return Response(b"".join(pieces), media_type="application/json")
        return StreamingResponse(_made_apart(request, pieces), media_type="application/json")

    return answer


class Events(StreamingResponse):
    """A stream of events, whose texts end with it."""

    def __init__(self, exchange: Exchange, replies: Replies | Turn, metrics: Metrics) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(replies.events(), media_type="text/event-stream", headers=headers)
        self._exchange, self._metrics = exchange, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._exchange, self._metrics)


def _close(exchange: Exchange, metrics: Metrics) -> None:
    exchange.close()
    for job in exchange.jobs:
        metrics.ended(job)


async def _unless_gone(request: Request, made: Awaitable[T]) -> T:
    """An answer, unless its client leaves first.

    Raises:
        ClientDisconnect: it did.
    """
    answer = asyncio.ensure_future(made)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _embeddings(served: ServedEncoder, body: Json, request: Request) -> Response:
    wanted = await _parsed(request, embeddings.embeddings, served, body)
    asked = Asked(wanted.texts, served.encoder.dimensions, wanted.key)
    served.runner.submit(asked)
    rows = await _unless_gone(request, asyncio.wrap_future(asked.done))
    request.app.state.shared.metrics.embedding.add(time.perf_counter() - request.scope["anybit.asked"])
    pieces = _made_apart(request, embeddings.answer(served, wanted, rows))
    return StreamingResponse(pieces, media_type="application/json")


async def _made_apart(request: Request, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces of an answer, each made in a thread when the one before is sent."""
    while piece := await _apart(request, next, pieces, b""):
        yield piece


async def _count(served: Served, body: Json, request: Request) -> Response:
    return JSONResponse({"input_tokens": await _parsed(request, anthropic.count, served, body)})


async def _tokenize(served: Named, body: Json, request: Request) -> Response:
    tokens = await _parsed(request, _tokens, served, body)
    return JSONResponse({"count": len(tokens), "max_model_len": served.context, "tokens": tokens})


def _tokens(served: Named, body: Json, key: str) -> list[int]:
    fields = Fields(body)
    openai.asked_bits(served, fields)
    prompt = fields.text("prompt")
    if (prompt is None) == ("messages" not in fields):
        raise Refused(400, "give either prompt, a text, or messages, a conversation", param="prompt")
    asked = conversation(fields) if prompt is None else None
    fields.finish()
    return served.encode_chat(asked).tokens if asked is not None else served.encode(prompt or "")


async def _detokenize(served: Named, body: Json, request: Request) -> Response:
    return JSONResponse({"prompt": await _parsed(request, _text, served, body)})


def _text(served: Named, body: Json, key: str) -> str:
    fields = Fields(body)
    openai.asked_bits(served, fields)
    tokens = fields.any("tokens")
    fields.finish()
    if isinstance(tokens, list) and len(tokens) > served.context:
        raise Refused(
            400,
            f"tokens has {len(tokens)} ids, expected at most {served.context}, the context: send fewer at a time",
            param="tokens",
        )
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < served.vocabulary for t in tokens):
        raise Refused(
            400, f"tokens is expected to be a list of ids below {served.vocabulary}", param="tokens"
        )
    return served.decode(tokens)


# ---- what there is


async def _models(request: Request) -> Response:
    state: State = request.app.state.shared
    card = await _apart(request, _card, state.ready(), state.created)  # it may render a template
    ends = {"first_id": card["id"], "last_id": card["id"], "has_more": False}  # as Anthropic has it
    return JSONResponse({"object": "list", "data": [card], **ends})


async def _model(request: Request) -> Response:
    state: State = request.app.state.shared
    served = state.ready()
    openai.asked_bits(served, Fields({"model": request.path_params["name"]}))
    return JSONResponse(await _apart(request, _card, served, state.created))


def _card(served: Named, created: int) -> Json:
    """A model as OpenAI has it, and Anthropic, and what only this server has."""
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "anybit",
        "type": "model",
        "display_name": served.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "max_model_len": served.context,
        **served.card(),
    }


async def _health(request: Request) -> Response:
    state: State = request.app.state.shared
    if state.served is None:
        return JSONResponse({"status": "loading"}, 503)
    runner = state.served.runner
    status = (
        "broken" if runner.broken else "stuck" if runner.stuck else "stopping" if runner.closing else "ok"
    )
    body = {
        "status": status,
        "step_seconds": round(runner.step_seconds, 3),  # of the step that runs now
        "seconds_since_step": round(runner.seconds_since_step, 3),
        "running": runner.running,
        "waiting": runner.waiting,
        "requests": state.requests,  # this one among them
    }
    if runner.broken:
        body["message"] = runner.broken
    return JSONResponse(body, 200 if status == "ok" else 503)


async def _metrics(request: Request) -> Response:
    state: State = request.app.state.shared
    return PlainTextResponse(
        state.metrics.page(state.ready()), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
