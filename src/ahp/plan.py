"""How a job is split over devices, what that is forecast to cost, and why it was chosen; plan.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from ahp.about import __version__
from ahp.errors import BadInput
from ahp.job import Job, Record, Release
from ahp.stage_place import StagePlace as StagePlace
from ahp.stage_place import (
    check_beside_unlike_widths,
    check_places,
    check_recomputed,
    check_shards,
    given_shards,
    widths_of,
)
from ahp.step_forecast import Forecast as Forecast
from ahp.violations import broken_rules, first_few, shortened, taken_for_numbers
from ahp.whole_files import save
from ahp.words import count, counted
from ahp.yaml_text import mapping, read_mapping, written_yaml

Pattern = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
ScheduleName = Literal[Pattern, "Synthesized"]
ActivationCheckpoint = Literal["none", "selective", "full", "auto"]
Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes in their usual order, outermost first: neighboring ranks differ in ``tp``, because it sends the most."""
ContextMethod = Literal["ring", "all-to-all"]

DEGREE: dict[Axis, str] = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""The key of ``Parallelism`` for each axis."""

PLAN_SCHEMA_VERSION = 1


class Parallelism(Record):
    """The degrees and choices of one layout, under torchtitan's names.

    World size = replicate x shard x tensor x pipeline x context, if all stages are equally wide; ``stages`` can give each stage its own
    width (``widths``). Ranks are numbered along the mesh axes, the last one fastest: ``pp, dp_replicate, dp_shard, cp, tp``, or those of
    ``mesh_order``; and they fill the nodes in order.
    """

    data_parallel_replicate_degree: int = Field(default=1, ge=1)
    data_parallel_shard_degree: int = Field(default=1, ge=1)
    zero_stage: int = Field(default=0, ge=0, le=3)
    """0: nothing sharded. 1: optimizer states. 2: gradients too. 3: parameters too. Default: 3 when the shard degree is above 1, else 0."""
    tensor_parallel_degree: int = Field(default=1, ge=1)
    enable_sequence_parallel: bool = False
    pipeline_parallel_degree: int = Field(default=1, ge=1)
    pipeline_parallel_schedule: ScheduleName = "1F1B"
    pipeline_parallel_order: tuple[str, ...] | None = None
    """The order that Synthesized runs, one line for each rank: ``0F0,0F1,0I0,0W0``, the stage, kind (``schedule.Kind``) and micro-batch of
    each action. If replicas have orders of their own, the lines of one replica after those of another."""
    virtual_stages_per_rank: int = Field(default=1, ge=1)
    layers_per_stage: tuple[int, ...] | None = None
    """Number of blocks of each of the pipeline degree x virtual stages, in pipeline order; None = as even as possible."""
    stages: tuple[StagePlace, ...] | None = None
    """On a mixed cluster: the group and number of blocks of each of the pipeline degree x virtual stages, in pipeline order; stages of
    one pipeline rank are on one group and have one width. None = ranks fill the groups in the cluster's order."""
    micro_batches_per_replica: tuple[int, ...] | None = None
    """Micro-batches of one step for each of the data_parallel_replicate_degree replicas; None = the same number for each."""
    context_parallel_degree: int = Field(default=1, ge=1)
    context_parallel_method: ContextMethod | None = None
    """How the ranks that share a sequence compute attention. ring: keys and values go round. all-to-all: each has some heads of
    the whole sequence. None = the search chooses the faster one, and the runtime all-to-all if the heads divide."""
    expert_parallel_degree: int = Field(default=1, ge=1)
    expert_tensor_parallel_degree: int | None = Field(default=None, ge=1)
    """Tensor-parallel ranks that divide every expert: all; or 1, so that each holds whole ones, which they can share. None = the engine's default."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences that one replica computes at a time."""
    activation_checkpoint: ActivationCheckpoint = "none"
    recomputed_layers_per_stage: tuple[int, ...] | None = None
    """For each stage in pipeline order, how many blocks, the first ones, are recomputed as ``activation_checkpoint`` says; the
    others keep their activations. None = all blocks of every stage."""
    mesh_order: tuple[Axis, ...] | None = None
    """The mesh axes with a degree above 1, outermost first; neighboring ranks differ in the last. None = the usual order, also if it is given."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("zero_stage") is None:
            data["zero_stage"] = 3 if any(isinstance(shard, int) and shard > 1 for shard in given_shards(data)) else 0
        virtual, order = data.get("virtual_stages_per_rank", 1), data.get("mesh_order")
        if data.get("pipeline_parallel_schedule") is None:
            several = isinstance(virtual, int) and virtual > 1
            data["pipeline_parallel_schedule"] = "Interleaved1F1B" if several else "1F1B"
        usual = [axis for axis in AXES if data.get(DEGREE[axis], 1) != 1]
        if isinstance(order, (list, tuple)) and list(order) == usual:
            data["mesh_order"] = None
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Parallelism:
        if self.zero_stage == 0 and self.data_parallel_shard_degree > 1:
            raise ValueError(
                f"data_parallel_shard_degree = {self.data_parallel_shard_degree}: zero_stage 0 shards nothing; "
                "use data_parallel_replicate_degree, or zero_stage 1, 2 or 3"
            )
        if self.context_parallel_method is not None and self.context_parallel_degree == 1:
            raise ValueError(
                f"context_parallel_method = {self.context_parallel_method!r}: needs a context_parallel_degree above 1 (valid: null)"
            )
        self._check_pipeline_order()
        if (layers := self.layers_per_stage) is not None:
            if len(layers) != self.num_stages:
                raise ValueError(
                    f"layers_per_stage = {list(layers)}: needs {self.num_stages} entries, one for each of "
                    f"pipeline_parallel_degree {self.pipeline_parallel_degree} x virtual_stages_per_rank "
                    f"{self.virtual_stages_per_rank} stages"
                )
            if min(layers) < 1:
                raise ValueError(f"layers_per_stage = {list(layers)}: every stage needs at least one layer")
        self._check_stages()
        self._check_micro_batches()
        self._check_recomputed()
        self._check_order()
        return self

    def _check_pipeline_order(self) -> None:
        """Raises ValueError if the order is missing, not wanted, or has too few or too many lines; ``ahp.schedule.orders`` reads it."""
        lines, ranks = self.pipeline_parallel_order, self.pipeline_parallel_degree
        name = self.pipeline_parallel_schedule
        key = "pipeline_parallel_order"
        if lines is None and name == "Synthesized" and ranks > 1:
            raise ValueError(f"{key} = None: Synthesized needs one (valid: a line for each pipeline rank)")
        if lines is not None and name != "Synthesized":
            raise ValueError(f"{key}: {name} has an order of its own (valid: null)")
        replicas = self.data_parallel_replicate_degree
        if lines is not None and len(lines) not in (ranks, ranks * replicas):
            several = f", or one a rank of each of {replicas} replicas" if replicas > 1 else ""
            rule = f"pipeline_parallel_degree is {ranks}; it needs one a rank{several}"
            raise ValueError(f"{key}: {len(lines)} lines, {rule}")

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        if self.layers_per_stage is not None:
            raise ValueError(
                f"layers_per_stage = {list(self.layers_per_stage)}: stages has the layers of each stage (valid: null)"
            )
        check_places(
            self.stages,
            self.pipeline_parallel_degree,
            self.virtual_stages_per_rank,
            self.data_parallel_replicate_degree,
        )
        check_shards(self.widths, self.micro_batch_size, self.data_parallel_shard_degree, self.zero_stage)
        if self.has_unlike_widths:
            check_beside_unlike_widths(self.expert_parallel_degree, self.mesh_order, self.pipeline_parallel_degree)

    def _check_micro_batches(self) -> None:
        given, replicas = self.micro_batches_per_replica, self.data_parallel_replicate_degree
        if given is None:
            return
        if len(given) != replicas:
            raise ValueError(
                f"micro_batches_per_replica = {list(given)}: {len(given)} numbers, data_parallel_replicate_degree is "
                f"{replicas}; it needs one for each replica"
            )
        if min(given) < 1:
            raise ValueError(f"micro_batches_per_replica = {list(given)}: every replica needs at least one")

    def _check_recomputed(self) -> None:
        given, placed = self.recomputed_layers_per_stage, self.stages or ()
        for stage in placed:
            if (said := check_recomputed(stage, self.data_parallel_replicate_degree)) is not None:
                self._check_says_what("stages.recomputed_layers", said)
        if given is None:
            return
        if placed:
            raise ValueError(
                f"recomputed_layers_per_stage = {list(given)}: on a mixed cluster it is given in stages (valid: null; stages.recomputed_layers, a "
                "number or one for each replica)"
            )
        if len(given) != self.num_stages:
            raise ValueError(
                f"recomputed_layers_per_stage = {list(given)}: {len(given)} numbers, pipeline_parallel_degree "
                f"{self.pipeline_parallel_degree} x virtual_stages_per_rank {self.virtual_stages_per_rank} are "
                f"{self.num_stages} stages; it needs one for each"
            )
        if min(given) < 0:
            raise ValueError(f"recomputed_layers_per_stage = {list(given)}: no stage can recompute fewer than 0 blocks")
        self._check_says_what("recomputed_layers_per_stage", list(given))

    def _check_says_what(self, key: str, given: object) -> None:
        if self.activation_checkpoint not in ("selective", "full"):
            raise ValueError(
                f"{key} = {given}: activation_checkpoint {self.activation_checkpoint} does not say "
                "what of these blocks is recomputed (valid: activation_checkpoint selective or full; or leave it out)"
            )

    def _check_order(self) -> None:
        given = self.mesh_order
        axes: list[Axis] = [axis for axis in AXES if self.degree(axis) > 1]
        if given is None or sorted(given) == sorted(axes):
            return
        nearest: list[Axis] = [axis for axis in dict.fromkeys(given) if axis in axes]
        for axis in axes:
            if axis not in nearest:
                later = (at for at, other in enumerate(nearest) if AXES.index(other) > AXES.index(axis))
                nearest.insert(next(later, len(nearest)), axis)
        raise ValueError(
            f"mesh_order = {list(given)}: must name each axis with a degree above 1 once, outermost first; these are "
            f"{', '.join(axes) or 'none'} (valid: {nearest or 'null'})"
        )

    def degree(self, axis: Axis) -> int:
        """Ranks along a mesh axis."""
        return getattr(self, DEGREE[axis])

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes with a degree above 1 in the order in which ranks are numbered, outermost first."""
        return self.mesh_order or tuple(axis for axis in AXES if self.degree(axis) > 1)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Shard and tensor degree of each pipeline rank, from the first stage that it holds."""
        layout = self.data_parallel_shard_degree, self.tensor_parallel_degree
        return widths_of(self.stages, layout, self.pipeline_parallel_degree)

    @property
    def has_unlike_widths(self) -> bool:
        """Whether a stage has a width that is not the layout's."""
        own = (self.data_parallel_shard_degree, self.tensor_parallel_degree)
        return self.stages is not None and any(width != own for width in self.widths)

    def of_rank(self, rank: int) -> Parallelism:
        """The layout as one pipeline rank sees it: with the rank's width for all stages, and its share of a replica's micro-batch. Code that
        is local to a stage needs no more."""
        if not self.has_unlike_widths:
            return self
        (shard, tensor), whole = self.widths[rank], self.micro_batch_size * self.data_parallel_shard_degree
        return self.model_copy(
            update={
                "data_parallel_shard_degree": shard,
                "tensor_parallel_degree": tensor,
                "micro_batch_size": whole // shard,
                "zero_stage": self.zero_stage if shard * self.context_parallel_degree > 1 else 0,
                "enable_sequence_parallel": self.enable_sequence_parallel and tensor > 1,
                "stages": tuple(stage.as_wide_as_the_layout() for stage in self.stages or ()),
            }
        )

    @property
    def layouts_of_ranks(self) -> tuple[Parallelism, ...]:
        """The different layouts of pipeline ranks (``of_rank``), each once; only this layout if all ranks are equally wide."""
        if not self.has_unlike_widths:
            return (self,)
        first = {width: rank for rank, width in reversed([*enumerate(self.widths)])}
        return tuple(self.of_rank(rank) for rank in sorted(first.values()))

    @property
    def data_parallel_degree(self) -> int:
        """Replicas that see different sequences: replicate x shard."""
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def weight_shards(self) -> int:
        """Ranks over which ZeRO divides: ranks of the context axis hold the same weights and count too."""
        return 1 if self.zero_stage == 0 else self.data_parallel_shard_degree * self.context_parallel_degree

    @property
    def weight_replicas(self) -> int:
        """Number of ranks that hold the same part of the weights, or the same whole weights."""
        return self.data_parallel_degree * self.context_parallel_degree // self.weight_shards

    @property
    def world_size(self) -> int:
        widths = self.pipeline_parallel_degree * self.data_parallel_shard_degree * self.tensor_parallel_degree
        if self.stages is not None:
            widths = sum(shard * tensor for shard, tensor in self.widths)
        return self.data_parallel_replicate_degree * self.context_parallel_degree * widths

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_degree * self.virtual_stages_per_rank

    @property
    def given_layers(self) -> tuple[int, ...] | None:
        """Number of blocks of each stage if the layout gives them, in layers_per_stage or stages; else None."""
        return self.layers_per_stage if self.stages is None else tuple(stage.layers for stage in self.stages)

    def recomputed_layers(self, replica: int = 0) -> tuple[int, ...] | None:
        """For each stage of a replica, how many blocks are recomputed; None = all, if any are."""
        if self.stages is None:
            return self.recomputed_layers_per_stage
        if all(stage.recomputed_layers is None for stage in self.stages):
            return None
        return tuple(stage.recomputed(self.data_parallel_replicate_degree)[replica] for stage in self.stages)

    def micro_batches(self, job: Job) -> tuple[int, ...]:
        """Micro-batches of one step for each replica of the pipeline; the caller has checked that they divide."""
        if self.micro_batches_per_replica is not None:
            return self.micro_batches_per_replica
        return (self.num_micro_batches(job),) * self.data_parallel_replicate_degree

    def num_micro_batches(self, job: Job) -> int:
        """Micro-batches of one step on the replica that computes the most; the caller has checked that they divide."""
        if self.micro_batches_per_replica is not None:
            return max(self.micro_batches_per_replica)
        return job.global_batch_size // (self.data_parallel_degree * self.micro_batch_size)

    def short(self) -> str:
        """One line for tables and logs, such as ``dp2x4 zero3 tp2 pp2(1F1B) mb1 full``."""
        words = [f"dp{self.data_parallel_replicate_degree}x{self.data_parallel_shard_degree}", f"zero{self.zero_stage}"]
        if self.tensor_parallel_degree > 1:
            words.append(f"tp{self.tensor_parallel_degree}" + ("+sp" if self.enable_sequence_parallel else ""))
        elif self.enable_sequence_parallel and self.has_unlike_widths:
            words.append("sp")
        if self.pipeline_parallel_degree > 1:
            virtual = f"x{self.virtual_stages_per_rank}" if self.virtual_stages_per_rank > 1 else ""
            words.append(f"pp{self.pipeline_parallel_degree}{virtual}({self.pipeline_parallel_schedule})")
        if self.context_parallel_degree > 1:
            method = "" if self.context_parallel_method is None else f"({self.context_parallel_method})"
            words.append(f"cp{self.context_parallel_degree}{method}")
        if self.expert_parallel_degree > 1:
            words.append(f"ep{self.expert_parallel_degree}")
        if self.expert_tensor_parallel_degree is not None:
            words.append(f"etp{self.expert_tensor_parallel_degree}")
        words.append(f"mb{self.micro_batch_size}")
        if self.micro_batches_per_replica is not None:
            words.append(f"m({counted(map(str, self.micro_batches_per_replica))})")
        if self.stages is not None:
            places = (f"{'|'.join(dict.fromkeys(s.groups(1)))}:{s.layers}{s.own_width}" for s in self.stages)
            words.append(f"on({counted(places)})")
        if self.activation_checkpoint != "none":
            words.append(self.activation_checkpoint + self._some_recomputed())
        if self.mesh_order is not None:
            words.append(f"order({'>'.join(self.mesh_order)})")
        return " ".join(words)

    def _some_recomputed(self) -> str:
        """``(2 2x0)``: how many layers of each stage are recomputed, if not all are; ``0|3`` if replicas differ."""
        if self.recomputed_layers() is None:
            return ""
        replicas = self.data_parallel_replicate_degree if self.stages is not None else 1
        stages = zip(*(self.recomputed_layers(replica) or () for replica in range(replicas)), strict=True)
        return f"({counted('|'.join(map(str, dict.fromkeys(some))) for some in stages)})"


class EngineChoice(Record):
    """What runs the plan, and with which kernels."""

    name: Literal["ahp", "torchtitan", "megatron", "deepspeed", "accelerate"] = "ahp"
    attention: Literal["flash", "math"] = "flash"
    compile: bool | None = None
    """Whether blocks run as compiled kernels; None = not decided: a search decides it, pricing or running without a search uses False."""
    loss_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose logits, loss and gradient exist at a time; None = all of a micro-batch."""
    offload_optimizer: bool = False
    """Whether AdamW's moments are kept in host memory and come to the device for each update."""
    enable_async_tensor_parallel: bool | None = None
    """Whether collectives of sequence parallelism run in pieces overlapped with products that read or make their data; None = the engine's default."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] | None = None
    """alltoall: NCCL sends a token once for each of its experts; flex: DeepEP or HybridEP, once to each node. None = as in recipes; torchtitan: alltoall."""
    overlap_moe_expert_parallel_comm: bool | None = None
    """Whether tokens travel to experts beside the opposite pass of another micro-batch; None = where expert ranks span nodes, as in recipes."""
    cuda_graph_modules: tuple[Literal["attn", "moe_router"], ...] | None = None
    """Parts of a block that the host launches as one CUDA graph: attention; norm and router of experts, up to the sending of tokens. None = none."""
    version: Release | None = None
    """The release that runs: a name (megatron 26.04) or a day (2024-12); None = the newest (engines/releases.yaml)."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    def decided(self) -> EngineChoice:
        """The same choice, with eager blocks if ``compile`` is not decided."""
        return self.model_copy(update={"compile": bool(self.compile)})

    def words(self, *, fused: bool = True) -> str:
        """One line for people: ``ahp, flash attention, compiled blocks``; ``fused``: whether the model has attention in one operator."""
        found = (
            " ".join(filter(None, (self.name, self.version))),
            f"{self.attention} attention" if fused or self.attention != "flash" else "no fused attention",
            "compiled blocks" if self.compile else "",
            f"loss in chunks of {count(self.loss_chunk_tokens)} tokens" if self.loss_chunk_tokens else "",
            "optimizer states in host memory" if self.offload_optimizer else "",
            "asynchronous tensor parallelism" if self.enable_async_tensor_parallel else "",
        )
        return ", ".join(filter(None, found))


class Rejected(Record):
    """A layout that lost, and the one reason. Its costs are None if it cannot run, or in a plan from before they were kept."""

    parallelism: Parallelism
    reason: str
    step_time_s: float | None = None
    band_s: tuple[float, float] | None = None
    """Like ``Forecast.step_time_low_s .. step_time_high_s``."""
    memory_bytes: int | None = None
    """Bytes of the fullest rank."""
    fits: bool | None = None

    @classmethod
    def of(cls, parallelism: Parallelism, forecast: Forecast, reason: str) -> Rejected:
        """From a layout that was priced."""
        return cls(
            parallelism=parallelism,
            reason=reason,
            step_time_s=forecast.step_time_s,
            band_s=(forecast.step_time_low_s, forecast.step_time_high_s),
            memory_bytes=forecast.needed_bytes,
            fits=forecast.fits,
        )


class Plan(Record):
    """A layout for a job on a cluster, ready to run. ``cluster`` is the plain form of ``ahp.Cluster``."""

    schema_version: int = PLAN_SCHEMA_VERSION
    model: str | dict[str, Any] = "tiny"
    init_from: str | None = None
    """A folder of Hugging Face weights that training starts from; None = weights from the job's seed."""
    job: Job = Job()
    cluster: dict[str, Any] | None = None
    engine: EngineChoice = EngineChoice()
    parallelism: Parallelism = Parallelism()
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Keys of the layout that the user had fixed, as plain data; the search chose the others."""
    forecast: Forecast | None = None
    why: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    current: Rejected | None = None
    """The layout that the user ran at the time of the search (``ahp plan --current``)."""
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def priced(self) -> Forecast:
        """The forecast of a plan from a search, which always has one."""
        assert self.forecast is not None, "plans of a search have one"
        return self.forecast

    def save(self, path: str | Path) -> None:
        """Write plan.yaml under another name, then rename it, so that a reader never sees half of it. Raises BadInput if it cannot be written."""
        save(path, written_yaml(self.model_dump(mode="json")))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read plan.yaml, or the one in a run's folder. Raises BadInput when it is missing or is not a plan."""
        if not str(path):  # an empty word of a command line, which Path takes for the current folder
            raise BadInput("plan = '': must be a plan.yaml, or a run's folder")
        path, remedy = Path(path), "; write one with: ahp plan MODEL CLUSTER"
        if path.is_dir() and not (path / "plan.yaml").is_file():
            raise BadInput(f"plan = {str(path)!r}: a folder without a plan.yaml{remedy}")
        data = read_mapping(path / "plan.yaml" if path.is_dir() else path, "plan", remedy)
        _refuse_no_plan(data, str(path))
        made_by = mapping(data.get("versions") or {}, "versions").get("ahp", __version__)
        note = "" if made_by == __version__ else f" (made by ahp {shortened(made_by)}, and this is {__version__})"
        return validated(cls, data, f"{path}{note}")


def _refuse_no_plan(data: Mapping[str, Any], path: str) -> None:
    """Raises BadInput for a file of another kind or schema, and for a plan that AHP wrote whose end is missing: it would have the default layout."""
    another = {"run": "config, not a plan; give the run's folder, or", "model_type": "model;", "groups": "cluster;"}
    for key in another.keys() & data.keys():
        if key == "groups" or "schema_version" not in data:
            raise BadInput(f"plan = {path!r}: this is a {another[key]} write a plan with: ahp plan MODEL CLUSTER")
    if (version := data.get("schema_version", PLAN_SCHEMA_VERSION)) != PLAN_SCHEMA_VERSION:
        raise BadInput(f"{path}: schema_version = {shortened(version)}: AHP reads {PLAN_SCHEMA_VERSION}; plan again")
    if data.get("init_from", "") is None and "versions" not in data:  # only AHP writes keys that are null
        raise BadInput(f"plan = {path!r}: its last key, versions, is missing: the file is cut off; copy it again")


AnyRecord = TypeVar("AnyRecord", bound=Record)


def validated(kind: type[AnyRecord], data: Any, where: str, within: type[Record] | None = None) -> AnyRecord:
    """A record from plain data, or itself; a violation becomes one BadInput in the user's words. ``within``: a record that has it as a part."""
    if isinstance(data, kind):
        return data
    data = dict(data) if isinstance(data, Mapping) else data
    try:
        found = kind.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_few(broken_rules(error, kind, where, within))}") from None
    if taken := list(taken_for_numbers(data, found)):
        raise BadInput(f"{where}: {first_few(taken)}")
    return found
