"""The models that are known by name, with their size and the longest sequence that they are made for.

Any other is given as a Hugging Face config.json, its folder, or pkg.mod:factory. --json has the config and its source.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ahp.cli.listing import Row, show_catalogue
from ahp.cli.options import options_of
from ahp.graph.catalogue import CATALOGUE
from ahp.optional import Flag
from ahp.words import count

OTHERS = "Any other: a Hugging Face config.json, the folder that it is in, or pkg.mod:factory for a module of your own."


@dataclass(frozen=True)
class Arguments:
    json: Flag = False
    """Print one JSON list, with each model's config and source."""


def run(argv: list[str]) -> int:
    """``ahp models``. Returns the exit code."""
    arguments = options_of(Arguments, argv, "ahp models", __doc__)
    rows = [{"name": name, **asdict(model)} for name, model in CATALOGUE.items()]
    show_catalogue(rows, [_cells(row) for row in rows], OTHERS, "ahp plan llama3-8b 8xH100", as_json=arguments.json)
    return 0


def _cells(row: Row) -> dict[str, str]:
    config = row["config"]

    def first(*keys: str) -> str:
        """GPT-2's config has names of its own; BERT's leaves its 512 positions to transformers' default."""
        return next((f"{config[key]:,}" for key in keys if key in config), "")

    experts = next(filter(None, map(config.get, ("num_local_experts", "num_experts", "n_routed_experts"))), None)
    return {
        "model": row["name"],
        "parameters": count(row["parameters"]),
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": first("hidden_size", "n_embd"),
        "experts": f"{config['num_experts_per_tok']} of {experts}" if experts else "",
        "context": first("max_position_embeddings", "n_positions"),
        "type": config["model_type"],
    }
