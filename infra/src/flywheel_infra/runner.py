"""Run a profile's steps in order, turn after turn; go on where the last run of the same folder stopped.

A step is done if flywheel.json says so for the digest that it has now (profile.py) and its outputs are there.
Everything else is run again, on outputs removed first - save a step that resumes, killed with this digest.
"""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from flywheel_infra import environments, ledger, system
from flywheel_infra.commands import Command, Server, StepFailed
from flywheel_infra.ledger import Ledger, StepRecord
from flywheel_infra.profile import Profile, Step, digests
from flywheel_infra.progress import Progress
from flywheel_shared.errors import UserError

HEARTBEAT_S = 5.0


def run(
    profile_name: str,
    profile: Profile,
    turns: int,
    root: Path,
    start: str | None,
    fresh: bool,
    progress: Progress,
) -> None:
    """Bring the folder `root` to the end of `turns` turns of the profile.

    `start` reruns from that step on, `fresh` all of them. Raises UserError where the folder is in use, a name
    is unknown or turns would overwrite each other, SetupError where an environment cannot be made, StepFailed
    where a command fails.
    """
    steps = profile.unrolled(turns)
    names = [step.name for step in steps]
    if start is not None and start not in names:
        raise UserError(f"--from {start}: no such step; the profile has: {', '.join(names)}")
    with ledger.hold(root) as lock:
        book = Ledger.load(root) if not fresh else None
        book = book or Ledger(profile=profile_name, commit="", machine={})
        book.profile, book.commit, book.machine = profile_name, ledger.commit(), ledger.machine()
        book.turns = turns
        for name in names if fresh else names[names.index(start) :] if start else []:
            book.steps.pop(name, None)
        _set_up(steps, root, book, progress)
        _Run(steps, root, book, lock, progress).run()


def _set_up(steps: list[Step], root: Path, book: Ledger, progress: Progress) -> None:
    """Environments and system packages of every stage first: what is missing shows before the long work."""
    began = time.monotonic()
    for stage in dict.fromkeys(step.stage for step in steps):
        progress.say(f"set-up: {stage}")
        environments.ensure(stage)
        system.ensure(system.of_stage(stage))
    book.setup_s += time.monotonic() - began
    book.save(root)


class _Run:
    def __init__(
        self, steps: list[Step], root: Path, book: Ledger, lock: IO[str], progress: Progress
    ) -> None:
        self.steps, self.root, self.book, self.lock, self.progress = steps, root, book, lock, progress
        self.digests = digests(steps)
        self.servers: dict[str, tuple[Server, str]] = {}  # name of the serve step -> it and its address

    def run(self) -> None:
        """Each step that is not done, in order; a server lives from its first user to its last."""
        with ExitStack() as stack:
            for number, step in enumerate(self.steps, start=1):
                if step.kind == "serve":
                    continue  # started by the first step that uses it
                self.progress.begin(number, len(self.steps), step.name)
                if self._is_done(step):
                    self.progress.end(f"already done in {self._record(step).wall_s:.0f} s")
                    continue
                address = self._server_of(step, stack) if step.server else None
                self._run_step(number, step, address)
                self._stop_servers_after(number)

    def _record(self, step: Step) -> StepRecord:
        return self.book.steps[step.name]

    def _outputs(self, step: Step) -> list[Path]:
        return [self.root / output for output in step.outputs]

    def _is_done(self, step: Step) -> bool:
        record = self.book.steps.get(step.name)
        if record is None or record.state != "done" or record.digest != self.digests[step.name]:
            return False
        return all(output.exists() for output in self._outputs(step))

    def _run_step(self, number: int, step: Step, address: str | None) -> None:
        record = self._begin(number, step)
        command = Command(step, self.root, self.root / record.log, self.lock, address)
        with _Timer(self, record, command) as timer:
            command.wait(timer.tick)
        if step.server:
            self.servers[step.server][0].check()
        self._finish(step, record)

    def _begin(self, number: int, step: Step) -> StepRecord:
        """Make room for the step's outputs and note that it has started, in that order."""
        former, digest = self.book.steps.get(step.name), self.digests[step.name]
        interrupted = former is not None and former.state == "started" and former.digest == digest
        if not (interrupted and step.resumes):
            for output in self._outputs(step):
                _remove(output)
        if former is not None and interrupted:
            record = former
            record.attempts += 1
        else:
            record = StepRecord(
                digest=digest,
                state="started",
                stage=step.stage,
                argv=step.argv,
                outputs=list(step.outputs),
                recipe=step.read_recipe(),
                log=f"logs/{number}-{step.name}.log",
                started_at=ledger.now(),
            )
            (self.root / record.log).unlink(missing_ok=True)
        order = {step.name: place for place, step in enumerate(self.steps)}
        records = {**self.book.steps, step.name: record}
        self.book.steps = dict(sorted(records.items(), key=lambda item: order.get(item[0], len(order))))
        self.book.save(self.root)
        return record

    def _finish(self, step: Step, record: StepRecord) -> None:
        absent = [str(output) for output in self._outputs(step) if not output.exists()]
        if absent:
            raise StepFailed(step, f"ended well but did not make {', '.join(absent)}", self.root / record.log)
        record.state, record.finished_at = "done", ledger.now()
        record.size_bytes = sum(_size(output) for output in self._outputs(step))
        self.book.save(self.root)
        self.progress.end(f"done in {record.wall_s:.0f} s, {record.size_bytes / 2**20:.1f} MiB")

    def _server_of(self, step: Step, stack: ExitStack) -> str:
        """Address of the server that the step uses, started where it is not running yet."""
        name = str(step.server)
        if name not in self.servers:
            number, serve = next((n, s) for n, s in enumerate(self.steps, start=1) if s.name == name)
            _remove(self.root / str(serve.ready_file))
            record = self._begin(number, serve)
            server = Server(serve, self.root, self.root / record.log, self.lock)
            stack.callback(server.stop)
            with _Timer(self, record, server) as timer:
                self.servers[name] = (server, server.address(self.root, timer.tick))
            record.state, record.finished_at = "done", ledger.now()  # the start is what is timed
            self.book.save(self.root)
        return self.servers[name][1]

    def _stop_servers_after(self, number: int) -> None:
        waiting = {step.server for step in self.steps[number:] if not self._is_done(step)}
        for name in [name for name in self.servers if name not in waiting]:
            self.servers.pop(name)[0].stop()


class _Timer:
    """Adds the time of an attempt to its record, at every heartbeat so that a kill loses little of it."""

    def __init__(self, run: _Run, record: StepRecord, command: Command) -> None:
        self.run, self.record, self.command = run, record, command

    def __enter__(self) -> "_Timer":
        self.before, self.began, self.saved = self.record.wall_s, time.monotonic(), 0.0
        return self

    def tick(self, last_line: str) -> None:
        elapsed = time.monotonic() - self.began
        self.run.progress.update(last_line)
        if elapsed - self.saved >= HEARTBEAT_S:
            self.saved, self.record.wall_s = elapsed, self.before + elapsed
            self.run.book.save(self.run.root)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not isinstance(self.command, Server):
            self.command.stop()
        self.record.wall_s = self.before + time.monotonic() - self.began
        if kind is not None:
            self.run.book.save(self.run.root)


def _remove(path: Path) -> None:
    """Remove a file or folder: renamed first, so that a kill leaves nothing that looks like an output."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed)
    else:
        doomed.unlink()


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
