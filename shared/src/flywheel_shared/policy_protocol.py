"""The policy protocol: how messages are packed, and the client. The server is `policy_server`.

The wire format is that of OpenPI's websocket server (https://github.com/Physical-Intelligence/openpi), so
its clients and ours can be swapped. On connection the server sends its metadata; then each request (an
observation) gets one reply (actions). Messages are msgpack maps; an array is a map with the byte-string keys
`__ndarray__`, `data`, `dtype`, `shape`. A text frame in place of a reply is an error: one line saying why.
"""

import math
import re
import socket
import struct
import time
from types import TracebackType
from typing import Any, Protocol, Self

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from flywheel_shared.errors import UserError

MAX_MESSAGE_BYTES = 32 * 2**20

# Booleans, integers, floats, byte and text strings. Objects would need pickle, records and complex numbers
# are no part of the protocol.
_DTYPE = re.compile(r"[<>|=]?[biufSU]\d{1,4}")
_MAX_DIMS = 8
# A message of empty lists or maps would grow a hundredfold when decoded: an observation has a few dozen.
_MAX_CONTAINERS = 10_000


class Policy(Protocol):
    """What a server serves.

    `metadata` holds `model`, `action_horizon`, `action_dim`, `state_dim`, `rate_hz`, `image_keys`,
    `image_resolution` ([height, width]) and `versions`; it must be JSON and msgpack at once.
    """

    metadata: dict[str, Any]

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Turn an observation into `{"actions": float32 [chunk, action_dim]}`.

        Calls come one at a time, all from the same thread. Raise `UserError` where the observation is at
        fault.
        """
        ...


class PolicyError(Exception):
    """The policy server gave no usable reply: it reported an error, or sent what is no reply."""


class PolicyUnavailable(PolicyError):
    """There is no server to talk to, it refused the connection, or the connection broke."""


class PolicyTimeout(PolicyError):
    """The server did not answer in time."""


def pack(message: Any) -> bytes:
    """Encode dicts, lists, strings, numbers and numpy arrays; raises `UserError` for anything else."""
    try:
        return msgpack.packb(message, default=_pack_numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"message cannot be packed: {error}") from None


def unpack(data: bytes) -> Any:
    """Decode what `pack` or OpenPI's packer encoded; arrays are writable and in native byte order.

    Raises `UserError` for truncated or malformed data, dtypes outside bool, int, uint, float and strings, and
    sizes that do not match shapes. Never runs code from the message.
    """
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} lists and maps")
        return container

    try:
        return msgpack.unpackb(
            data, object_hook=lambda mapping: _unpack_numpy(count(mapping)), list_hook=count
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise UserError(f"malformed message: {str(error) or type(error).__name__}") from None


def _pack_numpy(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"a {type(value).__name__} is no number, string, list, dict or numpy array")
    dtype = value.dtype.str
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"unsupported dtype {value.dtype}")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": dtype, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": dtype}


def _unpack_numpy(mapping: dict[Any, Any]) -> Any:
    if b"__ndarray__" in mapping:
        return _unpack_array(mapping.get(b"data"), _dtype_of(mapping), mapping.get(b"shape"))
    if b"__npgeneric__" in mapping:
        dtype = _dtype_of(mapping)
        value = mapping.get(b"data")
        if not isinstance(value, bool | int | float | str | bytes):
            raise ValueError(f"numpy scalar holds a {type(value).__name__}")
        return dtype.type(value)
    return mapping


def _unpack_array(data: Any, dtype: np.dtype, shape: Any) -> np.ndarray:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"array shape is {shape!r:.80}, expected a list of sizes")
    if not isinstance(data, bytes) or len(shape) > _MAX_DIMS:
        raise ValueError(f"array has {len(shape)} dims (at most {_MAX_DIMS}) and {type(data).__name__} data")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise ValueError(
            f"array of shape {shape} and dtype {dtype} needs {expected} bytes, found {len(data)}"
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _dtype_of(mapping: dict[Any, Any]) -> np.dtype:
    name = mapping.get(b"dtype")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"unsupported dtype {name!r:.80}")
    dtype = np.dtype(name)
    if dtype.itemsize == 0:  # any shape would fit into no bytes
        raise ValueError(f"unsupported dtype {name!r}")
    return dtype


class PolicyClient:
    """A connection to one policy server, for one thread.

    After an error of the connection or a timeout the connection is dropped, because a late reply would be
    taken for the next one; the next `infer` connects again.
    """

    def __init__(self, uri: str, timeout_s: float = 30.0, max_message_bytes: int = MAX_MESSAGE_BYTES):
        """`uri` is `ws://host:port`; `timeout_s` bounds connecting, and each request with its reply."""
        self.uri = uri
        self.timeout_s = timeout_s
        self.metadata: dict[str, Any] = {}
        self._max_message_bytes = max_message_bytes
        self._connection: ClientConnection | None = None

    def connect(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Connect and return the server's metadata, trying again for `wait_s` while there is no server.

        Raises `PolicyUnavailable`, `PolicyTimeout`, `PolicyError`, and `UserError` for a malformed URI.
        """
        self.close()
        give_up = time.monotonic() + wait_s
        while True:
            try:
                self._connection = self._open()
                break
            except PolicyUnavailable:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(min(0.25, wait_s))
        try:
            self.metadata = self._receive(time.monotonic() + self.timeout_s)
        except PolicyError:
            self.close()
            raise
        return self.metadata

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Send an observation and return the reply, connecting first if need be.

        Raises `PolicyError` with the server's reason, `PolicyTimeout`, `PolicyUnavailable`, and `UserError`
        for an observation that cannot be packed.
        """
        request = pack(observation)
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        deadline = time.monotonic() + self.timeout_s
        try:
            self._connection.send(request)
        except ConnectionClosed as closed:
            raise self._lost(closed) from None
        return self._receive(deadline)

    def close(self) -> None:
        """Close the connection, if there is one; the client can be used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> ClientConnection:
        try:
            connection = connect(
                self.uri,
                open_timeout=self.timeout_s,
                close_timeout=1,
                max_size=self._max_message_bytes,
                compression=None,  # images do not shrink; deflating them costs milliseconds
                ping_interval=None,  # timeout_s bounds every wait
                proxy=None,  # a policy is a neighbour, never behind the proxy of the environment
            ).__enter__()  # websockets 17 wants a `with`; ours ends in close()
        except InvalidURI:
            raise UserError(f"policy server {self.uri!r}: expected ws://host:port") from None
        except TimeoutError:
            raise PolicyTimeout(f"{self.uri}: no connection within {self.timeout_s:g} s") from None
        except (OSError, EOFError, InvalidHandshake) as error:
            raise PolicyUnavailable(f"{self.uri}: {error}") from None
        # recv takes a timeout, send does not: a server that stops reading must not hold us for ever.
        seconds, fraction = divmod(max(self.timeout_s, 1e-3), 1)
        timeout = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        return connection

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._connection is not None
        try:
            reply = self._connection.recv(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.close()
            raise PolicyTimeout(f"{self.uri}: no reply within {self.timeout_s:g} s") from None
        except ConnectionClosed as closed:
            raise self._lost(closed) from None
        if isinstance(reply, str):
            raise PolicyError(f"{self.uri}: {reply}")
        try:
            message = unpack(reply)
        except UserError as error:
            raise PolicyError(f"{self.uri}: {error}") from None
        if not isinstance(message, dict):
            raise PolicyError(f"{self.uri}: expected a map in reply, found a {type(message).__name__}")
        return message

    def _lost(self, closed: ConnectionClosed) -> PolicyError:
        self.close()
        if closed.rcvd is not None and closed.rcvd.code == 1009:
            return PolicyError(f"{self.uri}: the request is larger than the server takes")
        return PolicyUnavailable(f"{self.uri}: connection lost: {closed}")
