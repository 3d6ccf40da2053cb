"""Keys of the job that can be given with a plan: its layout and its forecast do not depend on them."""

from __future__ import annotations

from typing import Any

from ahp.config import set_dotted
from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import Plan, validated

ANY_PLAN = (
    "job.data", "job.data_field", "job.validation", "job.steps", "job.seed",
    "job.optimizer.learning_rate", "job.optimizer.betas", "job.optimizer.eps", "job.optimizer.weight_decay",
    "job.optimizer.warmup_steps", "job.optimizer.schedule", "job.optimizer.decay_share", "job.optimizer.grad_clip",
)  # fmt: skip


def with_job(plan: Plan, path: str, overrides: dict[str, Any]) -> Plan:
    """The plan with other keys of its job. Raises BadInput for a key on which the plan depends."""
    changes: dict[str, Any] = {"job": plan.job.model_dump(mode="json")}
    for key, value in overrides.items():
        if key not in ANY_PLAN:
            keys = ", ".join(f"--{allowed.replace('_', '-')}" for allowed in ANY_PLAN)
            raise BadInput(
                f"--{key.replace('_', '-')}: {path} is a plan, and the key may change its layout; plan again with the key (valid here: {keys})"
            )
        set_dotted(changes, key, value)
    return plan.model_copy(update={"job": validated(Job, changes["job"], "job")})
