"""Chromium without a window, by its own protocol: what a person sees of the page and does with it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-port=0",
)  # fmt: skip


class Browser:
    """One page.

    Args:
        socket: to the browser's page.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._count = socket, 0
        self.complaints: list[str] = []  # errors of scripts, and what the policy kept from loading

    async def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            if message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"])[:500])
            if message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])

    async def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        done = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, script: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        for _ in range(int(seconds / 0.05)):
            if await self.run(f"!!({script})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{script} did not become true; {self.complaints}")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def picture(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser of its own, with nothing kept from before."""
    import aiohttp

    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert process.stderr is not None
            found = next(m for line in process.stderr if (m := re.search(r"ws://([\d.]+:\d+)/", line)))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{found[1]}/json") as listed:
                    pages = [target for target in await listed.json() if target["type"] == "page"]
                address = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            process.kill()
            process.wait()
