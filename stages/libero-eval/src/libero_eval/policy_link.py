"""A worker's connection to the policy: patient once with a server that is away, strict about replies."""

import time
from typing import Any

import numpy as np

from flywheel_shared.policy_protocol import PolicyClient, PolicyError, PolicyUnavailable

ACTION_DIM = 7
_LONGEST_PAUSE_S = 4.0


class PolicyLink:
    """Asks a policy for chunks of actions and keeps the times that it took; a connection for each episode."""

    def __init__(self, uri: str, request_timeout_s: float, reconnect_s: float) -> None:
        self._client = PolicyClient(uri, request_timeout_s)
        self._reconnect_s = reconnect_s
        self._is_given_up = False
        self.latency_ms: list[float] = []
        self.server_ms: list[float] = []

    def begin_episode(self) -> dict[str, Any]:
        """Connect anew, forget the last episode's times, give the server's metadata.

        A connection that idled, or that met an error, is not trusted with another episode. A server that is
        away is tried again after 0.25, 0.5, 1, 2, 4, 4... s until `reconnect_s` is over. After that each
        episode tries once: an outage costs a run its patience once, not once an episode.

        Raises:
            PolicyUnavailable, PolicyTimeout, PolicyError: as `PolicyClient.connect`.
        """
        self.latency_ms, self.server_ms = [], []
        give_up = time.monotonic() + (0 if self._is_given_up else self._reconnect_s)
        pause_s = 0.25
        while True:
            try:
                metadata = self._client.connect()
                self._is_given_up = False
                return metadata
            except PolicyUnavailable:
                left_s = give_up - time.monotonic()
                self._is_given_up = left_s <= 0
                if self._is_given_up:
                    raise
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def ask(self, observation: dict[str, Any], at_least: int) -> np.ndarray:
        """A chunk of actions, float32 [chunk, 7] with chunk >= `at_least`.

        Raises:
            PolicyUnavailable, PolicyTimeout: as `PolicyClient.infer`.
            PolicyError: where the server says so, or its reply is no such chunk.
        """
        asked = time.perf_counter()
        reply = self._client.infer(observation)
        self.latency_ms.append(1e3 * (time.perf_counter() - asked))
        timing = reply.get("server_timing")
        if isinstance(timing, dict) and isinstance(timing.get("infer_ms"), int | float):
            self.server_ms.append(float(timing["infer_ms"]))
        return _check(reply.get("actions"), at_least)

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()


def _check(actions: Any, at_least: int) -> np.ndarray:
    found = np.asarray(actions)
    if found.dtype.kind not in "fiu" or found.ndim != 2 or found.shape[1] != ACTION_DIM:
        raise PolicyError(
            f"reply: actions are {found.dtype} {list(found.shape)}, expected [chunk, {ACTION_DIM}]"
        )
    if len(found) < at_least:
        raise PolicyError(f"reply: a chunk of {len(found)} actions, where --execute asks for {at_least}")
    if not np.isfinite(found[:at_least]).all():
        raise PolicyError("reply: actions are not finite")
    return found.astype(np.float32)
