"""``ahp export megatron``: a shell script that starts pretrain_gpt.py with the plan's arguments."""

from __future__ import annotations

import shlex
from dataclasses import replace

from ahp.errors import BadInput
from ahp.export.engine_target import EngineTarget, Format, commented, torchrun
from ahp.export.launch_line import sizes
from ahp.export.megatron_keys import DIALECT, DISPATCHER, FSDP, GRAPHED, RECIPE
from ahp.export.megatron_model import MODEL_KEYS, NUM_EXPERTS, model_settings, on_generation
from ahp.export.model_shape import keys_of
from ahp.export.shell import arguments, words
from ahp.export.table import Rule, Settings, Subject
from ahp.export.target import Shape, generation_of


def _write_model(s: Subject) -> Settings:
    return on_generation(model_settings(keys_of(s.plan.model)), generation_of(s.plan))


MODEL = Rule(MODEL_KEYS, (), _write_model, lambda settings: {})
WITH_MODEL = replace(DIALECT, rules=(MODEL, *DIALECT.rules))


SENDS_LEFT_OPEN = (
    "Where experts span nodes, the forecast takes what NVIDIA's recipes have for a key that the plan leaves open: --moe-token-dispatcher-type flex, which",
    "needs DeepEP or HybridEP, and --overlap-moe-expert-parallel-comm. For a forecast of what is written here, plan with",
    "--engine.moe_token_dispatcher_type alltoall --engine.overlap_moe_expert_parallel_comm false.",
)
"""Lines above a script whose plan leaves open how tokens are sent."""
GRAPH_LEFT_OPEN = (
    "For experts in MXFP8 the forecast takes what NVIDIA's recipes have: a step is one CUDA graph (--cuda-graph-impl full_iteration, --moe-paged-stash,",
    "--use-transformer-engine-op-fuser, --fp8-dot-product-attention), which Megatron-Core calls experimental and this script leaves out. The forecast",
    "without it is that of --engine.version 26.04.",
)
"""Lines above a script of experts in MXFP8."""


def _render(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    choice = subject.plan.engine
    left_open = None in (choice.moe_token_dispatcher_type, choice.overlap_moe_expert_parallel_comm)
    if DISPATCHER in settings and shape.most > 1 and left_open:
        head = [*head, *SENDS_LEFT_OPEN]
    if RECIPE in settings and NUM_EXPERTS in settings and not choice.cuda_graph_modules:
        head = [*head, *GRAPH_LEFT_OPEN]
    words = [
        key if value is True else f"{key} {value if key == GRAPHED else shlex.quote(str(value))}"
        for key, value in settings.items()
    ]
    vocabulary = keys_of(subject.plan.model)["vocab_size"]
    return TEXT.format(
        head=commented(head),
        queues=MANY_QUEUES if FSDP in settings else ONE_QUEUE,
        arguments="\n".join(f"  {word}" for word in words),
        data=f"--mock-data --tokenizer-type NullTokenizer --vocab-size {vocabulary}",
        launch=torchrun(shape),
    )


ONE_QUEUE = "export CUDA_DEVICE_MAX_CONNECTIONS=1  # training/arguments.py asks for it on Hopper and before, with tensor or context parallelism"
MANY_QUEUES = "unset CUDA_DEVICE_MAX_CONNECTIONS  # training/arguments.py: Megatron-FSDP needs more than one"

TEXT = """\
#!/bin/bash
{head}# Started on every node, from the root of Megatron-LM.
{queues}

ARGUMENTS=(
{arguments}
)
# Your data and tokenizer in their place: --data-path ... --tokenizer-type HuggingFaceTokenizer --tokenizer-model ...
DATA=({data})

{launch} pretrain_gpt.py "${{ARGUMENTS[@]}}" "${{DATA[@]}}"
"""


def parse(text: str) -> Settings:
    """The arguments of a shell script or of a line: words that begin with --, each with what follows it; and the sizes that its launcher
    has. Nothing is run. Raises BadInput for a text without arguments."""
    found = words(text)
    settings = arguments(found)
    if not settings:
        raise BadInput("no arguments (--tensor-model-parallel-size ...) in it")
    return settings | sizes(text, found)


def _next(shape: Shape) -> tuple[str, ...]:
    return ("bash {file}",)


FORMATS: dict[str, Format] = {DIALECT.version: Format(WITH_MODEL, _render, parse, _next)}

TARGET = EngineTarget(
    "megatron", "a script that starts Megatron-LM's pretrain_gpt.py with the plan's arguments", ".megatron.sh", FORMATS
)
