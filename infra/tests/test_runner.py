"""The runner on small real commands: python scripts in infra's own environment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

RUN_WITHIN_S = 60
DIES_WITHIN_S = 20

SCRIPTS = {
    # Appends its name to a list of what really ran, then makes its output from its input.
    "work.py": """
        import pathlib, sys, time
        root, name, source, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
        with (root / "ran").open("a") as ran:
            ran.write(name + "\\n")
        (root / f"{name}.pid").write_text(str(__import__("os").getpid()))
        print("working", flush=True)
        time.sleep(seconds)
        text = (root / source / "file").read_text() if source != "-" else ""
        beside = root / f"{name}.tmp"
        beside.mkdir(exist_ok=True)
        (beside / "file").write_text(text + name)
        beside.rename(root / name)
        """,
    "fail.py": """
        import sys
        print("the cause of it all")
        sys.exit(3)
        """,
    # Counts up in its output folder and saves as it goes: a step that resumes.
    "count.py": """
        import pathlib, sys, time
        folder = pathlib.Path(sys.argv[1]) / "count"
        folder.mkdir(exist_ok=True)
        began = len(list(folder.iterdir()))
        (pathlib.Path(sys.argv[1]) / "began").write_text(str(began))
        for number in range(began, 30):
            (folder / str(number)).touch()
            time.sleep(0.1)
        """,
    "server.py": """
        import http.server, pathlib, sys
        root = pathlib.Path(sys.argv[1])
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"OK")
            def log_message(self, *_): pass
        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        (root / "ran").open("a").write("server\\n")
        (root / "ready").write_text(f"127.0.0.1:{server.server_port}")
        server.serve_forever()
        """,
    "ask.py": """
        import pathlib, sys, urllib.request
        root, address, name = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
        answer = urllib.request.urlopen(address.replace("ws:", "http:")).read().decode()
        (root / "ran").open("a").write(name + "\\n")
        (root / name).write_text(answer)
        """,
}


class Flywheel:
    """A profile of scripts in a folder, run by the real command."""

    def __init__(self, tmp_path):
        self.folder, self.root = tmp_path, tmp_path / "run"
        self.root.mkdir()
        self.steps = []
        for name, text in SCRIPTS.items():
            (tmp_path / name).write_text(textwrap.dedent(text))

    def step(self, name, script, *arguments, **more):
        argv = ["python", str(self.folder / script), "{root}", *arguments]
        self.steps.append({"name": name, "stage": "infra", "argv": argv, **more})

    def work(self, name, source="-", seconds=0, **more):
        needs = [source] if source != "-" else []
        self.step(name, "work.py", name, source, str(seconds), outputs=[name], needs=needs, **more)

    def command(self, *options):
        lines = ['description = "test"']
        for step in self.steps:
            lines += ["[[steps]]", *[f"{key} = {json.dumps(value)}" for key, value in step.items()]]
        profile = self.folder / "test.toml"
        profile.write_text("\n".join(lines))
        program = [sys.executable, "-m", "flywheel_infra.cli", "run", "--profile", str(profile)]
        return [*program, "--root", str(self.root), *options]

    def start(self):
        return subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *options):
        return subprocess.run(self.command(*options), capture_output=True, text=True, timeout=RUN_WITHIN_S)

    @property
    def ran(self):
        path = self.root / "ran"
        return path.read_text().split() if path.exists() else []

    def record(self, name):
        return json.loads((self.root / "flywheel.json").read_text())["steps"][name]


@pytest.fixture
def wheel(tmp_path):
    return Flywheel(tmp_path)


def wait_for(path):
    deadline = time.monotonic() + RUN_WITHIN_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_steps_run_in_order_and_only_once(wheel):
    wheel.work("a")
    wheel.work("b", "a")
    first = wheel.run()
    assert first.returncode == 0, first.stderr
    assert (wheel.root / "b" / "file").read_text() == "ab"
    second = wheel.run()
    assert second.returncode == 0
    assert wheel.ran == ["a", "b"]
    assert "already done" in second.stdout
    record = wheel.record("b")
    assert (record["state"], record["size_bytes"], record["attempts"]) == ("done", 2, 1)
    assert "working" in (wheel.root / record["log"]).read_text()


def test_a_changed_step_reruns_it_and_what_needs_it(wheel):
    wheel.work("a")
    wheel.work("b", "a")
    wheel.work("other")
    wheel.run()
    wheel.steps[0]["argv"].append("ignored")
    wheel.run()
    assert wheel.ran == ["a", "b", "other", "a", "b"]
    assert (wheel.root / "b" / "file").read_text() == "ab"


def test_a_missing_output_reruns_its_step(wheel):
    wheel.work("a")
    wheel.run()
    (wheel.root / "a" / "file").unlink()
    (wheel.root / "a").rmdir()
    wheel.run()
    assert wheel.ran == ["a", "a"]


def test_from_and_fresh_rerun_what_they_say(wheel):
    wheel.work("a")
    wheel.work("b", "a")
    wheel.run()
    wheel.run("--from", "b")
    assert wheel.ran == ["a", "b", "b"]
    wheel.run("--fresh")
    assert wheel.ran == ["a", "b", "b", "a", "b"]
    mistaken = wheel.run("--from", "c")
    assert (mistaken.returncode, mistaken.stderr.count("\n")) == (2, 1)
    assert "a, b" in mistaken.stderr


def test_a_failure_names_the_step_its_log_and_its_last_lines(wheel):
    wheel.work("a")
    wheel.step("broken", "fail.py")
    wheel.work("c")
    done = wheel.run()
    assert done.returncode == 1
    assert "the cause of it all" in done.stderr
    assert "step 'broken' failed with exit code 3" in done.stderr
    assert "2-broken.log" in done.stderr
    assert "Traceback" not in done.stderr
    assert wheel.ran == ["a"]


def test_a_step_that_makes_nothing_has_failed(wheel):
    wheel.step("idle", "work.py", "idle", "-", "0", outputs=["promised"])
    done = wheel.run()
    assert done.returncode == 1
    assert "did not make" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_run_and_the_next_one_finishes(wheel, how):
    wheel.work("a")
    wheel.work("slow", "a", seconds=3)
    run = wheel.start()
    wait_for(wheel.root / "slow.pid")
    child = int((wheel.root / "slow.pid").read_text())
    run.send_signal(how)
    run.communicate(timeout=RUN_WITHIN_S)
    assert run.returncode == (-9 if how == signal.SIGKILL else 130)
    again = wheel.run()  # at once: it waits for what the killed run left
    assert again.returncode == 0, again.stderr
    assert not is_alive(child)
    assert wheel.ran == ["a", "slow", "slow"]
    assert (wheel.root / "slow" / "file").read_text() == "aslow"
    assert wheel.record("slow")["attempts"] == 2


def test_a_resuming_step_keeps_what_it_made_and_its_recipe_decides(wheel):
    wheel.step("count", "count.py", outputs=["count"], resumes=True)
    run = wheel.start()
    wait_for(wheel.root / "began")
    time.sleep(1)
    run.kill()
    run.communicate(timeout=RUN_WITHIN_S)
    assert wheel.run().returncode == 0
    assert int((wheel.root / "began").read_text()) > 0
    wheel.steps[0]["argv"].append("changed")
    assert wheel.run().returncode == 0
    assert (wheel.root / "began").read_text() == "0"


def test_two_runs_on_one_folder_are_refused(wheel):
    wheel.work("slow", seconds=3)
    first = wheel.start()
    wait_for(wheel.root / "slow.pid")
    second = wheel.run()
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert f"process {first.pid}" in second.stderr
    first.communicate(timeout=RUN_WITHIN_S)
    assert first.returncode == 0


def test_one_server_serves_the_steps_that_use_it_and_is_stopped(wheel):
    wheel.step("serve", "server.py", kind="serve", ready_file="ready")
    for name in ("one", "two"):
        wheel.step(name, "ask.py", "{server}", name, server="serve", needs=["serve"], outputs=[name])
    wheel.work("last")
    done = wheel.run()
    assert done.returncode == 0, done.stderr
    assert wheel.ran == ["server", "one", "two", "last"]
    assert (wheel.root / "two").read_text() == "OK"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(wheel.root) not in listed
    assert wheel.run().returncode == 0
    assert wheel.ran == ["server", "one", "two", "last"], "a finished run starts no server"


def test_a_server_that_dies_fails_the_run(wheel):
    wheel.step("serve", "fail.py", kind="serve", ready_file="ready")
    wheel.step("one", "ask.py", "{server}", "one", server="serve", outputs=["one"])
    done = wheel.run()
    assert done.returncode == 1
    assert "step 'serve' ended before it was ready" in done.stderr


def test_a_broken_ledger_is_one_line(wheel):
    wheel.work("a")
    (wheel.root / "flywheel.json").write_text('{"format": 2}')
    done = wheel.run()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "flywheel.json" in done.stderr


def test_workers_in_sessions_of_their_own_die_with_the_run(tmp_path, wheel):
    (tmp_path / "nest.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "worker = subprocess.Popen(sleep, start_new_session=True)\n"
        "(pathlib.Path(sys.argv[1]) / 'worker').write_text(str(worker.pid))\n"
        "time.sleep(600)\n"
    )
    wheel.step("nest", "nest.py")
    run = wheel.start()
    wait_for(wheel.root / "worker")
    worker = int((wheel.root / "worker").read_text())
    assert is_alive(worker)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=RUN_WITHIN_S)
    deadline = time.monotonic() + DIES_WITHIN_S
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(worker)
