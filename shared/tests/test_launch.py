"""Ranks find their place, and a launched run ends as one command would."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flywheel_shared.errors import UserError
from flywheel_shared.launch import Ranks, discover
from flywheel_shared.launcher import must_launch

TESTS = Path(__file__).parent
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
CLEAN = {name: value for name, value in os.environ.items() if name not in OURS}


def start(mode: str, folder: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launched", mode, str(folder), *options],
        env={**CLEAN, "PYTHONPATH": str(TESTS), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(mode: str, folder: Path, *options: str, **env: str) -> tuple[int, str, str]:
    process = start(mode, folder, *options, **env)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(*paths: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Ranks()),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "1234",
            },
            Ranks(3, 4, 1, "10.0.0.1", 1234),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "master-0"}, Ranks(1, 2, 0, "master-0", 29500)),
        (
            {"JOB_COMPLETION_INDEX": "1", "NUM_NODES": "2", "MASTER_ADDR": "job-0.svc"},
            Ranks(1, 2, 0, "job-0.svc", 29500),
        ),
        ({"JOB_COMPLETION_INDEX": "0", "NUM_NODES": "1"}, Ranks()),
    ],
    ids=["alone", "torchrun", "pytorchjob", "jobset", "jobset-of-one"],
)
def test_ranks_are_read_from_every_launcher(env, expected):
    assert discover(env) == expected


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is None"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"NUM_NODES": "2", "MASTER_ADDR": "a"}, "JOB_COMPLETION_INDEX is None"),
    ],
)
def test_a_broken_environment_is_named(env, said):
    with pytest.raises(UserError, match=said):
        discover(env)


def test_ranks_are_not_started_twice():
    assert must_launch(2, {})
    assert not must_launch(1, {})
    assert not must_launch(2, {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.distributed
def test_every_rank_gets_its_place_its_share_of_cores_and_the_loopback(tmp_path):
    code, _, err = finish("environment", tmp_path)
    assert (code, err) == (0, "a warning\n")  # rank 0's stderr, once
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text() == f"{rank} 2 {rank} {threads} 127.0.0.1 lo"


@pytest.mark.distributed
def test_under_a_launcher_it_joins_instead_of_starting_ranks(tmp_path):
    code, _, err = finish(
        "environment",
        tmp_path,
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        OMP_NUM_THREADS="1",
        MASTER_ADDR="here",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert (code, err) == (0, "a warning\n")
    assert (tmp_path / "0.txt").read_text() == "0 1 0 1 here lo"
    assert not (tmp_path / "1.txt").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["mistake", "slow-mistake"])
def test_a_users_mistake_on_one_rank_is_one_line_and_code_2(tmp_path, mode):
    code, out, err = finish(mode, tmp_path)
    assert (code, err) == (2, "launched: recipe.toml: trainer.x: found 3; allowed: 4\n")
    assert sorted(out.splitlines()) == ["hello from 0", "hello from 1"]  # and nothing of gloo's


@pytest.mark.distributed
def test_the_rank_that_failed_first_is_the_one_that_is_shown(tmp_path):
    """Rank 0 fails as well, of a closed connection: that is no cause."""
    code, _, err = finish("crash", tmp_path)
    assert code == 1
    assert err.startswith("launched: failed: ValueError: rank 1 is the cause\nTraceback")
    assert "closed" not in err
    assert "elastic" not in err


@pytest.mark.distributed
def test_a_killed_rank_is_named(tmp_path):
    code, _, err = finish("killed", tmp_path)
    assert code == 1
    assert err.splitlines()[-1] == "rank 1 was killed by SIGKILL (out of memory?)"


@pytest.mark.distributed
@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 143])
def test_sigterm_reaches_all_ranks_and_their_saves_are_waited_for(tmp_path, code):
    if code:
        (tmp_path / "expect143").touch()
    process = start("stop", tmp_path)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (code, "")
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


@pytest.mark.distributed
def test_ranks_die_with_their_launcher(tmp_path):
    """A launcher that is killed must not leave trainers behind that write into the run's folder."""
    process = start("orphan", tmp_path)
    wait_for(tmp_path / "pid0", tmp_path / "pid1")
    time.sleep(0.2)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 5
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.distributed
@pytest.mark.slow
def test_two_nodes_of_a_jobset_make_one_run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        start(
            "barrier",
            tmp_path,
            NUM_NODES="2",
            JOB_COMPLETION_INDEX=str(node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    lines = sorted(line for out, _ in said for line in out.splitlines())
    assert lines == [f"hello from {rank}" for rank in range(4)]
