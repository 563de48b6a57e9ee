"""The whole loop on the `short` profile, killed with SIGKILL while it records and while it trains."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from flywheel_infra.profile import load_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[1]
STEP_WITHIN_S = 600
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

# Runs in libero-eval's environment, which has pyarrow: a digest of every action and state in frame order.
DIGEST = """
import hashlib, pathlib, sys
import pyarrow.parquet as parquet
digest, rows = hashlib.sha256(), 0
for path in sorted(pathlib.Path(sys.argv[1]).glob("data/**/*.parquet")):
    table = parquet.read_table(path, columns=["episode_index", "frame_index", "action", "observation.state"])
    rows += len(table)
    for column in table.columns:
        for chunk in column.chunks:
            digest.update(str(chunk.to_pylist()).encode())
print(rows, digest.hexdigest())
"""


def start(root):
    """The same as `make flywheel`, on another profile and folder; in a process group of its own to kill."""
    bootstrap = [sys.executable, str(ROOT / "infra" / "bootstrap.py"), "flywheel", "run"]
    return subprocess.Popen(
        [*bootstrap, "--profile", "short", "--root", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_when(run, happened):
    deadline = time.monotonic() + STEP_WITHIN_S
    while not happened():
        assert run.poll() is None, f"ended before it could be killed: {run.communicate()[0]}"
        assert time.monotonic() < deadline, "what to wait for did not happen"
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def record_of(root, step):
    path = root / "flywheel.json"
    return json.loads(path.read_text())["steps"].get(step, {}) if path.exists() else {}


def dataset_digest(corpus):
    python = ROOT / ".venv" / "libero-eval" / "bin" / "python"
    done = subprocess.run([python, "-c", DIGEST, corpus], capture_output=True, text=True, check=True)
    rows, digest = done.stdout.split()
    assert int(rows) > 0
    return digest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A finished run that was killed twice on its way."""
    root = tmp_path_factory.mktemp("flywheel") / "run"
    kill_when(start(root), lambda: is_recording(root))
    assert not (root / "corpus" / "libero").exists(), "half a corpus was put in place"
    kill_when(start(root), lambda: is_training(root))
    last = start(root)
    output, _ = last.communicate(timeout=3 * STEP_WITHIN_S)
    assert last.returncode == 0, output
    (root / "output.txt").write_text(output)
    return root


def is_recording(root):
    """Whether some of the corpus is written and not all of it."""
    partial = root / "corpus" / ".libero.partial"
    return any(path for kind in ("mp4", "parquet") for path in partial.rglob(f"*.{kind}"))


def is_training(root):
    metrics = root / "checkpoints" / "dreamzero" / "metrics.jsonl"
    saved = list(root.glob("checkpoints/dreamzero/iter_*/commit.json"))
    return metrics.exists() and saved and record_of(root, "train").get("state") == "started"


def test_a_killed_run_finishes_with_the_dataset_of_an_unbroken_one(root, tmp_path):
    step = next(step for step in load_profile("short").steps if step.name == "record")
    argv = step.command(tmp_path, None)
    program = ROOT / ".venv" / step.stage / "bin" / argv[0]
    subprocess.run([program, *argv[1:]], check=True, capture_output=True, timeout=STEP_WITHIN_S)
    assert dataset_digest(root / "corpus" / "libero") == dataset_digest(tmp_path / "corpus" / "libero")
    assert record_of(root, "record")["attempts"] == 2


def test_training_went_on_from_its_checkpoint(root):
    rows = [
        json.loads(line) for line in (root / "checkpoints/dreamzero/metrics.jsonl").read_text().splitlines()
    ]
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    assert record_of(root, "train")["attempts"] == 2
    log = (root / record_of(root, "train")["log"]).read_text()
    assert re.search(r"resum", log, flags=re.IGNORECASE)


def test_no_half_written_output_is_left(root):
    leftovers = [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if re.search(r"\.(tmp|removed|partial)", path.name)
    ]
    assert leftovers == []
    for commit in root.glob("checkpoints/dreamzero/iter_*/commit.json"):
        for name, said in json.loads(commit.read_text())["files"].items():
            content = (commit.parent / name).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (said["bytes"], said["sha256"]), (
                name
            )


def test_nothing_is_left_running(root):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(root) not in listed


def test_a_finished_run_does_nothing_more(root):
    before = (root / "report.html").stat().st_mtime_ns
    again = start(root)
    try:
        output, _ = again.communicate(timeout=60)
    finally:
        again.terminate()  # in vain where it has ended; else it is doing a step again
    assert again.returncode == 0
    assert output.count("already done") == 7
    assert (root / "report.html").stat().st_mtime_ns == before


def test_both_evaluations_carry_their_fields(root):
    for name, blank in (("dreamzero", False), ("dreamzero-blank", True)):
        results = json.loads((root / "eval" / name / "results.json").read_text())
        assert results["blank_cameras"] is blank
        assert len((root / "eval" / name / "episodes.jsonl").read_text().splitlines()) == 2


def test_the_report_opens_on_a_phone_without_a_complaint(root):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        troubles = []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto((root / "report.html").as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.wait_for_function("[...document.querySelectorAll('video')].every(v => v.readyState >= 1)")
        assert page.locator("video").count() >= 2
        assert page.locator(".chart").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert "of 2 initial states" in page.locator("h1").inner_text()
        assert troubles == []
        browser.close()
