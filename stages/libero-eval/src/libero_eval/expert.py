"""A scripted expert for pick-and-place of bowls, that sees object poses.

What it does next depends on the present alone (gripper, fingers, bowl, plate), and smoothly so: far from the grasp it
is high, near it low, as in a funnel. A policy that sees pictures can learn that.
"""

import numpy as np

from libero_eval.simulator import CLOSED, OPEN, Simulator

GAIN = 10.0  # action per metre of error; an action of 1 asks for 5 cm
GRASP_Y = 0.037  # beside the bowl's centre, on its rim: 2.0 to 5.5 cm succeed at 10 Hz
GRASP_Z = 0.022  # above the bowl's centre
HOVER = 0.10  # height of the funnel
CARRY = 0.085
ON_TOP = 0.2  # what is so far above the goal stands on furniture
PLACE_Z = 0.035  # above the plate's centre
SLOPE = 5.0  # of the funnel
HELD_FINGERS = 0.012  # opening (m) below which the fingers have closed
ALIGNED, NEAR = 0.010, 0.014


class Expert:
    """Grasps the target's rim on the +y side and sets it on the goal."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.offset = np.array([0.0, GRASP_Y])

    def distance(self) -> float:
        """Horizontal distance (m) from the gripper to the grasp."""
        return float(np.linalg.norm(self._grasp_error()))

    def _grasp_error(self) -> np.ndarray:
        bowl = self.simulator.position(self.simulator.target)
        return bowl[:2] + self.offset - self.simulator.position("robot0_eef")[:2]

    def action(self) -> np.ndarray:
        """The action [7] for the present state."""
        gripper = self.simulator.position("robot0_eef")
        bowl = self.simulator.position(self.simulator.target)
        fingers = self.simulator.state()[6:]
        opening = float(fingers[0] - fingers[1])
        if self._holds(gripper, bowl, opening):
            return self._carry(gripper, bowl)
        return self._approach(gripper, bowl, opening)

    def _holds(self, gripper: np.ndarray, bowl: np.ndarray, opening: float) -> bool:
        slipped = float(np.linalg.norm(gripper[:2] - bowl[:2] - self.offset))
        return opening < HELD_FINGERS and slipped < 0.03 and gripper[2] - bowl[2] < 0.07

    def _approach(self, gripper: np.ndarray, bowl: np.ndarray, opening: float) -> np.ndarray:
        error = self._grasp_error()
        distance = float(np.linalg.norm(error))
        low = bowl[2] + GRASP_Z
        rise = low + min(HOVER, SLOPE * max(0.0, distance - ALIGNED)) - gripper[2]
        command = OPEN
        if distance < NEAR and gripper[2] < low + 0.012:
            command, rise = CLOSED, min(rise, 0.0)
            if opening < 0.07:  # closing: stand still
                error = np.zeros(2)
        return _command(error, rise, command)

    def _carry(self, gripper: np.ndarray, bowl: np.ndarray) -> np.ndarray:
        goal = self.simulator.position(self.simulator.goal)
        error = goal[:2] - bowl[:2]
        distance = float(np.linalg.norm(error))
        low = goal[2] + PLACE_Z
        rise = low + min(CARRY, SLOPE * max(0.0, distance - 0.012)) - gripper[2]
        if gripper[2] < goal[2] + 0.075 and distance > 0.05:  # lift first
            error = 0.2 * error
        if gripper[2] > goal[2] + ON_TOP and distance > 0.05:  # off the cabinet, over the goal, then down
            rise = goal[2] + ON_TOP + 0.11 - gripper[2]
            if rise > 0.04:
                error = 0.2 * error
        release = distance < 0.015 and gripper[2] < low + 0.012
        return _command(error, rise, OPEN if release else CLOSED)


def _command(error: np.ndarray, rise: float, gripper: float) -> np.ndarray:
    move = np.clip(GAIN * np.append(error, rise), -1, 1)
    return np.concatenate([move, np.zeros(3), [gripper]])
