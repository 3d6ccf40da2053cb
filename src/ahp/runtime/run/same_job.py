"""Checks whether a run may continue in its folder: with the job, the model and the text that it began with, and from a checkpoint."""

from __future__ import annotations

from typing import Any

from ahp.errors import BadInput, OtherJob
from ahp.job import Job, Optimizer
from ahp.plan import Plan
from ahp.runtime.optimizer.learning_rate import learning_rate
from ahp.runtime.run.folder import Checkpoint, RunFolder
from ahp.runtime.run.given import named_model
from ahp.runtime.run.same_model import described, key_differences, model_differences

MAY_CHANGE = (
    "job.steps",
    "job.precision",
    *(f"job.optimizer.{key}" for key in Optimizer.model_fields if key != "name"),
)
"""Keys of a job that may differ between past and future steps: they leave the data, the model and the optimizer's states as they are."""
WITHOUT_STATE = ("fp32", "bf16")
"""Precisions that need only weights and moments from a checkpoint; fp16 also needs its loss scale."""


def check_same_job(folder: RunFolder, plan: Plan, *, extend: bool = False) -> str | None:
    """Refuse to continue a run under another convergence contract. The layout may differ; the job and the model may not: neither the
    model's name, nor the contents of the file or the factory of that name.

    Under a schedule that does not look ahead, more steps change no past step. Under another schedule, and for the other keys of
    ``MAY_CHANGE``, ``extend`` is needed: past steps keep what they had, and future steps follow the job as it is now.

    Returns what the user must know about such a change, None if nothing. Raises OtherJob that names every key that differs, or BadInput
    that states that the run's checkpoints are lost.
    """
    if not folder.checkpoints():
        if folder.finished(plan.job) is None:
            folder.refuse_lost_checkpoints()
        return None
    before = folder.checkpoints()[-1].meta()
    before["job"] = _with_defaults(before["job"])
    found = key_differences(before["job"], plan.job.model_dump(mode="json"), "job")
    changed = {words.partition(" = ")[0]: words for words in found}
    differ, later_steps = [], None
    if not all(_may_change(key, plan.job, before["step"]) for key in changed):
        differ = list(changed.values())
    elif changed.keys() <= {"job.steps"}:
        later_steps = _rates_that_differ(before["job"], plan.job, before["step"])
    else:
        later_steps = f"the steps from {before['step'] + 1} on have {', '.join(changed.values())}"
    if later_steps is not None and not extend:
        differ = [f"{later_steps}; --run.extend true allows it"]
        if "job.precision" in changed:  # the devices chose it if nobody gave it
            differ[0] += f", --job.precision {before['job']['precision']} keeps the precision of the run"
    model_before = named_model(before.get("model"), before.get("init_from"), folder)
    for key, now, was in (
        ("init_from", plan.init_from, before.get("init_from")),
        ("model", named_model(plan.model, plan.init_from, folder), model_before),
    ):
        if was != now:
            differ.insert(0, f"{key} = {now!r} (the run has {was!r})")
    if not differ and before.get("model_described") is not None:
        differ = list(model_differences(before["model_described"], described(plan.model)))
    if differ:
        raise OtherJob(
            f"run.folder = {str(folder.path)!r} holds a run of another job: {'; '.join(differ)}. "
            "Start a new run with another --run.folder, or give the old values to continue this one"
        )
    return later_steps


def _may_change(key: str, now: Job, step: int) -> bool:
    if key == "job.steps":
        return now.steps >= step
    return key in MAY_CHANGE and (key != "job.precision" or now.precision in WITHOUT_STATE)


def check_same_text(folder: RunFolder, plan: Plan, fingerprint: str, held_out: str | None) -> None:
    """Refuse to continue a run on other text. Raises BadInput."""
    if saved := folder.checkpoints():
        refuse_other_text(saved[-1], plan, fingerprint, held_out)


def refuse_other_text(checkpoint: Checkpoint, plan: Plan, fingerprint: str, held_out: str | None) -> None:
    """Raises BadInput if the tokens are not those that the run was trained and evaluated on before. ``held_out``: the fingerprint of separate
    held-out text."""
    meta, job = checkpoint.meta(), plan.job
    for key, named, saved_as, now in (
        ("job.data", job.data_words, "data_fingerprint", fingerprint),
        ("job.validation", job.validation, "validation_fingerprint", held_out),
    ):
        if meta.get(saved_as, now) != now:
            raise BadInput(
                f"{key} = {named!r}: the text or its tokenizer has changed since step {checkpoint.step}; "
                "give it back, or start a new run with another --run.folder"
            )


def _with_defaults(job: dict[str, Any]) -> dict[str, Any]:
    """A job written by an older version of AHP, with the keys added since then."""
    try:
        return Job.model_validate(job).model_dump(mode="json")
    except ValueError:
        return job


def _rates_that_differ(before: dict[str, Any], now: Job, step: int) -> str | None:
    """A message if past steps would have had other learning rates under the job as it is now; None if they would not."""
    rates = [
        [learning_rate(now.optimizer, i, steps) for i in range(step + 1)] for steps in (before["steps"], now.steps)
    ]
    if rates[0][:step] == rates[1][:step]:
        return None
    first = next(i for i in range(step) if rates[0][i] != rates[1][i])
    return (
        f"job.steps = {now.steps} (the run has {before['steps']}): under the schedule {now.optimizer.schedule} the steps from "
        f"{first + 1} to {step} had other learning rates than such a job gives them: step {step} had {rates[0][step - 1]:.3g}, "
        f"step {step + 1} has {rates[1][step]:.3g}"
    )
