"""What must not change whatever the plan: data, batch, sequence, precision, optimizer, seed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Packing = Literal["packed", "padded"]
BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Record(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimizer(Record):
    """AdamW as in ``torch.optim.AdamW``: every parameter decays, norms and biases too."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1.0e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1.0e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the rate rises linearly; step 0 already takes ``1 / warmup_steps`` of it."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """What the rate does after the warm-up, down to a tenth at the last step of the job."""
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; None = no clipping."""


class Job(Record):
    """The convergence contract: the search never changes any of this."""

    data: str = "python-stdlib"
    data_field: str | None = None
    """Key of a row that holds its text or its messages; None = by the keys that the row has."""
    packing: Packing = "packed"
    """Documents one after the other, cut into sequences; or one document in each sequence, filled up."""
    sequence_length: int = Field(default=256, ge=2)
    global_batch_size: int = Field(default=16, ge=1)
    """Sequences per optimizer step, over all devices."""
    steps: int = Field(default=200, ge=1)
    precision: Precision = "bf16"
    optimizer: Optimizer = Optimizer()
    seed: int = Field(default=0, ge=0)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length
