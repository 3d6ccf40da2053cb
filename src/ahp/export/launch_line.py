"""Reads a line that starts workers: how many nodes of how many workers, and which configuration it gives to which program.

It can be of torchrun, deepspeed, accelerate launch or srun, with #SBATCH lines above.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ahp.export.shell import arguments, directives
from ahp.export.table import Settings

NODES, EACH = "--nnodes", "--nproc-per-node"
"""torchrun's own arguments; the sizes of all launchers are kept under these names."""


@dataclass(frozen=True)
class Launched:
    """A program, and the configuration that a script gives it."""

    program: str
    """A name of ``reading.READERS``."""
    file: str | None
    """Its configuration as the script names it; None if the arguments have all of it."""
    settings: Settings
    """What the line sets over the file, under the program's own keys."""


def sizes(text: str, found: list[str]) -> Settings:
    """Nodes and workers of each, as far as the script has them. A launcher's own arguments win over the job manager's."""
    managed = directives(text)
    if "srun" in found:
        managed |= _short(found[found.index("srun") + 1 :])
    given = arguments(found)
    nodes = managed.get("--nodes", managed.get("-N"))
    each = managed.get("--gpus-per-node", _of_gres(managed.get("--gres"))) or managed.get("--ntasks-per-node")
    if "accelerate" in " ".join(found) and "--num-processes" in given:
        nodes = given.get("--num-machines", 1)
        each = _share(given["--num-processes"], nodes)
    elif any(word.rpartition("/")[2] == "deepspeed" for word in found):
        nodes, each = given.get("--num-nodes", nodes), given.get("--num-gpus", each)
    sized = {NODES: _known(given.get(NODES), nodes), EACH: _known(given.get(EACH), each)}
    return {key: value for key, value in sized.items() if value not in (None, True)}


def _known(own: object, managed: object) -> object:
    """torchrun's argument, or the manager's if torchrun's is missing or not a number."""
    return managed if managed is not None and not str(own).isdigit() else own


def launched(text: str, found: list[str]) -> Launched | None:
    """The program that a script starts; None for Megatron-LM's, or if it is not known."""
    given, line = arguments(found), " ".join(found)
    if re.search(r"maxtext", text, re.I) and any(word.endswith((".yml", ".yaml")) for word in found):
        pairs = (word.partition("=") for word in found if re.match(r"[a-z]\w*=", word))
        file = next(word for word in found if word.endswith((".yml", ".yaml")))
        return Launched("maxtext", file, {key: _plain(value) for key, _, value in pairs})
    if "torchtitan" in text and (file := given.get("--job.config-file", _variable(text, "CONFIG_FILE"))):
        own = {key[2:].replace("-", "_"): _plain(value) for key, value in given.items() if re.match(r"--\w+\.", key)}
        own.pop("job.config_file", None)
        return Launched("torchtitan", str(file), own)
    if re.search(r"accelerate(\.commands\.)?[ .]?launch", line):
        return Launched("accelerate", _text(given.get("--config-file")), _accelerate(given))
    if "run_train.py" in line and (file := _text(given.get("--config-file"))):
        return Launched("nanotron", file, {})
    file = _text(given.get("--deepspeed-config")) or _text(given.get("--deepspeed"))
    if file is not None and file.endswith(".json"):
        return Launched("deepspeed", file, {})
    return None


def _accelerate(given: Settings) -> Settings:
    """Arguments of accelerate launch (commands/launch.py) under the keys of its YAML."""
    kinds = {
        "--use-fsdp": "FSDP",
        "--use-deepspeed": "DEEPSPEED",
        "--use-megatron-lm": "MEGATRON_LM",
        "--multi-gpu": "MULTI_GPU",
    }
    kind = next((kind for key, kind in kinds.items() if given.get(key)), None)
    settings: Settings = {} if kind is None else {"distributed_type": kind}
    for key, value in given.items():
        name = key[2:].replace("-", "_")
        if name in ("num_processes", "num_machines", "mixed_precision"):
            settings[name] = _plain(value)
        elif name.startswith("fsdp_"):
            settings[f"fsdp_config.{name}"] = _plain(value)
        elif name.startswith("megatron_lm_"):
            settings[f"megatron_lm_config.{name}"] = _plain(value)
        elif name.startswith("parallelism_config_"):
            settings[f"parallelism_config.{name}"] = _plain(value)
    return settings


def _short(line: list[str]) -> Settings:
    """srun's arguments up to the program that it starts."""
    found: Settings = {}
    for at, word in enumerate(line):
        if word in ("-N", "--nodes") and at + 1 < len(line):
            found["--nodes"] = line[at + 1]
        elif re.match(r"-N\d+$", word):
            found["--nodes"] = word[2:]
        elif word.startswith("--") and "=" in word:
            key, _, value = word.partition("=")
            found[key] = value
        elif word in ("--ntasks-per-node", "--gpus-per-node", "--gres") and at + 1 < len(line):
            found[word] = line[at + 1]
        elif word.startswith(("python", "torchrun", "bash")):
            break
    return found


def _of_gres(value: object) -> str | None:
    """8 from ``gpu:8`` and from ``gpu:h100:8``."""
    found = re.match(r"gpu:(?:[\w-]+:)?(\d+)", str(value))
    return found[1] if found else None


def _share(total: object, nodes: object) -> object:
    if str(total).isdigit() and str(nodes).isdigit() and int(str(nodes)) and int(str(total)) % int(str(nodes)) == 0:
        return int(str(total)) // int(str(nodes))
    return None


def _variable(text: str, name: str) -> str | None:
    found = re.search(rf"\b{name}=(?:\$\{{{name}:-)?[\"']?([^\s\"'}}]+)", text)
    return found[1] if found else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain(value: object) -> object:
    """A word of a line as YAML reads it: a number, true, text. An argument without a value is true."""
    if not isinstance(value, str):
        return value
    from ahp.yaml_text import NotYaml, parse_yaml

    try:
        found = parse_yaml(value)
    except NotYaml:
        return value
    return found if isinstance(found, (int, float, bool)) else value
