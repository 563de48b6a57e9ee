"""Set-up in a small copy of the repository: one stage without dependencies, real uv, real environments."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flywheel_infra import environments, system

REPOSITORY = environments.ROOT
SET_UP_WITHIN_S = 120
PROJECT = """
[project]
name = "{name}"
version = "0.1.0"
[project.scripts]
{name} = "{module}:main"
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    for name in (
        "infra/bootstrap.py",
        "infra/requirements-bootstrap.lock",
        "infra/src/flywheel_infra/environments.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    (root / "infra" / "src" / "flywheel_infra" / "__init__.py").touch()
    for folder, name in ((root / "stages" / "thing", "thing"), (root / "shared", "flywheel-shared")):
        module = name.replace("-", "_")
        (folder / "src" / module).mkdir(parents=True)
        (folder / "src" / module / "__init__.py").write_text("def main():\n    print('hello from thing')\n")
        (folder / "pyproject.toml").write_text(PROJECT.format(name=name, module=module))
    for lock in ("requirements.lock", "requirements-test.lock"):
        (root / "stages" / "thing" / lock).write_text("# nothing\n")
    return root


def command(repository, *words, test=False):
    flavour = ["--test"] if test else []
    return [sys.executable, str(repository / "infra" / "bootstrap.py"), *flavour, "--stage", "thing", *words]


def run(repository, *words, test=False, env=None):
    argv = command(repository, *words, test=test)
    return subprocess.run(argv, capture_output=True, text=True, timeout=SET_UP_WITHIN_S, env=env)


def test_the_first_call_makes_what_the_second_finds(repository):
    first, second = run(repository, "thing"), run(repository, "thing")
    assert first.returncode == 0, first.stderr
    assert (first.stdout, second.stdout) == ("hello from thing\n", "hello from thing\n")
    assert "making" in first.stderr
    assert second.stderr == ""


def test_a_ready_environment_costs_next_to_nothing():
    began = time.perf_counter()
    assert environments.is_ready("infra")
    assert time.perf_counter() - began < 0.1  # a few small files are read and hashed; 1 ms here


def test_a_changed_lock_updates_and_a_test_environment_serves_plain_calls(repository):
    run(repository, test=True)
    assert run(repository).stderr == ""
    (repository / "stages" / "thing" / "requirements-test.lock").write_text("# changed\n")
    assert "updating" in run(repository, test=True).stderr
    assert run(repository).stderr == ""


def test_two_callers_at_once_make_one_environment(repository):
    both = [
        subprocess.Popen(
            command(repository, "thing"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=SET_UP_WITHIN_S) for process in both]
    assert [output[0] for output in outputs] == ["hello from thing\n"] * 2, outputs
    assert sum("making" in output[1] for output in outputs) == 1


@pytest.mark.parametrize("after_s", [0.15, 0.5, 1.0])
def test_a_killed_set_up_is_made_good(repository, after_s):
    killed = subprocess.Popen(command(repository), start_new_session=True, stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    again = run(repository, "thing")
    assert again.stdout == "hello from thing\n", again.stderr


def test_an_interpreter_that_does_not_run_is_passed_over(repository, tmp_path):
    """pyenv's shims are on the PATH and fail where no version was chosen."""
    shims = tmp_path / "shims"
    shims.mkdir()
    for name in ("python3.12", "python3", "python"):
        (shims / name).write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
        (shims / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}"}
    done = run(repository, "thing", env=env)
    assert done.stdout == "hello from thing\n", done.stderr


def test_uv_is_installed_where_the_machine_has_none(repository, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    env = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin"}
    if shutil.which("uv", path=env["PATH"]):
        pytest.skip("the system's own folder holds a uv")
    done = run(repository, "thing", env=env)
    assert done.stdout == "hello from thing\n", done.stderr
    assert (repository / ".venv" / "uv" / "bin" / "uv").exists()


def test_mistakes_are_one_line(repository):
    unknown = subprocess.run(
        [sys.executable, str(repository / "infra" / "bootstrap.py"), "--stage", "other"],
        capture_output=True,
        text=True,
    )
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "thing" in unknown.stderr
    (repository / "stages" / "thing" / "requirements.lock").write_text("six==1.16.0\n")
    unhashed = run(repository)
    assert unhashed.returncode == 1
    assert "set-up: `uv pip install" in unhashed.stderr.splitlines()[-1]
    assert not (repository / ".venv" / "thing" / environments.STAMP).exists()


def test_missing_system_packages_are_named_where_they_cannot_be_installed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(environments.SetupError, match=r"sudo apt-get install .* no-such-one no-such-two$"):
        system.ensure(["no-such-one", "no-such-two", "no-such-one"])


def test_system_packages_are_installed_by_root(monkeypatch, tmp_path):
    """Against an apt-get that records what it was asked and then makes the program appear."""
    asked = tmp_path / "asked"
    apt = tmp_path / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\ncase "$*" in *install*) '
        f"printf '#!/bin/sh\\n' > {tmp_path}/chromium; chmod +x {tmp_path}/chromium;; esac\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: shutil_which(name, tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system.ensure(["chromium"])
    assert asked.read_text().splitlines()[0].endswith("update")
    assert "install -y --no-install-recommends chromium" in asked.read_text().splitlines()[1]


def shutil_which(name, folder):
    path = Path(folder) / name
    return str(path) if path.exists() else None


def test_every_stage_names_packages_that_we_know_how_to_look_for():
    known = {*system.LIBRARIES, *system.PROGRAMS}
    for stage in environments.stages():
        assert set(system.of_stage(stage)) <= known
