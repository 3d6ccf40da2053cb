"""torchtitan's keys: what its three dialects share, and where they differ.

0.2.2 (v0.2.2, config/job_config.py) is TOML; 0.3.0 and main (b5bcd76, config/configs.py and trainer.py) are Python functions with nearly the same
names. main counts tokens where the others count sequences.
"""

from __future__ import annotations

import math
import re

from ahp.engines.torchtitan import ALWAYS_SEQUENCE_PARALLEL
from ahp.errors import NotExpressible
from ahp.export.table import (
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    cut_of,
    refuse_what_has_no_key,
    same,
    size,
    understood,
    whole,
)
from ahp.export.torchtitan_job import RULES as OPTIMIZER
from ahp.export.torchtitan_job import precision
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.stages import layer_ranges, layers_of_stages

P, J = "parallelism.", "job."
FSDP, ETP = "parallelism.fsdp_reshard_after_forward", "parallelism.expert_tensor_parallel_degree"
DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "pipeline_parallel_degree",
           "context_parallel_degree", "expert_parallel_degree")  # fmt: skip
RANKS_UNKNOWN = f"{P}data_parallel_shard_degree = -1: the batch depends on the ranks there are; give the degree"
SP, PARTS = "parallelism.enable_sequence_parallel", "parallelism.module_fqns_per_model_part"
SCHEDULE, PER_STAGE = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_layers_per_stage"


def degree(settings: Settings, name: str) -> int:
    """A degree of a file; a shard degree of -1 = the ranks that are left."""
    return whole(settings.get(P + name, _least(name)), P + name, _least(name))


def _least(name: str) -> int:
    return -1 if name == "data_parallel_shard_degree" else 1


def with_rest(settings: Settings, nodes: int, per_node: int) -> Settings:
    """Settings with a shard degree of -1 replaced by what the other degrees leave of the devices. Raises Unreadable if that is no whole number."""
    key = P + "data_parallel_shard_degree"
    if degree(settings, "data_parallel_shard_degree") != -1:
        return settings
    devices, others = nodes * per_node, math.prod(degree(settings, name) for name in DEGREES[:1] + DEGREES[2:5])
    if devices % others:
        raise Unreadable(f"{key} = -1: the other degrees make {others}, which does not divide {devices} devices")
    return {**settings, key: devices // others}


def _write_sharding(s: Subject) -> Settings:
    refuse_what_has_no_key(s)
    if s.p.weight_shards == 1:
        return {}
    return {FSDP: "always" if s.p.zero_stage == 3 else "never"}


def _read_sharding(settings: Settings) -> Fields:
    if degree(settings, "data_parallel_shard_degree") == 1 == degree(settings, "context_parallel_degree"):
        return {P + "zero_stage": 0}
    kept = {"always": 3, "never": 2, "default": 2 if degree(settings, "pipeline_parallel_degree") > 1 else 3}
    return {P + "zero_stage": kept[settings.get(FSDP, "default")]}


SHARDING = Rule((FSDP,), (P + "zero_stage",), _write_sharding, _read_sharding)


def sequence(*, always: bool) -> Rule:
    """Sequence parallelism; ``always``: it has no key, and is on with tensor parallelism."""

    def write(s: Subject) -> Settings:
        if s.p.tensor_parallel_degree == 1:
            return {}
        if always and not s.p.enable_sequence_parallel:
            raise NotExpressible(f"enable_sequence_parallel = False: {ALWAYS_SEQUENCE_PARALLEL}")
        return {} if always else {SP: s.p.enable_sequence_parallel}

    def read(settings: Settings) -> Fields:
        on = True if always else bool(settings.get(SP, True))
        return {SP: on and degree(settings, "tensor_parallel_degree") > 1}

    return Rule(() if always else (SP,), (SP,), write, read)


def stages(head: str) -> Rule:
    """The blocks that each stage holds, written in full, so that the cut is the one in the forecast. ``head``: the name of the last module."""

    def write(s: Subject) -> Settings:
        p = s.p
        if p.num_stages == 1:
            return {}
        layers = layers_of_stages(p, s.layers, ends="count_as_layers")
        parts = [[f"layers.{at}" for at in blocks] for blocks in layer_ranges(layers)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", head]
        return {SCHEDULE: p.pipeline_parallel_schedule, PARTS: parts}

    def read(settings: Settings) -> Fields:
        ranks, name = degree(settings, "pipeline_parallel_degree"), settings.get(SCHEDULE, "1F1B")
        if ranks == 1:
            return {}
        if name not in SCHEDULES:
            raise Unreadable(f"{SCHEDULE} = {name!r}: AHP knows {', '.join(SCHEDULES)}")
        found: Fields = {SCHEDULE: name}
        parts = settings.get(PARTS)
        if (
            parts is None
        ):  # distributed/pipeline_parallel.py, pipeline_llm: two stages a rank where a schedule has several
            if PER_STAGE in settings:
                raise Unreadable(
                    f"{PER_STAGE} = {settings[PER_STAGE]!r}: AHP reads {PARTS.partition('.')[2]} in its place"
                )
            return found | {P + "virtual_stages_per_rank": 1 if SCHEDULES[name].most_virtual == 1 else 2}
        layers = [sum(bool(re.fullmatch(r"layers\.\d+", module)) for module in part) for part in parts]
        return found | cut_of(layers, ranks, "count_as_layers", PARTS)

    return Rule(
        (SCHEDULE, PARTS, PER_STAGE), (SCHEDULE, P + "virtual_stages_per_rank", P + "layers_per_stage"), write, read
    )


def sequences() -> Rule:
    """Batches in sequences, as 0.2.2 and 0.3.0 count them: a pipeline takes a whole local batch and cuts it."""
    local, whole_batch, cut = (
        "training.local_batch_size",
        "training.global_batch_size",
        P + "pipeline_parallel_microbatch_size",
    )

    def write(s: Subject) -> Settings:
        p, batch = s.p, s.job.global_batch_size
        piped = p.pipeline_parallel_degree > 1
        found = {local: batch // p.data_parallel_degree if piped else p.micro_batch_size, whole_batch: batch}
        return found | ({cut: p.micro_batch_size} if piped else {})

    def read(settings: Settings) -> Fields:
        mine, batch = whole(settings.get(local, 8), local), whole(settings.get(whole_batch, -1), whole_batch, -1)
        piped = degree(settings, "pipeline_parallel_degree") > 1
        micro = whole(settings.get(cut, 1), cut) if piped else mine
        ranks = degree(settings, "data_parallel_replicate_degree") * degree(settings, "data_parallel_shard_degree")
        if ranks < 0:
            raise Unreadable(RANKS_UNKNOWN)
        batch = mine * ranks if batch == -1 else batch
        if piped and batch != mine * ranks:
            raise Unreadable(
                f"{whole_batch} = {batch}: the pipeline is filled and drained {batch / (mine * ranks):g} times a step; AHP does so once"
            )
        return {P + "micro_batch_size": micro, J + "global_batch_size": batch}

    return Rule((local, whole_batch, cut), (P + "micro_batch_size", J + "global_batch_size"), write, read)


def tokens() -> Rule:
    """Batches in tokens, as main counts them."""
    micro, step, several = (
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.num_tokens_per_train_step",
        P + "num_pp_microbatches",
    )
    context = "training.max_context_length"

    def write(s: Subject) -> Settings:
        piped = s.p.pipeline_parallel_degree > 1
        found = {
            context: s.job.sequence_length,
            micro: s.p.micro_batch_size * s.job.sequence_length,
            step: s.job.tokens_per_step,
        }
        return found | ({several: s.p.num_micro_batches(s.job)} if piped else {})

    def read(settings: Settings) -> Fields:
        length, each = whole(settings.get(context, 2048), context), whole(settings.get(micro, 16384), micro)
        ranks = degree(settings, "data_parallel_replicate_degree") * degree(settings, "data_parallel_shard_degree")
        piped = degree(settings, "pipeline_parallel_degree") > 1
        number = whole(settings.get(several, 1), several) if piped else 1
        total = whole(settings.get(step, -1), step, -1)
        if ranks < 0 and total == -1:
            raise Unreadable(RANKS_UNKNOWN)
        total = each * number * ranks if total == -1 else total
        if each % length or total % length:
            raise Unreadable(f"{micro} = {each}: not a multiple of {context} = {length}, so no whole sequences")
        if piped and ranks > 0 and total != each * number * ranks:
            raise Unreadable(
                f"{step} = {total}: the pipeline is filled and drained several times a step; AHP does so once"
            )
        return {
            J + "sequence_length": length,
            P + "micro_batch_size": each // length,
            J + "global_batch_size": total // length,
        }

    fields = (J + "sequence_length", P + "micro_batch_size", J + "global_batch_size")
    return Rule((context, micro, step, several), fields, write, read)


def _write_compile(s: Subject) -> Settings:
    return (
        {"compile.enable": True, "compile.components": ["model", "loss"]}
        if s.plan.engine.compile
        else {"compile.enable": False}
    )


def _read_compile(settings: Settings) -> Fields:
    parts = settings.get("compile.components", ["model", "loss"])
    return {"engine.compile": bool(settings.get("compile.enable", False)) and "model" in parts}


COMPILE = Rule(("compile.enable", "compile.components"), ("engine.compile",), _write_compile, _read_compile)


def _async(key: str) -> Rule:
    """Asynchronous tensor parallelism; null in a plan is off, as by default."""
    name = "engine.enable_async_tensor_parallel"
    return Rule(
        (key,),
        (name,),
        lambda s: {key: bool(s.plan.engine.enable_async_tensor_parallel)},
        lambda t: {name: bool(t.get(key, False))},
    )


BACKEND, DISPATCHER = P + "expert_parallel_comm_backend", "engine.moe_token_dispatcher_type"
BACKENDS = {"alltoall": "standard", "flex": "deepep"}
"""torchtitan's names of how tokens reach experts."""


def _write_backend(s: Subject) -> Settings:
    asked = s.plan.engine.moe_token_dispatcher_type
    if asked == "flex" and s.model.partition("/")[0] != "deepseek_v3":  # models/moe/moe.py, build_moe
        rule = f"DeepEP of 0.2.2 is for deepseek_v3 alone, not for {s.model}"
        raise NotExpressible(f"{DISPATCHER} = 'flex': {rule} (valid: null, alltoall; or --model deepseek_v3/FLAVOR)")
    return {} if asked is None else {BACKEND: BACKENDS[asked]}


def _read_backend(settings: Settings) -> Fields:
    asked = settings.get(BACKEND)
    if asked is None or degree(settings, "expert_parallel_degree") == 1:
        return {}
    names = {theirs: ours for ours, theirs in BACKENDS.items()}
    if asked not in names:
        raise Unreadable(f"{BACKEND} = {asked!r}: AHP knows {', '.join(names)}")
    return {DISPATCHER: names[asked]}


COMMON: tuple[Rule, ...] = (
    *(size(P + name, name, _least(name)) for name in DEGREES),
    SHARDING,
    *OPTIMIZER,
    COMPILE,
    same("training.steps", J + "steps", 10000),
    same("debug.seed", J + "seed"),
    same("debug.deterministic", J + "deterministic", False),
)
OTHER = (
    "job.",
    "profiling.",
    "metrics.",
    "checkpoint.",
    "comm.",
    "validation.",
    "training.dataset",
    "training.gc_",
    "training.dataloader",
    "memory_estimation.",
)


def _write_recompute(s: Subject) -> Settings:
    mode = s.p.activation_checkpoint
    if mode == "auto":
        raise NotExpressible(
            "activation_checkpoint = 'auto': torchtitan needs an explicit value (valid: none, selective, full)"
        )
    return {
        "activation_checkpoint.mode": mode,
        **({"activation_checkpoint.selective_ac_option": "op"} if mode == "selective" else {}),
    }


def _read_recompute(settings: Settings) -> Fields:
    mode, option = (
        settings.get(f"activation_checkpoint.{key}", d)
        for key, d in (("mode", "selective"), ("selective_ac_option", "2"))
    )
    if mode == "selective" and option not in ("op", "1"):
        raise Unreadable(
            f"activation_checkpoint.selective_ac_option = {option!r}: one block in {option} is recomputed; AHP knows op, and 1"
        )
    if mode == "memory_budget":
        raise Unreadable(
            "activation_checkpoint.mode = 'memory_budget': the compiler chooses what is kept; AHP knows none, selective and full"
        )
    return {P + "activation_checkpoint": "full" if mode == "selective" and option == "1" else mode}


RECOMPUTE = Rule(
    ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
    (P + "activation_checkpoint",),
    _write_recompute,
    _read_recompute,
)


MODEL_KEYS = ("model.name", "model.flavor")
"""Keys of the TOML file. In a Python file the function that it starts from gives them."""


TOML_022 = Dialect(
    engine="torchtitan",
    version="0.2.2",
    source="torchtitan v0.2.2, config/job_config.py",
    rules=(
        Rule(MODEL_KEYS, (), lambda s: dict(zip(MODEL_KEYS, s.model.split("/"), strict=True)), lambda settings: {}),
        *COMMON,
        sequence(always=True),
        stages("output"),
        sequences(),
        same("training.seq_len", J + "sequence_length", 2048),
        RECOMPUTE,
        precision(converters="model.converters"),
        _async(P + "enable_async_tensor_parallel"),
        same(ETP, ETP, skip=None),
        Rule((BACKEND,), (DISPATCHER,), _write_backend, _read_backend),
    ),
    other=(*OTHER, "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion"),
)


def _whole_experts() -> Rule:
    """From 0.3.0 on every expert lies whole on one tensor-parallel rank."""

    def write(s: Subject) -> Settings:
        asked, p = s.p.expert_tensor_parallel_degree, s.p
        if asked not in (None, 1) and p.expert_parallel_degree > 1:
            raise NotExpressible(
                f"expert_tensor_parallel_degree = {asked}: ep of torchtitan spans the tensor-parallel ranks (valid: 1, null; or --target-version 0.2.2)"
            )
        return {}

    return Rule((), (ETP,), write, lambda settings: {})


def _write_no_backend(s: Subject) -> Settings:
    """``moe_comm_backend`` is an argument of the function that makes the model (models/*/__init__.py, model_registry)."""
    if s.plan.engine.moe_token_dispatcher_type == "flex":
        rule = "from 0.3.0 on it is a part of the model's own definition, which no key changes"
        raise NotExpressible(f"{DISPATCHER} = 'flex': {rule} (valid: null, alltoall; or --target-version 0.2.2)")
    return {}


def _write_graphs(s: Subject) -> Settings:
    """CUDA graphs are on by default since 0.3.0, and refused with these degrees (trainer.py, _validate_cuda_graphs)."""
    return {GRAPHS: True} if s.p.pipeline_parallel_degree > 1 or s.p.expert_parallel_degree > 1 else {}


GRAPHS = "training.disable_cuda_graphs"


def _python(version: str, batch: tuple[Rule, ...], source: str) -> Dialect:
    return Dialect(
        engine="torchtitan",
        version=version,
        source=source,
        rules=(
            *COMMON,
            sequence(always=False),
            stages("lm_head"),
            *batch,
            RECOMPUTE,
            precision(converters=None),
            _async("compile.enable_async_tensor_parallel"),
            _whole_experts(),
            Rule((), (DISPATCHER,), _write_no_backend, lambda settings: {}),
            Rule((GRAPHS,), (), _write_graphs, lambda settings: {}),
            understood(*MODEL_KEYS),
        ),
        other=OTHER,
    )


PYTHON_030 = _python(
    "0.3.0",
    (sequences(), same("training.seq_len", J + "sequence_length", 2048)),
    "torchtitan 0.3.0, config/configs.py and trainer.py",
)
PYTHON_MAIN = _python("main", (tokens(),), "torchtitan b5bcd76, config/configs.py and trainer.py")
