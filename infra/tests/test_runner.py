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
    "list.py": """
        import pathlib, sys
        root = pathlib.Path(sys.argv[1])
        with (root / "ran").open("a") as ran:
            ran.write("report\\n")
        made = sorted(p.name for p in root.iterdir() if p.name.split("-")[0] in ("record", "train", "eval", "targets"))
        (root / "report").write_text("\\n".join(name for name in made if "." not in name))
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

    def turn(self, name, source="-", seconds=0, **more):
        """`work` with an output of each turn."""
        made = f"{name}-{{turn}}"
        self.step(name, "work.py", made, source, str(seconds), outputs=[made], **more)

    def command(self, *options):
        lines = ['description = "test"']
        for step in self.steps:
            lines += ["[[steps]]", *[f"{key} = {json.dumps(value)}" for key, value in step.items()]]
        profile = self.folder / "test.toml"
        profile.write_text("\n".join(lines))
        program = [sys.executable, "-m", "flywheel_infra.cli", "run", "--profile", str(profile)]
        return [*program, "--root", str(self.root), *options]

    def start(self, *options):
        return subprocess.Popen(
            self.command(*options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

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


def two_turns(wheel, seconds=0):
    """record once; train from it, later from the turn before too; a server; report last."""
    wheel.work("record", turns="first")
    wheel.turn("train", "record", turns="first", needs=["record"])
    wheel.turn(
        "train", "train-{previous}", turns="later", needs=["record", "targets@previous"], seconds=seconds
    )
    wheel.step("serve", "server.py", kind="serve", ready_file="ready", needs=["train"])
    asks = {"server": "serve", "needs": ["serve"], "outputs": ["eval-{turn}"]}
    wheel.step("eval", "ask.py", "{server}", "eval-{turn}", **asks)
    wheel.turn("targets", "train-{turn}", needs=["eval", "train"])
    wheel.step("report", "list.py", turns="last", needs=["targets"], outputs=["report"])


FIRST_TURN = ["record", "train-1", "server", "eval-1", "targets-1"]
SECOND_TURN = ["train-2", "server", "eval-2", "targets-2"]


def test_turns_follow_each_other_with_outputs_and_servers_of_their_own(wheel):
    two_turns(wheel)
    done = wheel.run("--turns", "2")
    assert done.returncode == 0, done.stderr
    assert wheel.ran == [*FIRST_TURN, *SECOND_TURN, "report"]
    assert (wheel.root / "targets-1" / "file").read_text() == "recordtrain-1targets-1"
    assert (wheel.root / "targets-2" / "file").read_text() == "recordtrain-1train-2targets-2"
    assert "[6/10] train@2: done" in done.stdout
    assert "6-train@2.log" in wheel.record("train@2")["log"]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(wheel.root) not in listed


def test_a_second_turn_goes_on_from_a_finished_first_one(wheel):
    two_turns(wheel)
    assert wheel.run().returncode == 0
    assert wheel.ran == [*FIRST_TURN, "report"]
    assert wheel.run("--turns", "2").returncode == 0
    assert wheel.ran == [*FIRST_TURN, "report", *SECOND_TURN, "report"]
    assert (wheel.root / "report").read_text().split() == [
        "eval-1", "eval-2", "record", "targets-1", "targets-2", "train-1", "train-2"
    ]  # fmt: skip
    assert wheel.run("--turns", "2").returncode == 0
    assert len(wheel.ran) == len([*FIRST_TURN, "report", *SECOND_TURN, "report"]), "nothing is left to do"


def test_a_run_killed_in_its_second_turn_goes_on_there(wheel):
    two_turns(wheel, seconds=3)
    run = wheel.start("--turns", "2")
    wait_for(wheel.root / "train-2.pid")
    run.kill()
    run.communicate(timeout=RUN_WITHIN_S)
    again = wheel.run("--turns", "2")
    assert again.returncode == 0, again.stderr
    assert wheel.ran == [*FIRST_TURN, "train-2", *SECOND_TURN, "report"]
    assert (wheel.record("train")["attempts"], wheel.record("train@2")["attempts"]) == (1, 2)


def test_what_changed_in_a_later_turn_reruns_that_and_what_follows(wheel):
    two_turns(wheel)
    wheel.run("--turns", "2")
    (later,) = [step for step in wheel.steps if step["name"] == "train" and step["turns"] == "later"]
    later["argv"].append("ignored")
    before = len(wheel.ran)
    assert wheel.run("--turns", "2").returncode == 0
    assert wheel.ran[before:] == [*SECOND_TURN, "report"]
    assert wheel.run("--turns", "2", "--from", "targets@2").returncode == 0
    assert wheel.ran[before:] == [*SECOND_TURN, "report", "targets-2", "report"]


def test_mistakes_about_turns_are_one_line_before_anything_runs(wheel):
    two_turns(wheel)
    wheel.steps[-2]["outputs"] = ["targets"]
    for options, said in [
        (["--turns", "2"], "step targets: every turn would make the same targets"),
        (["--from", "train@2"], "--from train@2: no such step; the profile has: record, train, serve"),
        (["--turns", "0"], "--turns"),
    ]:
        done = wheel.run(*options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr
    assert wheel.ran == []


def test_a_failure_in_a_later_turn_names_it(wheel):
    wheel.turn("a")
    wheel.step("broken", "fail.py", turns="later")
    done = wheel.run("--turns", "2")
    assert done.returncode == 1
    assert "step 'broken@2' failed with exit code 3" in done.stderr
    assert "3-broken@2.log" in done.stderr
    assert wheel.ran == ["a-1", "a-2"]
