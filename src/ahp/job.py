"""What no plan may change: data, batch, sequence, precision, optimizer, seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from ahp.errors import BadInput
from ahp.violations import broken_rules, first_few, shortened, taken_for_numbers

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
StateDtype = Literal["fp32", "bf16"]
Packing = Literal["packed", "padded"]
BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Record(BaseModel):
    """A frozen record that refuses unknown keys. Making one in Python against a rule raises BadInput; ``model_validate`` raises pydantic's own
    error, from which ``ahp.plan.validated`` makes one BadInput about a whole file."""

    # No command needs all records: a record's validator is built at its first use, and a first plan takes 3 % less.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            name = type(self).__name__
            raise BadInput(f"{name}: {first_few(broken_rules(error, type(self), name))}") from None
        read = self.__dict__  # a search makes thousands of records: only values of another type are checked
        others = {k: v for k, v in data.items() if type(v) is not type(read.get(k)) or type(v) in (tuple, dict)}
        if others and (taken := list(taken_for_numbers(others, self))):
            raise BadInput(f"{type(self).__name__}: {first_few(taken)}")

    # As pydantic marks its own __init__: records inside records are validated without this one, which would lose the place of an error.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    if not TYPE_CHECKING:  # so that a type checker refuses it as it does for any frozen model

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError:
                kind = type(self).__name__
                raise BadInput(
                    f"{kind}.{name} = {shortened(value)}: a record is not changed; make another from it: "
                    f"{kind}(**{{**dict(it), {name!r}: ...}})"
                ) from None


def _in_quotes(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(
            f"version = {value}: a release needs quotes, as in '26.10'; without them YAML reads a number, and 26.10 as 26.1"
        )
    return value


Release = Annotated[str, BeforeValidator(_in_quotes)]
"""The name of a release, or a day."""


Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean per step."""


class Optimizer(Record):
    """AdamW as ``torch.optim.AdamW``, or with its moments in 8 bits as ``torchao.optim.AdamW8bit``; or Muon as ``torch.optim.Muon`` for the
    matrices of the blocks, AdamW for the rest."""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    learning_rate: float = Field(default=1.0e-3, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: float = Field(default=1.0e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_norms_and_biases: bool = True
    """Whether parameters of one dim decay too, as they do in torch without parameter groups."""
    momentum: Decay = 0.95
    """Muon only: decay of the running mean of the gradient."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the rate rises linearly; step 0 already takes ``1 / warmup_steps`` of it."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """What the rate does after the warm-up, down to ``min_lr_factor`` of it, which a step after the last one would have."""
    min_lr_factor: float = Field(default=0.1, ge=0, le=1)
    """Share of the rate that a step after the last one would have; not for constant. The name is torchtitan's."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """wsd only: share of the job's steps, at the end, over which the rate falls."""
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; None = no clipping."""
    _share_in_8_bits: float = PrivateAttr(default=1.0)

    @property
    def share_in_8_bits(self) -> float:
        """Share of the trained parameters whose moments are held in 8 bits, as set by ``Job.on_model``, else 1; 0 for other optimizers."""
        return self._share_in_8_bits if self.name == "adamw8bit" else 0.0

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Optimizer:
        for key, of, needed in (("momentum", "name", "muon"), ("decay_share", "schedule", "wsd")):
            value, default = getattr(self, key), Optimizer.model_fields[key].default
            if value != default and getattr(self, of) != needed:
                raise ValueError(
                    f"job.optimizer.{key} = {value}: has no effect under {of} {getattr(self, of)} (valid: {default}, or {of} {needed})"
                )
        if self.schedule == "constant" and self.min_lr_factor != 0.1:
            raise ValueError(
                f"job.optimizer.min_lr_factor = {self.min_lr_factor}: has no effect under schedule constant (valid: 0.1, or schedule linear, "
                "cosine or wsd)"
            )
        return self


class Lora(Record):
    """Low-rank adapters of linear layers, the only weights that are trained: keys and rules of ``peft.LoraConfig``."""

    r: int = Field(default=8, ge=1)
    """Rank: rows of the first matrix of an adapter, columns of the second."""
    lora_alpha: int = Field(default=8, ge=1)
    """The output of an adapter is scaled by ``lora_alpha / r``."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Last parts of the names of the layers, such as q_proj; or all linear layers except the head."""
    use_rslora: bool = False
    """Whether the scale is ``lora_alpha / sqrt(r)``."""
    _trained_share: float = PrivateAttr(default=1.0)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _all_or_names(cls, value: Any) -> Any:
        names = isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value)
        if value != "all-linear" and not names:
            raise ValueError(
                f"job.lora.target_modules = {value!r}: must be a list of names of linear layers (valid: all-linear, [q_proj, v_proj])"
            )
        return value


MOST_SEQUENCES = 1_000_000_000
"""The most sequences of a step."""

LEAST_SHARE = 1 / 1000
"""The least share of a mixture's sequences that one of its texts can have: they are dealt out a thousand at a time."""


class WeightedData(Record):
    """One text of a mixture."""

    path: str
    """Like ``Job.data`` for one text."""
    weight: float = Field(gt=0)
    """Its sequences among those of all texts, as a share of the sum of the weights."""


class Job(Record):
    """The convergence contract: the search never changes any of this."""

    data: str | tuple[WeightedData, ...] = "python-stdlib"
    """One text, or several with their shares of the sequences."""
    data_field: str | None = None
    """Key of a row that holds its text or its messages; None = by the keys that the row has."""
    packing: Packing = "packed"
    """Documents one after the other, cut into sequences; or one document in each sequence, filled up."""
    document_mask: bool = False
    """Whether attention is masked between the documents of one sequence, and positions start again at each."""
    validation: Annotated[float, Field(gt=0, lt=1)] | str | None = None
    """Text that is held out: other data, given like ``data``; or a share of the documents of ``data``, the last ones (of its tokens if that is none or all)."""
    sequence_length: int = Field(default=256, ge=2, le=1_000_000_000)
    global_batch_size: int = Field(default=16, ge=1, le=MOST_SEQUENCES)
    """Sequences per optimizer step, over all devices."""
    steps: int = Field(default=200, ge=1)
    precision: Precision = "bf16"
    dtype: StateDtype = "fp32"
    """Type of weights, gradients and optimizer states between steps. The name is torchtitan's and torchtune's."""
    optimizer: Optimizer = Optimizer()
    lora: Lora | None = None
    """Adapters that are trained instead of the weights; None = the weights are trained."""
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    """Whether the same start gives the same digits on GPUs too, where the fastest kernels add in any order."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("data", mode="after")
    @classmethod
    def _mixture(cls, value: str | tuple[WeightedData, ...]) -> str | tuple[WeightedData, ...]:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError(
                "job.data = []: names no text (valid: a path, or a list such as [{path: a.jsonl, weight: 0.7}])"
            )
        paths, total = [one.path for one in value], sum(one.weight for one in value)
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise ValueError(f"job.data: {twice!r} is in the list twice (valid: once, with the sum of its weights)")
        if small := next((one for one in value if one.weight < LEAST_SHARE * total), None):
            raise ValueError(
                f"job.data: weight {small.weight:g} of {small.path!r} is less than a thousandth of their sum {total:g} "
                f"(valid: {LEAST_SHARE * total:g} or more)"
            )
        return value

    @field_validator("validation", mode="before")
    @classmethod
    def _share_or_data(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and (isinstance(value, bool) or not 0 < value < 1):
            raise ValueError(
                f"job.validation = {value!r}: must be a share of the data between 0 and 1, such as 0.05, or other data, such as a file"
            )
        return value

    @model_validator(mode="after")
    def _documents_share_sequences(self) -> Job:
        if self.document_mask and self.packing == "padded":
            raise ValueError(
                "job.document_mask = True: has no effect under packing padded, where a sequence holds one document "
                "(valid: False, or packing packed)"
            )
        return self

    @model_validator(mode="after")
    def _states_in_16_bits(self) -> Job:
        if self.dtype == "fp32":
            return self
        for key, value, needed, rule in (
            ("precision", self.precision, "bf16", "weights are held in the type that they compute in"),
            ("optimizer.name", self.optimizer.name, "adamw", "it has states in fp32 or in 8 bits"),
            ("lora", self.lora, None, "adapters are trained in fp32, beside frozen weights in 16 bits"),
        ):
            if value != needed:
                given = value.model_dump(exclude_unset=True) if isinstance(value, Lora) else value
                valid = f"{'null' if needed is None else needed}, or job.dtype fp32"
                raise ValueError(f"job.{key} = {given!r}: does not go with job.dtype bf16: {rule} (valid: {valid})")
        return self

    @property
    def casts_weights(self) -> bool:
        """Whether weights are cast to the type that they compute in."""
        return self.precision != self.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a weight, a gradient or a moment as the optimizer holds it."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that ``data`` names."""
        return (self.data,) if isinstance(self.data, str) else tuple(one.path for one in self.data)

    @property
    def data_words(self) -> str:
        """What is trained on, in one line."""
        if isinstance(self.data, str):
            return self.data
        total = sum(one.weight for one in self.data)
        return " + ".join(f"{one.weight / total:.3g} {one.path}" for one in self.data)

    @property
    def trained_share(self) -> float:
        """Share of the model's parameters that is trained, as set by ``on_model``, else 1."""
        return 1.0 if self.lora is None else self.lora._trained_share

    def on_model(self, trained_share: float, share_in_8_bits: float) -> Job:
        """The same job with the share of the model that it trains, and the share of that with moments in 8 bits, both needed for pricing. These
        are no keys of the job, so that a plan does not hold them."""
        optimizer, lora = self.optimizer.model_copy(), None if self.lora is None else self.lora.model_copy()
        optimizer._share_in_8_bits = share_in_8_bits
        if lora is not None:
            lora._trained_share = trained_share
        return self.model_copy(update={"optimizer": optimizer, "lora": lora})

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length
