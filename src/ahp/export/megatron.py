"""``ahp export megatron``: a shell script that starts pretrain_gpt.py with the plan's arguments."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from ahp.errors import BadInput
from ahp.export.engine_target import EngineTarget, Format, commented, torchrun
from ahp.export.megatron_keys import DIALECT, FSDP
from ahp.export.megatron_model import MODEL_KEYS, model_settings
from ahp.export.model_shape import keys_of
from ahp.export.table import Rule, Settings, Subject
from ahp.export.target import Shape

MODEL = Rule(MODEL_KEYS, (), lambda s: model_settings(keys_of(s.plan.model)), lambda settings: {})
WITH_MODEL = replace(DIALECT, rules=(MODEL, *DIALECT.rules))
MOST_WORDS = 100_000
"""Of a script that is read; longer ones are no launch scripts."""


def _render(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    words = [key if value is True else f"{key} {shlex.quote(str(value))}" for key, value in settings.items()]
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
    """The arguments of a shell script or of a line: words that begin with --, each with what follows it. Variables and lists that the
    script sets are put in; nothing is run."""
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    known, lists = _assignments(text)
    rest = re.sub(LIST, "", text)
    words: list[str] = []
    for word in [*_words(rest), *(word for found in lists.values() for word in found)]:
        filled = _filled(word, known).strip()
        words += filled.split() if filled.startswith("--") else [filled]
        if len(words) > MOST_WORDS:
            raise BadInput("the script is too long to be a launch script")
    settings: Settings = {}
    for at, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            continue
        key, equals, value = word.partition("=")
        key = key.replace("_", "-")
        following = words[at + 1] if at + 1 < len(words) else "--"
        settings[key] = value if equals else True if _ends(following) else following
    if not settings:
        raise BadInput("no arguments (--tensor-model-parallel-size ...) in it")
    return settings


LIST = re.compile(r"^[ \t]*(\w+)\+?=\((.*?)\)[ \t]*$", re.M | re.S)


def _assignments(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Variables, and lists of words, that a script sets."""
    lists: dict[str, list[str]] = {}
    for name, body in LIST.findall(text):
        lists.setdefault(name, []).extend(_words(body))
    plain = re.findall(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s();]+)", text, re.M)
    known: dict[str, str] = {}
    for name, value in plain:
        known[name] = _filled(value.strip("\"'"), known)
    return known, lists


def _words(text: str) -> list[str]:
    """Words as a shell cuts them; of text whose quotes never end, line by line, and at spaces."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        lines = text.splitlines()
        return [word for line in lines for word in _words(line)] if len(lines) > 1 else text.split()


def _filled(word: str, known: dict[str, str]) -> str:
    """With ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` replaced where they are known."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return known.get(name, default if default is not None else found[0])

    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word).strip("\"'")


def _ends(word: str) -> bool:
    """Whether a word is no value of the argument before it."""
    return word.startswith("--") or "[@]" in word or word.endswith((".py", ";", "|", "&&"))


def _next(shape: Shape) -> tuple[str, ...]:
    return ("bash {file}",)


FORMATS: dict[str, Format] = {DIALECT.version: Format(WITH_MODEL, _render, parse, _next)}

TARGET = EngineTarget(
    "megatron", "a script that starts Megatron-LM's pretrain_gpt.py with the plan's arguments", ".megatron.sh", FORMATS
)
