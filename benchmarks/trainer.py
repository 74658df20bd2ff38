"""`make bench-trainer`: the trainer's step beside TRL's, the bare model and the matrix products.

    python -m benchmarks.trainer [--quick] [--runs 3] [--precision bf16] [--only PART] [--gpu]

SmolLM2-135M, LoRA rank 16 on all linear layers, 32 seeded rollouts (prompts of 40 to 400 tokens, completions
of 8 to 200), generation left out. Every arm is a process of its own that says its time and its peak memory;
arms alternate, medians of the runs count, and the spread is printed; arms with the reference pass, which are
not judged, run once. All use as many threads as there are cores. Nothing else may run on the machine; most of
the time is TRL's: three quarters of an hour on two cores, half of that with `--quick`.

- *step*: rows to stepped, `trainer.step.train_batch`, reference pass excluded; then with it.
- *TRL*: GRPOTrainer's update, given the same token ids (trl_arm.py says what is timed), in its own default
  micro-batch of 8. It is installed into benchmarks/.venvs/trl on the first run, over this project's own
  packages: same torch, transformers and PEFT.
- *fastest*: the same in the micro-batch that is fastest on a quarter of the rollouts, which a user would have
  to find first; shown, not judged.
- *bare*: forward and backward of the same model over the same micro-batches, with the model's own output
  layer at the scored positions and a mean cross-entropy, since without a loss there is no backward. The
  decoder without any output layer is shown beside it, not judged.
- *floor*: the step's matrix products, measured one by one and added up, without attention's.
- *overhead*: a real worker over a real Postgres: the time of a batch that is not the step.

`--gpu` measures an 8B-shaped model instead, where CUDA is; elsewhere it says that it did not run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks.report import Report, fail
from benchmarks.training import rollouts

ROOT = Path(__file__).parents[1]
TRL_VENV = ROOT / "benchmarks" / ".venvs" / "trl"
TRL = "trl==1.16.0"
MICRO_BATCH = 8
"""TRL's default (per_device_train_batch_size)."""
MICRO_BATCHES = (1, 2, 4)
"""Others that its user may try."""
PRECISIONS = ("fp32", "bf16")
PARTS = ("step", "fastest", "overhead", "gradient")
BOUNDS = {"fp32": 0.30, "bf16": 0.27}
BETA = "0.001"
_ARM_SECONDS = 1800


def main() -> int:
    """Measure, print and write; return 1 where a figure falls short."""
    asked = _arguments()
    if asked.gpu:
        return _gpu()
    report = Report("trainer", "python -m benchmarks.trainer " + " ".join(sys.argv[1:]))
    with tempfile.TemporaryDirectory(prefix="yoro-bench-") as folder:
        path = Path(folder, "rollouts.json")
        chosen = _write_rollouts(path)
        report.add("tokens", sum(r.tokens for r in chosen), "tokens")
        report.add("of which completion", sum(len(r.completion) for r in chosen), "tokens")
        for precision in asked.precision:
            if "step" in asked.only:
                _compare(report, path, precision, asked.runs)
            if "fastest" in asked.only:
                _fastest(report, path, precision)
            if "overhead" in asked.only:
                _overhead(report, path, precision)
        if "gradient" in asked.only:
            _gradient(report, path)
    return 0 if report.write() else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of each arm")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--gpu", action="store_true")
    asked = parser.parse_args()
    asked.runs = 1 if asked.quick else asked.runs
    asked.precision, asked.only = asked.precision or PRECISIONS, asked.only or PARTS
    return asked


def _write_rollouts(path: Path) -> list[rollouts.Rollout]:
    from transformers import AutoTokenizer

    from service.policies import locate_base_model

    source = locate_base_model("smollm2-135m", None, None)
    made = rollouts.make(AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file))
    rollouts.save(made, path)
    return made


def _arm(name: str, *arguments: Any, python: Path = Path(sys.executable)) -> dict[str, float]:
    """Run an arm in a process of its own; return the figures of its last line."""
    command = [str(python), "-m", f"benchmarks.training.{name}", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_ARM_SECONDS, check=False
    )
    if done.returncode:
        fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"   {name} {' '.join(map(str, arguments[1:]))}: {found}", flush=True)
    return found


def _trl(*arguments: Any) -> dict[str, float]:
    python = TRL_VENV / "bin" / "python"
    if not (TRL_VENV / ".installed").exists():
        _install_trl(python)
    return _arm("trl_arm", *arguments, python=python)


def _install_trl(python: Path) -> None:
    """Make TRL's environment, which sees this one's packages and adds what they lack."""
    venv.create(TRL_VENV, with_pip=True, clear=True)
    inner, outer = (
        subprocess.run(
            [p, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for p in (str(python), sys.executable)
    )  # fmt: skip
    Path(inner, "outer.pth").write_text(outer + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), TRL]
    if subprocess.run(pip, check=False).returncode:
        fail(f"{TRL} could not be installed")
    (TRL_VENV / ".installed").touch()


def _fastest(report: Report, path: Path, precision: str) -> None:
    """The step beside TRL's fastest micro-batch, which a quarter of the rollouts finds."""
    quarter = rollouts.COUNT // 4
    seconds = {m: _trl(path, precision, 0, m, quarter)["seconds"] for m in (*MICRO_BATCHES, MICRO_BATCH)}
    micro = min(seconds, key=lambda m: seconds[m])
    step, trl = _arm("step_arm", path, precision, "step"), _trl(path, precision, 0, micro)
    report.add(f"{precision}: TRL's fastest micro-batch", micro, "rollouts")
    report.add(f"{precision}: TRL's update in that", trl["seconds"], "s")
    report.add(f"{precision}: step / TRL's update in that", step["seconds"] / trl["seconds"], "ratio")
    report.add(f"{precision}: step / TRL in that, memory", step["peak_gb"] / trl["peak_gb"], "ratio")


def _compare(report: Report, path: Path, precision: str, runs: int) -> None:
    """The arms in turn, `runs` times."""
    arms = {
        "step": lambda: _arm("step_arm", path, precision, "step"),
        "step with reference": lambda: _arm("step_arm", path, precision, "step", BETA),
        "TRL": lambda: _trl(path, precision, 0, MICRO_BATCH),
        "TRL with reference": lambda: _trl(path, precision, BETA, MICRO_BATCH),
        "bare": lambda: _arm("step_arm", path, precision, "bare"),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(runs):
        for name, arm in arms.items():
            if number == 0 or not name.endswith("reference"):  # those are not judged
                found[name].append(arm())
    seconds = {name: _median(report, precision, name, each) for name, each in found.items()}
    decoder = statistics.median(each["decoder_seconds"] for each in found["bare"])
    memory = {name: max(run["peak_gb"] for run in each) for name, each in found.items()}
    floor = _arm("step_arm", path, precision, "floor")["seconds"]
    bound = BOUNDS[precision]
    report.add(f"{precision}: step / TRL's update", seconds["step"] / seconds["TRL"], "ratio", bound, "less")
    both = seconds["step with reference"] / seconds["TRL with reference"]
    report.add(f"{precision}: the same with the reference pass", both, "ratio")
    report.add(f"{precision}: peak memory of the step", memory["step"], "GB")
    report.add(f"{precision}: peak memory of TRL's update", memory["TRL"], "GB")
    report.add(f"{precision}: step / TRL, memory", memory["step"] / memory["TRL"], "ratio", 0.45, "less")
    report.add(f"{precision}: speed of step / of bare model", seconds["bare"] / seconds["step"], "ratio", 0.9)
    report.add(f"{precision}: bare decoder without output layer", decoder, "s")
    report.add(f"{precision}: speed of step / of bare decoder", decoder / seconds["step"], "ratio")
    report.add(f"{precision}: matrix products alone", floor, "s")
    report.add(f"{precision}: step / matrix products", seconds["step"] / floor, "ratio")


def _median(report: Report, precision: str, name: str, runs: list[dict[str, float]]) -> float:
    """Report an arm's median and its spread."""
    seconds = [run["seconds"] for run in runs]
    report.add(f"{precision}: {name}", statistics.median(seconds), "s")
    report.add(f"{precision}: {name}, slowest less fastest run", max(seconds) - min(seconds), "s")
    return statistics.median(seconds)


def _overhead(report: Report, path: Path, precision: str) -> None:
    found = _arm("worker_arm", path, precision)
    bound = max(0.1 * found["step_seconds"], 1.0)
    report.add(f"{precision}: worker's step", found["step_seconds"], "s")
    report.add(f"{precision}: overhead outside the model", found["overhead_seconds"], "s", bound, "less")
    for part in ("claim", "rows", "files", "commit"):
        report.add(f"{precision}: of which {part}", found[f"{part}_seconds"], "s")


def _gradient(report: Report, path: Path) -> None:
    found = _arm("gradient_arm", path)
    report.add("fp32: gradient's distance to a slow one", found["fp32_distance"], "relative", 1e-4, "less")
    report.add("bf16: gradient's cosine to fp32's", found["bf16_cosine"], "cosine", 0.98)
    report.add("bf16: the same with attention in bf16", found["bf16_attention_cosine"], "cosine")


def _gpu() -> int:
    import torch

    if not torch.cuda.is_available():
        print("not run: no GPU")
        return 0
    report = Report("trainer-gpu", "python -m benchmarks.trainer --gpu")
    for name, value in _arm("gpu_arm", "full").items():
        report.add(name, value, name.rpartition("_")[2] if name.endswith(("_gb", "seconds")) else "")
    return 0 if report.write() else 1


if __name__ == "__main__":
    sys.exit(main())
