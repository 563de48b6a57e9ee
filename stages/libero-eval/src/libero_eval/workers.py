"""Episodes in worker processes, each with a simulator and a connection to the policy of its own.

A process and not a thread: a simulator holds an OpenGL context, and one that crashes or hangs must cost one
episode, not the evaluation.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from flywheel_shared.errors import UserError, one_line
from libero_eval.episodes import Views, run_episode
from libero_eval.policy_link import PolicyLink
from libero_eval.results import Episode, Job
from libero_eval.settings import RunSection, SimulatorSection
from libero_eval.videos import thumbnails, write_video

# What may come on top of an episode's own limits: building a simulator, encoding a video, a machine at work.
_GRACE_S = 180.0
_SPAWN = multiprocessing.get_context("spawn")  # OpenGL and OpenMP do not survive a fork


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What every worker of an evaluation is told."""

    simulator: SimulatorSection
    run: RunSection
    uri: str
    folder: Path
    session: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What a worker says of one episode."""

    episode: Episode
    pictures: list[np.ndarray]
    versions: dict[str, Any]


class _Worker:
    """A process, the job it is at, and until when it may be."""

    def __init__(self, assignment: Assignment) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=_work, args=(theirs, assignment), daemon=True)
        self.process.start()
        theirs.close()  # so that the death of the process is the end of the pipe
        self.job: Job | None = None
        self.started = 0.0

    def give(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self.connection.send(job)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_jobs(jobs: Sequence[Job], assignment: Assignment) -> Iterator[Report]:
    """Reports in the order in which episodes end, one for each job whatever happens to its worker.

    Raises:
        UserError: where a worker found the request itself at fault: an initial state that is not there.
    """
    pending = deque(jobs)
    run = assignment.run
    limit_s = run.episode_timeout_s + run.request_timeout_s + run.reconnect_s + _GRACE_S
    workers: list[_Worker] = []
    try:
        while pending or workers:
            while pending and len(workers) < run.workers:
                workers.append(_Worker(assignment))
                workers[-1].give(pending.popleft())
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                report = None
                if worker.connection in ready:
                    report = _receive(worker)
                elif time.monotonic() - worker.started > limit_s:
                    report = _lost(
                        worker, "episode_timeout", f"the worker did not answer within {limit_s:g} s"
                    )
                if report is None:
                    continue
                if worker.process.is_alive() and pending:
                    worker.give(pending.popleft())
                else:
                    worker.stop()
                    workers.remove(worker)
                yield report
    finally:
        for worker in workers:
            worker.stop()


def _receive(worker: _Worker) -> Report:
    try:
        message = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(10)
        return _lost(worker, "simulator_error", f"the worker ended with code {worker.process.exitcode}")
    if isinstance(message, UserError):
        raise message
    return message


def _lost(worker: _Worker, outcome: Any, detail: str) -> Report:
    assert worker.job is not None
    worker.process.kill()
    worker.process.join()
    wall_s = time.monotonic() - worker.started
    return Report(Episode(worker.job, outcome, detail, wall_s=wall_s), [], {})


def _work(connection: Connection, assignment: Assignment) -> None:
    """Run the jobs that come through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("LP_NUM_THREADS", "1")  # rendering by software: a thread a worker
    from libero_eval.simulator import Simulator

    run, asked = assignment.run, assignment.simulator
    link = PolicyLink(assignment.uri, run.request_timeout_s, run.reconnect_s)
    simulator: Simulator | None = None
    task_id = -1
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            if simulator is None or task_id != job.task_id:
                simulator = None  # its context is freed before there is another
                simulator = Simulator.of(asked, job.task_id)
                task_id = job.task_id
            session = f"{assignment.session}-{job.index}"
            episode, frames = run_episode(simulator, link, job, run, session)
            if frames and run.videos:
                episode = dataclasses.replace(episode, video=_film(frames, job, assignment))
            pictures = thumbnails(frames) if frames else []
            connection.send(Report(episode, pictures, simulator.versions()))
        except UserError as error:
            connection.send(error)
        except Exception as error:
            simulator = None
            detail = one_line(f"{type(error).__name__}: {error}")
            connection.send(Report(Episode(job, "simulator_error", detail), [], {}))


def _end_with_parent() -> None:
    """A killed parent stops nobody: end by ourselves, or files would appear in a later run's folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _film(frames: list[Views], job: Job, assignment: Assignment) -> str:
    """Write the episode's video at the rate at which its frames were seen; gives its path in the output."""
    every = 1 if assignment.run.render == "every-step" else assignment.run.execute
    name = f"videos/{job.index:04d}_task{job.task_id}_state{job.init_state}.mp4"
    write_video(assignment.folder / name, frames, Fraction(assignment.simulator.rate_hz, every))
    return name
