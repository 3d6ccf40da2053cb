"""Generates text from a trained model, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ahp.errors import AhpError, BadInput, OtherJob, bad_input
from ahp.graph.call import call_model, logits_of
from ahp.graph.models import is_masked, load_config
from ahp.plan import Plan
from ahp.runtime.data.tokenizer import end_of_text
from ahp.runtime.run import exported
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.same_job import check_same_job

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 120
    temperature: float = 0.8
    """0 takes the likeliest token; 1 draws from the model's own distribution."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise bad_input("max_new_tokens", self.max_new_tokens, "must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise bad_input("temperature", self.temperature, "must be 0 (the likeliest token) or above")


def generate(folder: str | Path, prompt: str = "", sampling: Sampling | None = None) -> str:
    """Continue ``prompt`` with the newest weights of a run; an empty prompt begins a new document.

    The same seed gives the same text. Raises BadInput when the folder holds no run, or a run without a checkpoint.
    """
    run = RunFolder(folder)
    if not run.plan_file.is_file():
        why = "it is a file" if run.path.is_file() else "it holds no plan.yaml"
        raise BadInput(f"run = {str(run.path)!r}: no run's folder: {why}; start one with: ahp train")
    plan = Plan.load(run.plan_file)
    _refuse_other_plan(run, plan)
    module, tokenizer = exported.load(exported.newest(run, plan), plan)
    if is_masked(module):
        raise BadInput(f"run = {str(run.path)!r}: a masked language model fills in words, it does not continue a text")
    return continue_text(module, tokenizer, prompt, sampling or Sampling(), longest_context(plan))


def _refuse_other_plan(run: RunFolder, plan: Plan) -> None:
    """Raises BadInput if plan.yaml describes another model or job than the run's newest checkpoint."""
    try:
        if run.checkpoints():
            check_same_job(run, plan, extend=True)
    except OtherJob as error:
        raise BadInput(f"{run.plan_file} has changed since it was written: {error}") from None


def continue_text(
    module: nn.Module, tokenizer: Tokenizer, prompt: str, sampling: Sampling, longest: int | None = None
) -> str:
    """The prompt and what the model writes after it, up to the end of the document or ``max_new_tokens``.

    Nothing is cached between tokens, so any module works whose output is logits [B, S, V] or contains them (``logits_of``);
    the context is cut to its last ``longest`` tokens.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(sampling.seed)
    end = end_of_text(tokenizer)
    ids = [end, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    first = len(ids)
    with torch.inference_mode():
        for _ in range(sampling.max_new_tokens):
            context = torch.tensor([ids[-longest:] if longest else ids], device=device)
            token = _choose(_next_logits(module, context), sampling.temperature, generator)
            if token == end:
                break
            ids.append(token)
    return prompt + tokenizer.decode(ids[first:], skip_special_tokens=False)


def longest_context(plan: Plan) -> int | None:
    """The longest context of a run's model in tokens; None if it has no limit.

    A user's own module does not declare its number of positions: only the length that it was trained on is known to work.
    """
    config = load_config(plan.model)
    return plan.job.sequence_length if config is None else getattr(config, "max_position_embeddings", None)


def _next_logits(module: nn.Module, context: Tensor) -> Tensor:
    """Logits [V] of the token after the context [1, S]. Raises BadInput if the module cannot be called like this."""
    try:
        return logits_of(call_model(module, context))[0, -1].float().cpu()
    except AhpError:
        raise
    except Exception as error:  # whatever the user's own module raises
        problem = f"{type(error).__name__}: {error}"
        raise BadInput(
            f"model: its forward failed on {context.shape[1]} tokens in evaluation mode ({problem})"
        ) from error


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
