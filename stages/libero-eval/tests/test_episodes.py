"""One episode against real servers on loopback; an arm that moves along x stands in for the simulator."""

import re
import threading
import time

import numpy as np
import pytest

from flywheel_shared.policy_server import serve_in_background
from libero_eval.episodes import HOLD_STEPS, run_episode
from libero_eval.policy_link import PolicyLink
from libero_eval.results import Job
from libero_eval.settings import RunSection

JOB = Job(0, 0, 36, 0, 5)


class Arm:
    """Done while x is at least 1; every step adds the action's x."""

    instruction = "go right"

    def __init__(self):
        self.x, self.steps, self.renders, self.actions = 0.0, 0, 0, []

    def reset(self, init_state, spread_m=0.0, seed=0):
        self.x, self.steps, self.renders, self.actions = 0.0, 0, 0, []
        self.begun = (init_state, spread_m, seed)

    def step(self, action):
        self.x += float(action[0])
        self.steps += 1
        self.actions.append(np.array(action))
        return self.x >= 1 - 1e-6

    def state(self):
        return np.arange(8, dtype=np.float64) + self.x

    def render(self):
        self.renders += 1
        return np.full((16, 16, 3), 90, np.uint8), np.full((16, 16, 3), 180, np.uint8)


class Served:
    """A policy that answers with `reply`, or with what it returns for an observation."""

    def __init__(self, reply, delay_s=0.0):
        self.reply, self.delay_s, self.seen, self.metadata = reply, delay_s, [], {"model": "test"}

    def infer(self, observation):
        self.seen.append(observation)
        time.sleep(self.delay_s)
        reply = self.reply(observation) if callable(self.reply) else self.reply
        if isinstance(reply, Exception):
            raise reply
        return {"actions": reply}


def chunk(x=0.125, length=8, gripper=1.0):
    actions = np.zeros((length, 7), np.float32)
    actions[:, 0], actions[:, 6] = x, gripper
    return actions


def run_one(policy, **settings):
    arm = Arm()
    run = RunSection(**{"max_steps": 20, "reconnect_s": 0.0, "request_timeout_s": 5.0} | settings)
    with serve_in_background(policy) as uri:
        link = PolicyLink(uri, run.request_timeout_s, run.reconnect_s)
        episode, frames = run_episode(arm, link, JOB, run, "session")
    return episode, frames, arm


def test_the_first_actions_of_each_chunk_are_executed():
    policy = Served(lambda seen: chunk(x=0.0625) * np.arange(8)[:, None])
    episode, _, arm = run_one(policy, execute=3, max_steps=7)
    assert [action[0] for action in arm.actions] == [0.0, 0.0625, 0.125, 0.0, 0.0625, 0.125, 0.0]
    assert (len(policy.seen), len(episode.latency_ms), len(episode.server_ms)) == (3, 3, 3)
    assert (episode.outcome, episode.steps) == ("failure", 7)


def test_the_policy_gets_what_the_protocol_says():
    policy = Served(chunk())
    _, _, arm = run_one(policy, execute=4, spread_m=0.01)
    first, second = policy.seen
    assert set(first) == {
        "observation/image",
        "observation/wrist_image",
        "observation/state",
        "prompt",
        "session_id",
    }
    assert first["observation/image"].dtype == np.uint8
    assert (first["observation/image"] == 90).all()
    assert (first["observation/wrist_image"] == 180).all()
    assert first["observation/state"].dtype == np.float32
    assert first["observation/state"].tolist() == list(range(8))
    assert second["observation/state"][0] == 0.5
    assert (first["prompt"], first["session_id"]) == ("go right", "session")
    assert arm.begun == (36, 0.01, 5)


def test_blank_cameras_send_zeros_and_keep_the_frames():
    policy = Served(chunk())
    _, frames, _ = run_one(policy, blank_cameras=True)
    for seen in policy.seen:
        assert seen["observation/image"].shape == (16, 16, 3)
        assert not seen["observation/image"].any()
        assert not seen["observation/wrist_image"].any()
    assert (frames[0][0] == 90).all()


def test_after_success_the_arm_stands_still_with_the_gripper_as_it_was():
    episode, _, arm = run_one(Served(chunk()), execute=4)
    assert (episode.outcome, episode.success_once, episode.success_at_end) == ("success", True, True)
    assert (episode.steps, arm.steps) == (8, 8 + HOLD_STEPS)
    for action in arm.actions[8:]:
        assert action.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_a_success_that_does_not_last_is_one_once_but_not_at_the_end():
    class Bouncing(Arm):
        def step(self, action):
            done = super().step(action)
            self.x -= 0.1 if self.steps > 8 else 0
            return done and self.steps <= 8

    arm, run = Bouncing(), RunSection(max_steps=20)
    with serve_in_background(Served(chunk())) as uri:
        link = PolicyLink(uri, 5, 0)
        episode, _ = run_episode(arm, link, JOB, run, "session")
    assert (episode.outcome, episode.success_once, episode.success_at_end) == ("success", True, False)


@pytest.mark.parametrize(("render", "expected"), [("query", 2 + 1), ("every-step", 8 + HOLD_STEPS + 1)])
def test_images_are_rendered_when_asked_for_and_at_the_end(render, expected):
    _, frames, arm = run_one(Served(chunk()), execute=4, render=render)
    assert (arm.renders, len(frames)) == (expected, expected)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ValueError("the weights are gone"), "the weights are gone"),
        (chunk(length=3), "chunk of 3 actions"),
        (np.zeros((8, 6), np.float32), "expected \\[chunk, 7\\]"),
        (np.zeros(7, np.float32), "expected \\[chunk, 7\\]"),
        (np.full((8, 7), np.nan, np.float32), "not finite"),
        ("none", "expected \\[chunk, 7\\]"),
    ],
)
def test_a_reply_that_is_no_chunk_is_a_policy_error_and_moves_nothing(reply, reason):
    episode, _, arm = run_one(Served(reply), execute=4)
    assert episode.outcome == "policy_error"
    assert arm.steps == 0
    assert re.search(reason, episode.detail)


def test_a_slow_server_costs_the_episode_and_not_the_next_one():
    policy = Served(chunk(), delay_s=1.0)
    arm, run = Arm(), RunSection(max_steps=20, request_timeout_s=0.3)
    with serve_in_background(policy) as uri:
        link = PolicyLink(uri, run.request_timeout_s, 0)
        slow, _ = run_episode(arm, link, JOB, run, "slow")
        policy.delay_s = 0.0
        time.sleep(1.0)  # the server finishes what nobody waits for any more
        fast, _ = run_episode(arm, link, JOB, run, "fast")
    assert (slow.outcome, slow.success_once) == ("policy_timeout", False)
    assert "0.3 s" in slow.detail
    assert fast.outcome == "success"


def test_a_server_that_dies_within_an_episode_makes_it_unavailable():
    arm, run = Arm(), RunSection(max_steps=200, reconnect_s=0.0)
    second_query = threading.Event()

    def reply(_):
        if len(policy.seen) == 2:
            second_query.set()
            time.sleep(30)
        return chunk(x=0.0)

    policy = Served(reply)
    results = []
    with serve_in_background(policy) as uri:
        link = PolicyLink(uri, 20, run.reconnect_s)
        thread = threading.Thread(target=lambda: results.append(run_episode(arm, link, JOB, run, "s")[0]))
        thread.start()
        assert second_query.wait(20)
    thread.join(20)
    assert results[0].outcome == "policy_unavailable"
    assert results[0].steps == run.execute
    after, _ = run_episode(arm, link, JOB, run, "s")
    assert (after.outcome, after.steps) == ("policy_unavailable", 0)


def test_a_server_that_is_away_is_waited_for_once():
    with serve_in_background(Served(chunk())) as uri:
        pass
    link = PolicyLink(uri, 5, reconnect_s=1.0)
    arm, run = Arm(), RunSection(reconnect_s=1.0)
    first, _ = run_episode(arm, link, JOB, run, "s")
    second, _ = run_episode(arm, link, JOB, run, "s")
    assert (first.outcome, second.outcome) == ("policy_unavailable", "policy_unavailable")
    assert 1.0 <= first.wall_s < 3.0
    assert second.wall_s < 0.5


def test_an_episode_ends_with_its_wall_time():
    episode, _, _ = run_one(Served(chunk(x=0.0), delay_s=0.2), max_steps=10_000, episode_timeout_s=0.5)
    assert episode.outcome == "episode_timeout"
    assert 0.5 <= episode.wall_s < 3.0
