"""A browser without a window, for tests of pages: Chromium, or QtWebEngine if there is no Chromium.
Both are driven by Chromium's DevTools protocol over a websocket. This module implements the part
that the tests need.
"""

import base64
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

PROGRAMS = (
    "chromium-headless-shell",
    "chromium",
    "google-chrome",
    "google-chrome-stable",
    "chromium-browser",
)
SECONDS = 60


class Socket:
    """A websocket, the client's side (RFC 6455)."""

    def __init__(self, url):
        host, port, path = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url).groups()
        self.socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.file = self.socket.makefile("rb")
        assert b" 101 " in self.file.readline()
        while self.file.readline() != b"\r\n":
            pass

    def send(self, text):
        data, mask = text.encode(), secrets.token_bytes(4)
        size = len(data)
        head = struct.pack(
            "!BB", 0x81, 0x80 | (size if size < 126 else 126 if size < 65536 else 127)
        )
        if size >= 126:
            head += struct.pack("!H" if size < 65536 else "!Q", size)
        masked = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
        self.socket.sendall(head + mask + masked)

    def receive(self):
        """Returns the next message's text. It does not answer pings, which is not necessary on one
        machine."""
        message = b""
        while True:
            first, size = self.file.read(2)
            if size >= 126:
                form = "!H" if size == 126 else "!Q"
                size = struct.unpack(form, self.file.read(struct.calcsize(form)))[0]
            data = self.file.read(size)
            if first & 0x0F in (0, 1):
                message += data
                if first & 0x80:
                    return message.decode()
            assert first & 0x0F != 8, "the browser closed the connection"

    def close(self):
        self.file.close()
        self.socket.close()


class Page:
    def __init__(self, url, width=1320, height=1000):
        self.socket = Socket(url)
        self.number = 0
        self.events, self.errors, self.requests = [], [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _note(self, message):
        method, what = message["method"], message["params"]
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"].get("exception", what)))
        if method == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            self.errors.append(str(what["args"]))
        if method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def call(self, method, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == self.number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if "method" in message:
                self._note(message)

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            message = json.loads(self.socket.receive())
            if "method" in message:
                self._note(message)

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression):
        """Waits until the expression is true, because the effects of an event take a frame."""
        late = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < late, expression
            time.sleep(0.02)

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, kind="", scheme="light"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[feature])

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key):
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def box(self, selector):
        """Scrolls to the element and returns left, top, width and height in the window."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'start', behavior: 'instant'}})")
        return self.evaluate(
            f"(r => [r.left, r.top, r.width, r.height])({element}.getBoundingClientRect())"
        )

    def screenshot(self, selector):
        """Returns the pixels of the visible part of an element."""
        x, y, width, height = (round(v) for v in self.box(selector))
        data = self.call("Page.captureScreenshot", format="png")["data"]
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        return pixels[max(y, 0) : y + height, max(x, 0) : x + width]

    def close(self):
        self.socket.close()


class Browser:
    def __init__(self, command, environment=None):
        self.folder = tempfile.mkdtemp(prefix="browser-")
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.folder}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.page = None
        try:
            self.page = Page(self._page_url())
        except BaseException:
            self.close()
            raise

    def _page_url(self):
        """Returns the URL of the first page, after the browser has reported its port."""
        timer = threading.Timer(SECONDS, self._end)
        timer.start()
        said = []
        for line in self.process.stderr:
            said.append(line)
            found = re.search(r"DevTools listening on ws://([^/]+)/", line)
            if found:
                break
        else:
            raise RuntimeError("the browser does not start: " + "".join(said)[-500:])
        timer.cancel()
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        for _ in range(10 * SECONDS):
            with urllib.request.urlopen(f"http://{found[1]}/json/list", timeout=SECONDS) as answer:
                pages = [t for t in json.load(answer) if t["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
            time.sleep(0.1)
        raise RuntimeError("the browser opens no page")

    def _end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self):
        if self.page:
            self.page.close()
        self._end()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)
QT = """
import sys
from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication
application = QApplication(sys.argv[:1])
view = QWebEngineView()
view.resize(1320, 1000)
view.setUrl(QUrl("about:blank"))
view.show()
application.exec()
"""


def find():
    """Returns a running browser, or the reason why there is none. DEEPWELL_BROWSER selects one, or
    "qt"."""
    asked = os.environ.get("DEEPWELL_BROWSER")
    reasons = []
    for name in [asked] if asked else [*PROGRAMS, "qt"]:
        program = shutil.which(name)
        if name != "qt" and not program:
            continue
        try:
            if name != "qt":
                return Browser([program, *FLAGS, "about:blank"])
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment = {
                "QT_QPA_PLATFORM": "offscreen",
                "QTWEBENGINE_DISABLE_SANDBOX": "1",
                "QTWEBENGINE_CHROMIUM_FLAGS": f"--disable-gpu --remote-debugging-port={port}",
            }
            return Browser([sys.executable, "-c", QT], environment)
        except (OSError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
    return "; ".join(reasons) or "neither Chromium nor QtWebEngine is here"
