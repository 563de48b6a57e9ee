import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import httpx
import msgpack
import numpy as np
import pytest
import websockets.exceptions
from websockets.sync.client import connect

from flywheel_shared.errors import UserError
from flywheel_shared.policy_protocol import (
    PolicyClient,
    PolicyError,
    PolicyTimeout,
    PolicyUnavailable,
    pack,
    unpack,
)
from flywheel_shared.policy_server import serve, serve_in_background

MIB = 2**20


class EchoPolicy:
    """Actions that tell which observation they answer; does as the prompt says."""

    def __init__(self) -> None:
        self.metadata = {"model": "echo", "action_dim": 7, "image_keys": ["observation/image"]}
        self.running = 0
        self.threads: set[int] = set()

    def infer(self, observation: dict) -> dict:
        self.running += 1
        self.threads.add(threading.get_ident())
        assert self.running == 1, "two calls at once"
        try:
            prompt = observation.get("prompt", "")
            if prompt.startswith("sleep"):
                time.sleep(float(prompt.split()[1]))
            if prompt == "fail":
                raise RuntimeError("the motor\nis on fire")
            if prompt == "unsendable":
                return {"actions": object()}
            if prompt == "nan":
                return {"actions": np.full((2, 7), np.nan, np.float32)}
            state = observation.get("observation/state")
            shape = None if state is None else state.shape
            if shape != (8,):
                raise UserError(f"observation/state: expected [8], found {shape}")
            return {
                "actions": np.full((2, 7), state[0], np.float32),
                "image": observation.get("observation/image"),
            }
        finally:
            self.running -= 1


def observe(value: float, **changes) -> dict:
    return {"observation/state": np.full(8, value, np.float32), "prompt": "go", **changes}


@pytest.fixture(scope="module")
def uri():
    with serve_in_background(EchoPolicy(), max_message_bytes=MIB, max_connections=4) as uri:
        yield uri


@pytest.fixture
def client(uri):
    with PolicyClient(uri, timeout_s=10) as client:
        yield client


@pytest.fixture
def http(uri):
    with httpx.Client(base_url=uri.replace("ws", "http"), trust_env=False) as http:
        yield http


def test_metadata_then_actions_for_each_observation(client):
    assert client.connect()["model"] == "echo"
    for value in range(5):
        reply = client.infer(observe(value))
        np.testing.assert_array_equal(reply["actions"], np.full((2, 7), value, np.float32))
        assert 0 < reply["server_timing"]["infer_ms"] < 1000


def test_images_of_real_size_arrive_whole(client):
    image = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    np.testing.assert_array_equal(client.infer(observe(1, **{"observation/image": image}))["image"], image)


def test_no_compression_is_negotiated_even_where_the_client_offers_it(uri):
    with connect(uri, proxy=None) as connection:
        assert connection.protocol.extensions == []


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("fail", "policy failed: RuntimeError: the motor is on fire"), ("unsendable", "reply cannot be sent")],
)
def test_failing_policy_gives_one_line_and_the_connection_lives_on(client, prompt, reason):
    with pytest.raises(PolicyError, match=reason) as caught:
        client.infer(observe(0, prompt=prompt))
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert client.infer(observe(4))["actions"][0, 0] == 4


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("hello", "found text"),
        (pack([1, 2]), "expected a map of observations, found a list"),
        (pack(observe(0))[:-9], "malformed message"),
        (b"\xc1" * 1000, "malformed message"),
        (
            msgpack.packb({b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]}),
            "unsupported dtype",
        ),
        (
            msgpack.packb({"s": {b"__ndarray__": True, b"data": b"ab", b"dtype": "|u1", b"shape": [3]}}),
            "needs 3 bytes",
        ),
        (pack({"observation/state": np.zeros(7, np.float32)}), r"expected \[8\], found \(7,\)"),
        (pack({}), "found None"),
    ],
)
def test_bad_request_gets_a_text_reason_and_the_server_lives_on(uri, client, frame, reason):
    with connect(uri, compression=None, proxy=None) as connection:
        connection.recv()
        connection.send(frame)
        reply = connection.recv(timeout=10)
        assert isinstance(reply, str)
        assert re.search(reason, reply)
        connection.send(pack(observe(3)))
        assert unpack(connection.recv(timeout=10))["actions"][0, 0] == 3
    assert client.infer(observe(2))["actions"][0, 0] == 2


def test_random_bytes_never_end_the_server(uri, client):
    rng = np.random.default_rng(0)
    with connect(uri, compression=None, proxy=None) as connection:
        connection.recv()
        for length in rng.integers(0, 2000, 200):
            connection.send(rng.bytes(length))
            assert isinstance(connection.recv(timeout=10), str)
    assert client.infer(observe(2))["actions"][0, 0] == 2


def test_oversized_message_is_refused_and_the_server_lives_on(client):
    with pytest.raises(PolicyError, match="larger than the server takes"):
        client.infer(observe(0, image=np.zeros(2 * MIB, np.uint8)))
    assert client.infer(observe(5))["actions"][0, 0] == 5  # it connects again by itself


def test_oversized_message_in_fragments_is_refused(uri, client):
    with connect(uri, compression=None, proxy=None) as connection:
        connection.recv()
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):
            connection.send(bytes(MIB // 4) for _ in range(100))
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            connection.recv(timeout=10)
        assert connection.close_code == 1009
    assert client.infer(observe(5))["actions"][0, 0] == 5


def test_connections_beyond_the_limit_are_refused_and_a_left_place_is_free_again(uri):
    clients = [PolicyClient(uri) for _ in range(4)]
    try:
        for one in clients:
            one.connect()
        extra = PolicyClient(uri)
        with pytest.raises(PolicyUnavailable, match="503"):
            extra.connect()
        clients.pop().close()
        extra.connect(wait_s=5)
        extra.close()
    finally:
        for one in clients:
            one.close()


def test_pages_of_other_origins_are_refused(uri):
    with pytest.raises(websockets.exceptions.InvalidStatus, match="403"):
        connect(uri, origin="http://evil.example", proxy=None)


def test_concurrent_clients_get_their_own_replies_and_one_thread_infers():
    policy = EchoPolicy()
    wrong: list[str] = []

    def ask(uri: str, value: int) -> None:
        with PolicyClient(uri) as client:
            for step in range(20):
                reply = client.infer(observe(value + step))
                if reply["actions"][0, 0] != value + step:
                    wrong.append(f"{value + step}: {reply['actions'][0, 0]}")

    with serve_in_background(policy) as uri:
        threads = [threading.Thread(target=ask, args=(uri, 100 * number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not wrong
    assert len(policy.threads) == 1


def test_timeout_drops_the_late_reply(client):
    client.timeout_s = 0.3
    with pytest.raises(PolicyTimeout, match=r"no reply within 0\.3 s"):
        client.infer(observe(1, prompt="sleep 0.8"))
    client.timeout_s = 10
    assert client.infer(observe(2))["actions"][0, 0] == 2


def test_nobody_listening_is_unavailable():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(PolicyUnavailable, match=str(port)):
        PolicyClient(f"ws://127.0.0.1:{port}").connect()
    with pytest.raises(PolicyUnavailable):
        PolicyClient(f"ws://127.0.0.1:{port}").connect(wait_s=0.5)
    assert 0.5 < time.monotonic() - begin < 5


def test_listener_that_never_answers_is_a_timeout():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, pytest.raises(PolicyTimeout):
        PolicyClient(f"ws://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3).connect()


def test_malformed_uri_is_a_user_error():
    with pytest.raises(UserError, match="expected ws://host:port"):
        PolicyClient("http://127.0.0.1:1").connect()


def test_server_that_goes_away_is_unavailable():
    with serve_in_background(EchoPolicy()) as uri:
        client = PolicyClient(uri)
        client.infer(observe(1))
    with pytest.raises(PolicyUnavailable):
        client.infer(observe(1))


def test_http_health_info_and_metrics(http):
    assert (http.get("/healthz").status_code, http.get("/healthz").text) == (200, "OK\n")
    assert http.get("/info").json()["model"] == "echo"
    before = http.get("/metrics").text
    http.post("/predict", content=pack(observe(1)), headers={"content-type": "application/msgpack"})
    http.post("/predict", content=b"\xc1", headers={"content-type": "application/msgpack"})
    http.post("/predict", json={"prompt": "fail"})

    def count(text: str, name: str) -> float:
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)

    after = http.get("/metrics").text
    for outcome in ("ok", "bad_request", "failed"):
        name = f'flywheel_policy_requests_total{{transport="http",outcome="{outcome}"}}'
        assert count(after, name) == count(before, name) + 1
    name = "flywheel_policy_infer_seconds_count"
    assert count(after, name) == count(before, name) + 1
    assert count(after, "flywheel_policy_infer_seconds_sum") > 0


def test_predict_takes_msgpack_and_json(http):
    packed = http.post("/predict", content=pack(observe(3)), headers={"content-type": "application/msgpack"})
    assert unpack(packed.content)["actions"].tolist() == [[3.0] * 7] * 2
    image = [[[0, 128, 255]]]
    reply = http.post("/predict", json={"observation/state": [2] * 8, "observation/image": image}).json()
    assert reply["actions"] == [[2.0] * 7] * 2
    assert reply["image"] == image
    assert reply["server_timing"]["infer_ms"] > 0


@pytest.mark.parametrize(
    ("content", "form", "status", "reason"),
    [
        (b"{", "application/json", 400, "malformed JSON"),
        (b"[" * 100_000, "application/json", 400, "malformed JSON"),
        (b"[1]", "application/json", 400, "found a list"),
        (b'{"observation/state": [1, [2]]}', "application/json", 400, "all rows of one length"),
        (b'{"observation/state": ["a"]}', "application/json", 400, "nested lists of numbers"),
        (b'{"observation/state": [1, 2]}', "application/json", 400, "found (2,)"),
        (b'{"observation/image": [[[256, 0, 0]]]}', "application/json", 400, "from 0 to 255"),
        (b'{"observation/image": [[[0.5, 0, 0]]]}', "application/json", 400, "from 0 to 255"),
        (b'{"prompt": "fail"}', "application/json", 500, "the motor is on fire"),
        (b'{"prompt": "nan"}', "application/json", 500, "cannot be sent"),
        (b"\xc1", "application/msgpack", 400, "malformed message"),
        (b"{}", "text/plain", 415, "content-type"),
        (bytes(MIB + 1), "application/msgpack", 413, "larger than"),
        (b" " * (MIB + 1), "application/json", 413, "larger than"),
    ],
)
def test_predict_says_what_is_wrong(http, content, form, status, reason):
    answer = http.post("/predict", content=content, headers={"content-type": form})
    assert answer.status_code == status
    assert reason in answer.json()["error"]
    assert "Traceback" not in answer.text
    assert http.post("/predict", json={"observation/state": [2] * 8}).status_code == 200


SERVER = """
import sys, time
from pathlib import Path
import numpy as np
from flywheel_shared.policy_server import serve

class Slow:
    metadata = {"model": "slow"}
    def infer(self, observation):
        time.sleep(observation["sleep_s"])
        return {"actions": np.zeros((1, 7), np.float32)}

serve(Slow(), port=0, ready_file=Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy_s", [0, 30])
def test_signal_ends_the_server_cleanly_within_two_seconds(tmp_path, number, busy_s):
    ready = tmp_path / "deep" / "ready"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(ready)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        uri = f"ws://{ready.read_text()}"
        assert line == f"serving slow at {uri}\n"
        with PolicyClient(uri) as client, PolicyClient(uri, timeout_s=0.3) as busy:
            client.infer({"sleep_s": 0})
            if busy_s:
                with pytest.raises(PolicyTimeout):
                    busy.infer({"sleep_s": busy_s})
            begin = time.monotonic()
            os.kill(process.pid, number)
            assert process.wait(10) == 0
            assert time.monotonic() - begin < 2
            with pytest.raises(PolicyUnavailable):
                client.infer({"sleep_s": 0})
        assert process.stdout.read() == "stopped serving\n"
        assert not ready.exists()
    finally:
        process.kill()
        process.wait()


def test_taken_port_is_a_user_error(uri):
    port = int(uri.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
        serve(EchoPolicy(), port=port)
    with pytest.raises(UserError, match="choose another"):
        serve(EchoPolicy(), port=70000)


def test_metadata_that_cannot_be_sent_fails_before_serving():
    policy = EchoPolicy()
    policy.metadata["weights"] = object()
    with pytest.raises(UserError, match="cannot be packed"), serve_in_background(policy):
        pass
