"""Judge the folder of a finished run: status, metrics, checkpoint, plan and report are there and make sense."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from ahp.plan import Plan

METRIC_KEYS = (
    "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "step_time_s", "predicted_step_time_s", "memory_bytes",
)  # fmt: skip


def faults(run: Path, steps: int) -> list[str]:
    """Everything that is wrong with the run's folder, in words; empty when it is as promised."""
    found = []
    status = json.loads((run / "status.json").read_text())
    if (status["state"], status["step"], status["exit_code"]) != ("done", steps, 0):
        found.append(f"status.json says {status}")

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if len(metrics) != steps or len({row["step"] for row in metrics}) != steps:
        found.append(f"metrics.jsonl has steps {[row['step'] for row in metrics]}, not {steps} different ones")
    for key in METRIC_KEYS:
        if not all(isinstance(row.get(key), (int, float)) and math.isfinite(row[key]) for row in metrics):
            found.append(f"metrics.jsonl: {key} is not a finite number at every step")
    losses = [row["loss"] for row in metrics]
    if not losses[-1] < losses[0] - 0.1:
        found.append(f"the loss did not fall: {losses}")

    plan = Plan.load(run / "plan.yaml")
    if plan.forecast is None or not plan.why or not plan.versions:
        found.append("plan.yaml lacks its forecast, its reasons or the versions")
    checkpoints = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    if f"step-{steps}" not in checkpoints or any(name.endswith(".tmp") for name in checkpoints):
        found.append(f"checkpoints are {checkpoints}")
    report = run / "report.html"
    if not report.is_file() or "</html>" not in report.read_text():
        found.append("report.html is missing or cut short")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=int, required=True, help="steps that it should have trained")
    arguments = parser.parse_args()
    found = faults(arguments.run, arguments.steps)
    if found:
        raise SystemExit("\n".join(found))
    print(f"{arguments.run}: as promised after {arguments.steps} steps")


if __name__ == "__main__":
    main()
