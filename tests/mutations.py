"""Files from users, broken in the ways that people, editors and foreign programs break them: seeded, the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable

CONFIG = """\
model: {model_type: llama, vocab_size: 300, hidden_size: 32, num_hidden_layers: 2}
init_from: null
cluster: {nodes: 1, devices_per_node: 8, device: H100-SXM-80GB}
job:
  data: python-stdlib
  sequence_length: 256
  steps: 200
  precision: bf16
  optimizer: {name: adamw, learning_rate: 1.0e-3, betas: [0.9, 0.95], schedule: cosine}
parallelism: {tensor_parallel_degree: 2, layers_per_stage: [1, 1], mesh_order: [tp]}
run: {folder: runs/demo, checkpoint_every: 30min, keep: 3, track: [tensorboard], profile: {steps: [1, 2]}}
"""
PLAN = """\
schema_version: 1
model: tiny
job: {data: python-stdlib, sequence_length: 256, global_batch_size: 8}
cluster: {groups: [{nodes: 1, devices_per_node: 2, device: {name: H100, memory_bytes: 85899345920}}]}
parallelism: {data_parallel_shard_degree: 2, mesh_order: [dp_shard]}
forecast: {step_time_s: 0.5, step_time_low_s: 0.4, step_time_high_s: 0.6, tokens_per_s_per_device: 100.0, mfu: 0.3, mfu_peak: bf16 dense, fits: true,
  memory_allocated_bytes: 100, memory_reserved_bytes: 200, fit_probability: 0.99, step: {forward: 0.1}, memory: {parameters: 100}}
why: [nothing else is as fast]
rejected: [{parallelism: {tensor_parallel_degree: 2}, reason: slow}]
versions: {torch: 2.13.0}
"""
CLUSTER = """\
groups:
  - {name: a, nodes: 1, devices_per_node: 4, device: H100-SXM-80GB}
  - {name: b, nodes: 2, devices_per_node: 8, device: {base: A100-SXM-80GB, memory_bytes: 42949672960}, inter_node_gbps: 200}
links: [{between: [a, b], gbps: 100, latency_us: 10}]
"""
VALUES = (
    "", "null", "true", "no", "0", "-1", "3.5", "1e999", ".nan", "-.inf", "1e400", "0x" + "f" * 5000, "9" * 4301, "-" + "9" * 4300, "1:30:00",
    ":".join(["59"] * 900), "2026-99-99", "2026-01-01", "2026-01-01 25:00:00", "12:99", "!!int abc", "!!float x", "!!bool 7", "!!null x", "!!timestamp x",
    "!!binary '#'", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!str [1]", "!!int [1]", "!!map x", "!!seq x", "!unknown x",
    "!!python/object/apply:os.abort []", "[]", "{}", "[[]]", "{[1, 2]: 3}", "{{a: 1}: 3}", "{? [a] : b}", "? a", "{1: 2, 1: 3}", "{a: 1, a: 2}",
    "{<<: 3}", "{<<: [1]}", "{<<: {a: 1}}", "&a [*a]", "&a {b: *a}", "{&a a: *a}", "*none", "&x", "*", "'", '"', '"\\\\q"', '"\\\\0"', '"\\\\ud800"',
    "|", ">", "[" * 500, "{a: " * 500, "- " * 500, "a" * 20_000, "[" + "1, " * 3000 + "1]", "\u0000", "\u0085", "\ufeff", "\ud7ff", "%TAG", "---", "...", "@x",
    "`x`", "=", "<<", "~", "[1, 2", "{a: 1", "os:abort", "/", "..", "x" * 5000 + "/y", "8x8xH100", "99999999999999999999", "H100-SXM-80GB", "a\tb",
)  # fmt: skip


def aliases(levels: int, width: int = 10, form: str = "list") -> str:
    """A value of a few lines that stands for ``width ** levels`` values."""
    lines = [f"  x0: &x0 {'[x]' if form == 'list' else '{k: x}'}"]
    for level in range(1, levels + 1):
        inner = ", ".join([f"*x{level - 1}"] * width)
        if form == "list":
            lines.append(f"  x{level}: &x{level} [{inner}]")
        elif form == "merge":
            lines.append(f"  x{level}: &x{level} {{<<: [{inner}]}}")
        else:
            keys = ", ".join(f"k{i}: *x{level - 1}" for i in range(width))
            lines.append(f"  x{level}: &x{level} {{{keys}}}")
    return "\n".join(lines)


def mutated(text: str, draw: random.Random) -> str:
    """One file with one to three faults."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        text = draw.choice(FAULTS)(text, draw)
    return text


def _value(text: str, draw: random.Random) -> str:
    """Another value behind a colon."""
    places = [i for i, letter in enumerate(text) if letter == ":"]
    if not places:
        return draw.choice(VALUES)
    at = draw.choice(places)
    end = min((i for i in (text.find(mark, at) for mark in (",", "}", "\n")) if i > 0), default=len(text))
    return f"{text[: at + 1]} {draw.choice(VALUES)}{text[end:]}"


def _key(text: str, draw: random.Random) -> str:
    return text.replace(
        draw.choice(("model", "job", "run", "groups", "device", "nodes", "steps")), draw.choice(VALUES), 1
    )


def _line(text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    at = draw.randrange(len(lines) + 1)
    return "\n".join([*lines[:at], draw.choice([*VALUES, *lines]), *lines[at:]])


def _cut(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + text[at + draw.choice((0, 1, 5, 50, len(text))) :]


def _letter(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(":,[]{}&*!|>'\"%@`#-?\t\n\u0000\x07é𝄞") + text[at:]


def _aliases(text: str, draw: random.Random) -> str:
    return f"{text}\nextra:\n{aliases(draw.randrange(2, 12), form=draw.choice(('list', 'map', 'merge')))}\n"


FAULTS: tuple[Callable[[str, random.Random], str], ...] = (_value, _value, _value, _key, _line, _cut, _letter, _aliases)
