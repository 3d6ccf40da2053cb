"""Text from the newest checkpoint of a run."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Annotated

import tyro

from ahp.cli.following import next_words
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.errors import bad_input
from ahp.optional import Flag
from ahp.report.tables import console


@dataclass(frozen=True)
class Arguments:
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run's folder, such as runs/demo."""
    prompt: str = ""
    """What the text begins with; empty = a new document."""
    max_new_tokens: int = 120
    temperature: float = 0.8
    """0 = the likeliest token each time."""
    seed: int = 0
    """The same seed gives the same text."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp generate RUN``. Returns the exit code; raises AhpError."""
    arguments = options_of(Arguments, argv, "ahp generate", __doc__)
    if arguments.seed < 0:
        raise bad_input("seed", arguments.seed, "must be 0 or above")
    from ahp.runtime.run.generate import Sampling, generate

    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed)
    text = generate(arguments.run, arguments.prompt, sampling)
    after = f"ahp report {shlex.quote(arguments.run)}"
    if arguments.json:
        print_alone(json.dumps({"run": arguments.run, "prompt": arguments.prompt, "text": text, "next": [after]}))
        return 0
    print(text)
    prompt = ["--prompt", arguments.prompt] if arguments.prompt else []
    again = shlex.join(["ahp", "generate", arguments.run, *prompt, "--seed", str(arguments.seed + 1)])
    print(f"\n{next_words([after, again], console().width)}")
    return 0
