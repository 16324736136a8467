"""A server's life: it listens at once, loads the model, serves, and ends when what it has begun is done."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress

import uvicorn
from starlette.applications import Starlette

from anybit.engine.pages import free_memory, pages_of_window
from anybit.errors import InputError
from anybit.serve.http.app import State, app
from anybit.serve.http.connection import Connection
from anybit.serve.http.guard import Guard
from anybit.serve.run.model import Embeds, Model
from anybit.serve.run.runner import MOST_PROMPT, Heard, Limits, tell
from anybit.serve.served import Served, ServedEncoder
from anybit.serve.settings import Settings

KV_SHARE = 0.25  # of the memory that is free, for keys and values, where nobody says how much
GAIN = 1.25  # in tokens, for which blocks with a sliding window get pages of their own
LATE = 5  # seconds after which connections are cut that have still not ended
BACKLOG = 1024  # connections that wait to be accepted


def limits(engine: Model, settings: Settings) -> Limits:
    """What texts share.

    Raises:
        InputError: no memory for a single page.
    """
    wanted = int(free_memory() * KV_SHARE) if settings.kv_bytes is None else settings.kv_bytes
    running = settings.running if engine.together else 1
    pages, window_pages = _pages(engine, wanted, running)
    if pages < 1:
        raise InputError(
            f"keys and values may take {wanted} bytes, and a page of {engine.page_tokens} tokens takes "
            f"{engine.page_bytes}: give them more (--kv-memory), or texts fewer tokens (--context)"
        )
    return Limits(pages, running, settings.waiting, settings.auto_bits, window_pages, len(settings.keys) > 1)


def _pages(engine: Model, wanted: int, running: int) -> tuple[int, int]:
    """Pages of the KV-cache within so many bytes, and those of blocks with a sliding window.

    These have their own where clearly more text fits then: twice what texts that run need, so that the ends of others
    stay for prompts that go on from there; more where memory is left.
    """
    useful = running * -(-engine.context // engine.page_tokens)
    plain = min(wanted // engine.page_bytes, useful)
    if not engine.window or plain == useful:
        return plain, 0
    own = 2 * running * pages_of_window(engine.window, MOST_PROMPT, engine.page_tokens)
    left, rest = wanted - own * engine.window_page_bytes, engine.page_bytes - engine.window_page_bytes
    pages = min(left // rest, useful) if rest else useful
    if left < 0 or pages < GAIN * plain:
        return plain, 0
    return pages, min(own + (left - pages * rest) // engine.window_page_bytes, useful)


def served_of(
    model: Model | Embeds, settings: Settings, deliver: Callable[[Heard], None] | None = None
) -> Served | ServedEncoder:
    """A model as it is served.

    Raises:
        InputError: see `limits`.
    """
    if isinstance(model, Embeds):
        return ServedEncoder(model, settings)
    return Served(model, settings.name, limits(model, settings), deliver)


def run(load: Callable[[], Model | Embeds], settings: Settings, say: Callable[[str], None]) -> bool:
    """Serve until a signal comes. Returns whether a model still loads, which goes on in a thread.

    Args:
        load: makes the model, in a thread.
        settings: how it is served.
        say: prints a line.

    Raises:
        InputError: a model that cannot be served; an address that cannot be listened at.
    """
    failed: list[BaseException] = []
    loading: list[asyncio.Task[None]] = []

    def begin() -> None:
        task = asyncio.create_task(_load(state, load, settings))
        task.add_done_callback(lambda task: _loaded(task, server, failed, say))
        loading.append(task)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for task in loading:
            task.cancel()
        if state.served is not None:
            await asyncio.to_thread(state.served.runner.close, 0)
        state.parsers.shutdown(wait=False, cancel_futures=True)

    guard = Guard(settings.keys, settings.hosts, settings.origins)
    state = State(guard, settings.most_bytes, settings.most_requests)
    config = uvicorn.Config(
        app(state, lifespan),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        http=Connection,
        server_header=False,
        timeout_graceful_shutdown=round(settings.patience) + LATE,
    )
    server = Server(config, state, settings.patience, begin)
    # uvicorn takes these signals, and raises them again when it ends, for whoever was there before.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    except SystemExit:
        if not failed:
            place = f"{settings.host}:{settings.port}"
            raise InputError(f"nothing can listen at {place}: choose another --host or --port") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        raise failed[0]
    return state.loader is not None and state.loader.is_alive()


class Server(uvicorn.Server):
    """Tells requests that come late that it stops.

    Args:
        config: uvicorn's.
        state: what all requests see.
        patience: seconds that texts have to end.
        begin: loads the model, when the server listens: where it cannot, nothing has begun.
    """

    def __init__(
        self, config: uvicorn.Config, state: State, patience: float, begin: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.shared, self.patience, self._begin = state, patience, begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)  # which ends the process where nothing can listen
        self._begin()

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self.config.host, self.config.port
        if not port and self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.shared.served is not None:
            self.shared.served.runner.drain(self.patience)
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


async def _load(state: State, load: Callable[[], Model | Embeds], settings: Settings) -> None:
    """In a thread that does not hold up the end of the process."""
    deliver, made = deliver_to(asyncio.get_running_loop()), Future[Served | ServedEncoder]()

    def work() -> None:
        made.set_running_or_notify_cancel()
        try:
            made.set_result(served_of(load(), settings, deliver))
        except BaseException as error:
            made.set_exception(error)

    state.loader = threading.Thread(target=work, name="load", daemon=True)
    state.loader.start()
    served = await asyncio.wrap_future(made)
    served.runner.start()
    state.served, state.created = served, int(time.time())


def deliver_to(loop: asyncio.AbstractEventLoop) -> Callable[[Heard], None]:
    """What lets jobs hear of their progress in an event loop, one call for a whole round."""

    def deliver(heard: Heard) -> None:
        if heard:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever listened
                loop.call_soon_threadsafe(tell, heard)

    return deliver


def _loaded(
    task: asyncio.Task[None], server: Server, failed: list[BaseException], say: Callable[[str], None]
) -> None:
    """Say that the model is there, or end without it."""
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        failed.append(error)
        server.should_exit = True
    elif (served := server.shared.served) is not None:
        say(f"serving {served.name} at {server.address}, {served.greeting()}")
