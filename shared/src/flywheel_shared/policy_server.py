"""Serves a policy on one port: OpenPI's websocket at `/`, and plain HTTP beside it.

    GET  /healthz   "OK"
    GET  /info      the metadata as JSON
    POST /predict   an observation as msgpack or as JSON with nested lists; the reply has the same form
    GET  /metrics   counts and latency in Prometheus' text form

Requests come in on an asyncio loop; inference runs on one thread of its own, one request at a time.
"""

import asyncio
import json
import logging
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from flywheel_shared.errors import UserError, one_line
from flywheel_shared.policy_protocol import MAX_MESSAGE_BYTES, Policy, pack, unpack

_log = logging.getLogger(__name__)
_MSGPACK = "application/msgpack"
# How long a client that was refused may go on sending before it is cut off.
_LINGER_S = 2.0
# Text takes far more memory once parsed than it has bytes; two 256 x 256 images need 1.5 MB.
_MAX_JSON_BYTES = 4 * 2**20


def serve(
    policy: Policy,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int = 16,
    ready_file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a request under way then has a second to finish.

    Port 0 takes a free port. When requests are accepted, the address is printed, and written to `ready_file`
    as `host:port`; the file is removed at the end. Raises `UserError` where the address cannot be bound.
    """
    app = PolicyApp(policy, max_message_bytes, max_connections)
    listener = _listen(host, port)
    address = _address(listener)

    def announce() -> None:
        if ready_file is not None:
            beside = ready_file.with_name(f".{ready_file.name}.tmp")
            beside.write_text(address)
            beside.replace(ready_file)
        print(f"serving {policy.metadata.get('model', 'a policy')} at ws://{address}", flush=True)

    if ready_file is not None:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        ready_file.unlink(missing_ok=True)  # left by a server that was killed
    server = _Server(_configure(app), announce)
    # uvicorn raises the signal that ended it once more after its clean end: here that means nothing more.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
    print("stopped serving", flush=True)


@contextmanager
def serve_in_background(
    policy: Policy, *, max_message_bytes: int = MAX_MESSAGE_BYTES, max_connections: int = 16
) -> Iterator[str]:
    """Serve on a free loopback port from a thread while the block runs; gives `ws://host:port`."""
    app = PolicyApp(policy, max_message_bytes, max_connections)
    listener = _listen("127.0.0.1", 0)
    address = _address(listener)
    ready = threading.Event()
    server = _Server(_configure(app), ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        if not ready.wait(30):
            raise RuntimeError("the policy server did not start within 30 s")
        yield f"ws://{address}"
    finally:
        server.should_exit = True
        thread.join(10)


class PolicyApp:
    """The routes, and what they share: the policy's thread, the counts, the limits."""

    def __init__(self, policy: Policy, max_message_bytes: int, max_connections: int):
        self.max_message_bytes = max_message_bytes
        self.max_connections = max_connections
        self.connections = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.infer_s = 0.0
        self.inferences = 0
        self._image_keys = frozenset(policy.metadata.get("image_keys", ()))
        self._packed_metadata = pack(policy.metadata)
        self._json_metadata = json.dumps(policy.metadata)
        self._infer = _OwnThread(policy.infer)
        self.asgi = Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/info", self.info),
                Route("/predict", self.predict, methods=["POST"]),
                Route("/metrics", self.metrics),
                WebSocketRoute("/", self.websocket),
            ]
        )

    async def healthz(self, request: Request) -> Response:
        """Say that the process answers."""
        return PlainTextResponse("OK\n")

    async def info(self, request: Request) -> Response:
        """Give the metadata."""
        return Response(self._json_metadata, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Give the counts in Prometheus' text form."""
        lines = ["# TYPE flywheel_policy_requests_total counter"]
        for (transport, outcome), count in sorted(self.requests.items()):
            labels = f'transport="{transport}",outcome="{outcome}"'
            lines.append(f"flywheel_policy_requests_total{{{labels}}} {count}")
        lines += [
            "# TYPE flywheel_policy_infer_seconds summary",
            f"flywheel_policy_infer_seconds_sum {self.infer_s:.6f}",
            f"flywheel_policy_infer_seconds_count {self.inferences}",
            "# TYPE flywheel_policy_connections gauge",
            f"flywheel_policy_connections {self.connections}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def websocket(self, websocket: WebSocket) -> None:
        """Answer one client until it leaves."""
        refusal = self._refusal(websocket)
        if refusal is not None:
            await websocket.send_denial_response(refusal)
            return
        self.connections += 1
        try:
            await websocket.accept()
            await websocket.send_bytes(self._packed_metadata)
            while True:
                message = await websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                outcome, reply = await self._answer(message.get("bytes"), unpack, pack)
                self.requests["websocket", outcome] += 1
                if isinstance(reply, str):
                    await websocket.send_text(reply)
                else:
                    await websocket.send_bytes(reply)
        except WebSocketDisconnect:
            return
        finally:
            self.connections -= 1

    async def predict(self, request: Request) -> Response:
        """Answer one request over HTTP: 200, 400 (wrong input), 413, 415 or 500 (the policy failed)."""
        form = request.headers.get("content-type", "").partition(";")[0].strip()
        if form not in (_MSGPACK, "application/json"):
            self.requests["http", "bad_request"] += 1
            return JSONResponse({"error": f"content-type is {form!r}: {_MSGPACK} or application/json"}, 415)
        packed = form == _MSGPACK
        limit = self.max_message_bytes if packed else min(self.max_message_bytes, _MAX_JSON_BYTES)
        body = await _read_body(request, limit)
        if body is None:
            self.requests["http", "bad_request"] += 1
            return JSONResponse({"error": f"the body is larger than {limit} bytes"}, 413)
        codec = (unpack, pack) if packed else (self._read_json, _write_json)
        outcome, reply = await self._answer(body, *codec)
        self.requests["http", outcome] += 1
        if isinstance(reply, str):
            return JSONResponse({"error": reply}, 400 if outcome == "bad_request" else 500)
        return Response(reply, media_type=form)

    def _refusal(self, websocket: WebSocket) -> Response | None:
        if self.connections >= self.max_connections:
            return PlainTextResponse(f"{self.max_connections} clients are connected already\n", 503)
        origin = websocket.headers.get("origin")
        # Robots send no origin. A web page of another site does, and browsers let it reach localhost.
        if origin is not None and urlsplit(origin).netloc != websocket.headers.get("host"):
            return PlainTextResponse("pages of other origins may not connect\n", 403)
        return None

    async def _answer(
        self, request: bytes | None, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]
    ) -> tuple[str, bytes | str]:
        """Give the outcome ("ok", "bad_request", "failed") and the packed reply, or one line on why not."""
        try:
            if request is None:
                raise UserError("expected a binary msgpack message, found text")
            observation = decode(request)
            if not isinstance(observation, dict):
                raise UserError(f"expected a map of observations, found a {type(observation).__name__}")
            begin = time.perf_counter()
            reply = await self._infer(observation)
        except UserError as error:
            return "bad_request", one_line(str(error))
        except Exception as error:
            _log.exception("the policy failed")
            return "failed", one_line(f"policy failed: {type(error).__name__}: {error}")
        infer_s = time.perf_counter() - begin
        self.infer_s += infer_s
        self.inferences += 1
        try:
            return "ok", encode({**reply, "server_timing": {"infer_ms": infer_s * 1e3}})
        except (UserError, TypeError, ValueError) as error:
            _log.error("the policy's reply cannot be sent: %s", error)
            return "failed", one_line(f"policy failed: its reply cannot be sent: {error}")

    def _read_json(self, body: bytes) -> Any:
        """Lists become arrays: uint8 for the image keys of the metadata, float32 for all others."""
        try:
            observation = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UserError(f"malformed JSON: {error}") from None
        if not isinstance(observation, dict):
            return observation
        return {
            key: _array(key, value, key in self._image_keys) if isinstance(value, list) else value
            for key, value in observation.items()
        }


class _OwnThread:
    """Runs a function on one thread of its own, a call at a time.

    The thread is a daemon: a call that hangs must not keep the process from ending, as an executor's would.
    """

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self._calls: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="policy", daemon=True).start()

    async def __call__(self, argument: Any) -> Any:
        future: Future[Any] = Future()
        self._calls.put((argument, future))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            argument, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._function(argument))
            except BaseException as error:
                future.set_exception(error)


class _LingeringWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's websocket, whose refusal of an oversized message reaches the client.

    Closing a socket that holds unread bytes resets it, and a reset overtakes the close frame that gives the
    reason. So the rest of the message is read and dropped for a while. `websockets-sansio` stops reading from
    a client while its last message waits, which the older implementation does not.
    """

    refused = False

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        self.refused = True
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(_LINGER_S, self.transport.close)
        self.transport.resume_reading()
        assert self.conn.close_sent is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": self.conn.close_sent.code})


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it accepts requests."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _configure(app: PolicyApp) -> uvicorn.Config:
    return uvicorn.Config(
        app.asgi,
        ws=_LingeringWebSocket,
        ws_max_size=app.max_message_bytes,
        ws_per_message_deflate=False,
        limit_concurrency=app.max_connections + 32,  # probes and scrapes still get through
        timeout_graceful_shutdown=1,
        lifespan="off",
        access_log=False,
        log_config=None,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _read_body(request: Request, limit: int) -> bytes | None:
    """Give the body, or None as soon as it is longer than `limit`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            return None
    return bytes(body)


def _array(key: str, value: list[Any], is_image: bool) -> np.ndarray:
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{key}: expected nested lists of numbers, all rows of one length") from None
    if not is_image:
        return numbers.astype(np.float32)
    if not np.isin(numbers, np.arange(256)).all():
        raise UserError(f"{key}: expected whole numbers from 0 to 255")
    return numbers.astype(np.uint8)


def _write_json(reply: dict[str, Any]) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return value.tolist()
        raise TypeError(f"a {type(value).__name__} is no JSON")

    # NaN is no JSON, and an action that is NaN is no action.
    return json.dumps(reply, default=plain, allow_nan=False).encode()
