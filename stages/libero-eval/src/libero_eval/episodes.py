"""One episode, closed loop: observe, ask for a chunk of actions, execute its first ones, observe again."""

import dataclasses
import time
from typing import Any, Protocol

import numpy as np

from flywheel_shared.policy_protocol import PolicyError, PolicyTimeout, PolicyUnavailable
from libero_eval.policy_link import PolicyLink
from libero_eval.results import Episode, Job, Outcome
from libero_eval.settings import RunSection

Views = tuple[np.ndarray, np.ndarray]

# Steps after the first success in which the arm stands still and the gripper keeps its last command: what was
# knocked into place only for an instant is no longer a success at the end.
HOLD_STEPS = 5


class Steppable(Protocol):
    """What an episode needs of `simulator.Simulator`."""

    instruction: str

    def reset(self, init_state: int, spread_m: float = 0.0, seed: int = 0) -> None:
        """Start an episode."""

    def step(self, action: np.ndarray) -> bool:
        """Execute one action [7]; whether the task is done."""
        ...

    def state(self) -> np.ndarray:
        """float32 [8]."""
        ...

    def render(self) -> Views:
        """Agent and wrist view, uint8 [H, W, 3] each."""
        ...


class EpisodeTimeout(Exception):
    """The episode's wall time is over."""


@dataclasses.dataclass
class Rollout:
    """What happened so far; `frames` are the views of each query (or step) and of the end."""

    frames: list[Views] = dataclasses.field(default_factory=list)
    steps: int = 0
    success_once: bool = False
    success_at_end: bool = False


def run_episode(
    simulator: Steppable, link: PolicyLink, job: Job, run: RunSection, session_id: str
) -> tuple[Episode, list[Views]]:
    """Run one episode; what the server does wrong becomes an outcome, errors of the simulator are raised."""
    started = time.monotonic()
    rollout = Rollout()
    outcome: Outcome
    detail = ""
    try:
        link.begin_episode()
        simulator.reset(job.init_state, run.spread_m, job.seed)
        _roll_out(rollout, simulator, link, run, session_id, started + run.episode_timeout_s)
        outcome = "success" if rollout.success_once else "failure"
    except PolicyUnavailable as error:
        outcome, detail = "policy_unavailable", str(error)
    except PolicyTimeout as error:
        outcome, detail = "policy_timeout", str(error)
    except PolicyError as error:
        outcome, detail = "policy_error", str(error)
    except EpisodeTimeout:
        outcome, detail = "episode_timeout", f"not over after {run.episode_timeout_s:g} s"
    finally:
        link.close()
    episode = Episode(
        job,
        outcome,
        detail,
        simulator.instruction,
        rollout.success_once,
        rollout.success_at_end,
        rollout.steps,
        time.monotonic() - started,
        tuple(link.latency_ms),
        tuple(link.server_ms),
    )
    return episode, rollout.frames


def _roll_out(
    rollout: Rollout,
    simulator: Steppable,
    link: PolicyLink,
    run: RunSection,
    session_id: str,
    deadline: float,
) -> None:
    for step in range(run.max_steps):
        if time.monotonic() > deadline:
            raise EpisodeTimeout
        turn = step % run.execute
        if turn == 0 or run.render == "every-step":
            rollout.frames.append(simulator.render())
        if turn == 0:
            request = observation(rollout.frames[-1], simulator, run.blank_cameras, session_id)
            chunk = link.ask(request, at_least=run.execute)
        rollout.steps = step + 1
        if simulator.step(chunk[turn]):
            rollout.success_once = True
            rollout.success_at_end = _hold(rollout, simulator, chunk[turn], run)
            break
    rollout.frames.append(simulator.render())


def observation(views: Views, simulator: Steppable, blank_cameras: bool, session_id: str) -> dict[str, Any]:
    """A request: uint8 [H, W, 3] twice (zeros where blanked), float32 [8], instruction, session."""
    agent, wrist = (np.zeros_like(view) if blank_cameras else view for view in views)
    return {
        "observation/image": agent,
        "observation/wrist_image": wrist,
        "observation/state": np.asarray(simulator.state(), dtype=np.float32),
        "prompt": simulator.instruction,
        "session_id": session_id,
    }


def _hold(rollout: Rollout, simulator: Steppable, last: np.ndarray, run: RunSection) -> bool:
    """Whether the task stays done while standing still (actions are displacements: zeros keep the pose)."""
    still = np.zeros_like(last)
    still[-1] = last[-1]
    done = True
    for _ in range(HOLD_STEPS):
        if run.render == "every-step":
            rollout.frames.append(simulator.render())
        done = simulator.step(still)
    return done
