"""`record`: demonstrations of the scripted expert, as a LeRobot v3 dataset."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libero_eval.settings import RecordSection, SimulatorSection, parse_indices

if TYPE_CHECKING:
    from libero_eval.simulator import Simulator


@dataclasses.dataclass(frozen=True)
class Job:
    """One attempt: its place in the recording, task, initial state and seed."""

    index: int
    task: int
    init_state: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One attempt's rows: the views before each action, the state, the expert's action.

    Attributes:
        job: what was asked.
        instruction: the task in words.
        success: whether the simulator called it done.
        agent, wrist: uint8 [T, H, W, 3].
        state: float32 [T, 8].
        action: float32 [T, 7], the expert's choice; what was executed differs by the noise.
    """

    job: Job
    instruction: str
    success: bool
    agent: np.ndarray
    wrist: np.ndarray
    state: np.ndarray
    action: np.ndarray


def plan(record: RecordSection) -> list[Job]:
    """The attempts, task by task; initial states are gone through again, with other seeds, up to ``episodes``."""
    jobs: list[Job] = []
    for task in parse_indices(record.tasks):
        states = itertools.cycle(parse_indices(record.init_states))
        for attempt in range(record.episodes):
            # The seed tells attempts apart: the same state again is another displacement and other noise.
            jobs.append(Job(len(jobs), task, next(states), record.seed * 1_000_003 + attempt))
    return jobs


def demonstrations(
    jobs: list[Job], simulator: SimulatorSection, record: RecordSection
) -> Iterator[Demonstration]:
    """All attempts in the order of ``jobs``, simulated by worker processes."""
    context = multiprocessing.get_context("spawn")  # OpenGL does not survive a fork
    workers = min(record.workers, len(jobs))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(os.getpid(),)
    ) as pool:
        yield from pool.map(_attempt, jobs, itertools.repeat(simulator), itertools.repeat(record))


def _begin(parent: int) -> None:
    """Workers leave Ctrl-C to the parent and die with it."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.environ.setdefault("LP_NUM_THREADS", "1")  # software rendering: a thread a worker


_simulators: dict[int, object] = {}  # of this worker: the task at hand


def _attempt(job: Job, settings: SimulatorSection, record: RecordSection) -> Demonstration:
    from libero_eval.simulator import Simulator

    simulator = _simulators.get(job.task)
    if not isinstance(simulator, Simulator):
        _simulators.clear()  # one scene's textures at a time
        simulator = Simulator.of(settings, job.task)
        _simulators[job.task] = simulator
    simulator.reset(job.init_state, record.spread_m, job.seed)
    return demonstrate(simulator, job, record)


def demonstrate(simulator: "Simulator", job: Job, record: RecordSection) -> Demonstration:
    """One attempt from where the simulator stands.

    With noise the arm starts elsewhere, drifts off its way, and is pushed aside twice before the grasp, while the
    recorded action is always the expert's own for where it finds itself (DART, Laskey et al. 2017): the data hold
    the way back.
    """
    from libero_eval.expert import Expert

    rng = np.random.default_rng([job.seed, job.init_state, 1])
    expert = Expert(simulator)
    disturbance = Disturbance(record.noise, simulator.rate_hz, rng)
    for push in disturbance.start():
        simulator.step(push)
    agent, wrist, states, actions = [], [], [], []
    success = False
    for step in range(record.max_steps):
        view, close = simulator.render()
        chosen = expert.action()
        agent.append(view)
        wrist.append(close)
        states.append(simulator.state())
        actions.append(chosen.astype(np.float32))
        success = simulator.step(disturbance.apply(chosen, step, expert.distance(), states[-1]))
        if success:
            break
    arrays = (np.stack(rows) for rows in (agent, wrist, states, actions))
    return Demonstration(job, simulator.instruction, success, *arrays)


class Disturbance:
    """What comes between the expert's action and the arm. ``noise`` 0 changes nothing."""

    def __init__(self, noise: float, rate_hz: int, rng: np.random.Generator) -> None:
        self.noise, self.rng = noise, rng
        self.drift: np.ndarray = np.zeros(3)
        self.unit = rate_hz / 10  # steps in a tenth of a second
        first, last = round(8 * self.unit), round(22 * self.unit)
        self.pushes = set(rng.choice(np.arange(first, last), 2, replace=False).tolist()) if noise else set()
        self.push: np.ndarray = np.zeros(3)
        self.push_steps = 0

    def start(self) -> Iterator[np.ndarray]:
        """Actions that bring the arm to another start: up to half a second in one direction."""
        if self.noise:
            way = self.rng.uniform(-1, 1, 3) * [0.9, 0.9, 0.6]
            for _ in range(int(self.rng.integers(0, 5) * self.unit)):
                yield np.concatenate([way, np.zeros(3), [-1.0]])

    def apply(self, action: np.ndarray, step: int, distance: float, state: np.ndarray) -> np.ndarray:
        """The action to execute: drift fades near the grasp, so that the grasp itself is clean."""
        if not self.noise:
            return action
        self.drift = 0.7 * self.drift + 0.7 * self.noise * self.rng.normal(size=3)
        changed = action.copy()
        changed[:3] += self.drift * np.clip((distance - 0.01) / 0.04, 0.15, 1.0)
        if step in self.pushes:
            self.push_steps, self.push = round(2 * self.unit), self.rng.uniform(-1, 1, 3) * [0.6, 0.6, 0.18]
        if self.push_steps > 0 and state[6] > 0.035:  # only while the fingers are open
            changed[:3] = self.push
            self.push_steps -= 1
        return np.clip(changed, -1, 1)


def record_corpus(
    simulator: SimulatorSection, record: RecordSection, output: Path, overwrite: bool
) -> tuple[int, int]:
    """Record a corpus; how many attempts were kept, and how many failed.

    Raises:
        UserError: if the output exists and ``overwrite`` is False, or no attempt succeeded.
    """
    from libero_eval.dataset import write_dataset

    jobs = plan(record)
    return write_dataset(
        demonstrations(jobs, simulator, record), len(jobs), simulator, record, output, overwrite
    )
