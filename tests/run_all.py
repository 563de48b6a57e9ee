"""Run nox's default sessions and end with one line that sums all of their tests, in pytest's own wording.

python tests/run_all.py [options of nox]
"""

import json
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".nox" / "results"


def main() -> int:
    """Exit code of nox: 0 only if every session passed."""
    began = time.monotonic()
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    report = RESULTS / "sessions.json"
    command = [sys.executable, "-m", "nox", "--report", str(report), *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("\n" + closing_line(report, time.monotonic() - began))
    return code


def closing_line(report: Path, elapsed_s: float) -> str:
    """Sum of the sessions' JUnit files; a session that failed without a failing test is an error."""
    counts = dict.fromkeys(["failed", "passed", "skipped", "error"], 0)
    for path in sorted(RESULTS.glob("*.xml")):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            of = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "skipped", "errors")}
            counts["failed"] += of["failures"]
            counts["skipped"] += of["skipped"]
            counts["error"] += of["errors"]
            counts["passed"] += of["tests"] - of["failures"] - of["skipped"] - of["errors"]
    sessions = json.loads(report.read_text())["sessions"] if report.is_file() else []
    bad = [name_of(session) for session in sessions if session["result"] in ("failed", "aborted")]
    if bad:
        print("failed sessions: " + ", ".join(bad))
    if not sessions or (bad and counts["failed"] + counts["error"] == 0):
        counts["error"] += max(1, len(bad))
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no tests ran"
    minutes = f" (0:{int(elapsed_s) // 60:02d}:{int(elapsed_s) % 60:02d})" if elapsed_s >= 60 else ""
    return f" {said} in {elapsed_s:.2f}s{minutes} ".center(80, "=")


def name_of(session: dict) -> str:
    """`tests(shared)` rather than `tests`, where nox says so."""
    return next(iter(session.get("signatures") or []), session["name"])


if __name__ == "__main__":
    sys.exit(main())
