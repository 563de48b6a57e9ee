"""The simulator: episodes depend on what was asked, and on nothing that happened before them."""

import numpy as np
import pytest

from flywheel_shared.errors import UserError
from libero_eval.simulator import CAMERAS, CLOSED, Simulator

pytestmark = pytest.mark.simulator
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (6, 7))


@pytest.fixture(scope="module")
def simulator():
    return Simulator("libero_spatial", 0, size=64)


def rollout(simulator, init_state=3, seed=5, spread_m=0.0):
    """MuJoCo's whole state and the policy's, a row before each of some random actions; the views before the first."""
    simulator.reset(init_state, spread_m, seed)
    views = simulator.render()
    rows = []
    for action in ACTIONS:
        rows.append(np.concatenate([simulator._env.sim.get_state().flatten(), simulator.state()]))
        simulator.step(action)
    return np.stack(rows), np.stack(views)


@pytest.fixture(scope="module")
def first(simulator):
    """What the first episode of a process looks like."""
    return rollout(simulator)


def test_an_episode_is_the_same_to_the_bit_whatever_came_before_it(simulator, first):
    simulator.reset(7, 0.05, 1)
    for _ in range(8):
        simulator.step(np.array([0, 0, -1, 0, 0, 0, CLOSED]))
    states, views = rollout(simulator)
    assert np.array_equal(states, first[0])
    assert np.array_equal(views, first[1])


def test_a_soft_reset_equals_rebuilding_the_scene_to_the_bit(simulator, first):
    simulator._env.hard_reset = True  # as LIBERO resets
    simulator._prepared = False  # the rendering context dies with the scene
    try:
        states, views = rollout(simulator)
    finally:
        simulator._env.hard_reset = False
    assert np.array_equal(states, first[0])
    assert np.array_equal(views, first[1])


def test_views_are_turned_as_openpi_turns_them(simulator, first):
    simulator.reset(3, 0.0, 5)
    for view, camera in zip(simulator.render(), CAMERAS, strict=True):
        raw = simulator._env.sim.render(width=64, height=64, camera_name=camera)
        assert np.array_equal(view, raw[::-1, ::-1])
        assert view.dtype == np.uint8
        assert view.flags.c_contiguous
        assert view.std() > 10  # a scene, not one colour


def test_the_state_is_the_grippers_pose_and_fingers(simulator):
    simulator.reset(0)
    state = simulator.state()
    assert state.dtype == np.float32
    assert state.shape == (8,)
    data = simulator._env.sim.data
    site = simulator._env.robots[0].eef_site_id
    np.testing.assert_allclose(state[:3], data.site_xpos[site], atol=1e-6)
    assert 3.0 < np.linalg.norm(state[3:6]) < 3.3  # looking down: half a turn
    assert state[6] > 0.03 > -0.03 > state[7]  # open


def test_a_displacement_stays_within_its_bounds_and_follows_the_seed(simulator):
    def bowl(seed, spread_m):
        simulator.reset(2, spread_m, seed)
        return simulator.position(simulator.target)

    at_rest = bowl(0, 0.0)
    moved = [bowl(seed, 0.03) for seed in (1, 2, 1)]
    for position in moved:
        # The ramekin and the plate are near: from inside one of them the bowl would be flung 40 cm.
        assert np.abs(position[:2] - at_rest[:2]).max() < 0.031
        assert abs(position[2] - at_rest[2]) < 0.002  # on the table, as before
        assert np.abs(position[:2] - at_rest[:2]).max() > 0.002
    assert np.array_equal(moved[0], moved[2])
    assert not np.allclose(moved[0], moved[1], atol=1e-3)


def test_what_the_task_does_not_have_is_refused(simulator):
    with pytest.raises(UserError, match="initial states 0 to 49, found 50"):
        simulator.reset(50)
    with pytest.raises(UserError, match="tasks 0 to 9, found 10"):
        Simulator("libero_spatial", 10)
