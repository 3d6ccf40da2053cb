"""Compares a plan with one device, number by number: the same steps run in plain PyTorch in one process."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ahp.engines.ahp import held_in_8_bits
from ahp.errors import HardwareMismatch, bad_input
from ahp.graph.blocks import find_blocks
from ahp.graph.call import Documents, call_model, logits_of, model_arguments
from ahp.graph.document_mask import documents_apart
from ahp.graph.lora import with_adapters
from ahp.graph.models import build_model, is_masked
from ahp.job import Optimizer
from ahp.plan import Plan
from ahp.runtime.check import rehearsal
from ahp.runtime.compute.fp8 import Fp8, refuse_without_torchao
from ahp.runtime.experts.balance_loss import balance_of
from ahp.runtime.optimizer.adamw import matrices_of
from ahp.runtime.optimizer.eight_bit import EightBitAdamW
from ahp.runtime.optimizer.learning_rate import learning_rate
from ahp.runtime.pipeline.schedules import Inputs, split_rows
from ahp.runtime.ranks.device import choose_device
from ahp.runtime.run.worker import end_process
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
from ahp.runtime.torch_compat import with_weights
from ahp.runtime.weights.allocate import hold_in
from ahp.words import gib, number_of

TOLERANCES: dict[str, tuple[float, float]] = {
    "fp32": (1e-5, 1e-4),
    "bf16": (2e-3, 1e-2),
    "fp16": (5e-4, 2.5e-3),
    "fp8": (2e-2, 5e-2),
}
"""Largest relative difference at the first and at the last step. bf16 has 8 significant bits: half a unit in the last
place is 2e-3, and a layout adds up in another order than one device; five times that at the last step. fp16 has 11 bits.
fp8 has 4: half a unit is 6e-2 of one number; layouts differ in the bf16 roundings before it, and sums even these out."""

STATE_BYTES = 20
"""Most bytes per parameter in one process: fp32 weight, gradient, two moments, and a copy while it is sliced."""


@dataclass(frozen=True)
class Comparison:
    """One step of the plan and of one device."""

    step: int
    loss: float
    loss_one_device: float
    grad_norm: float
    grad_norm_one_device: float
    tolerance: float

    @property
    def difference(self) -> float:
        """The larger of the two relative differences."""
        of_loss = abs(self.loss - self.loss_one_device) / abs(self.loss_one_device)
        if not (math.isfinite(self.grad_norm) or math.isfinite(self.grad_norm_one_device)):
            return of_loss  # both left out a step that overflowed fp16
        return max(of_loss, abs(self.grad_norm - self.grad_norm_one_device) / abs(self.grad_norm_one_device))

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance


def verify(plan: Plan, *, steps: int = 10, say: Callable[[str], None] = lambda text: None) -> list[Comparison]:
    """Run ``plan`` on workers of this machine and the same job on one process, from the same weights on the same batches.

    Uses the job's optimizer, clipping, precision and global batch. The tokens are random, with a different number of scored
    tokens in each sequence. Raises HardwareMismatch if this machine has no room for it.
    """
    if steps < 1:
        raise bad_input("steps", steps, "must be at least 1")
    _refuse_too_large(plan)
    num_workers = plan.parallelism.world_size
    say(
        f"running {number_of(steps, 'step')} of random tokens on {number_of(num_workers, 'worker')}: {plan.parallelism.short()}"
    )
    found = json.loads(rehearsal.on_workers("ahp.runtime.check.verify", plan, choose_device(num_workers), str(steps)))
    say("running the same steps on one process")
    expected = list(one_device(plan, steps))
    first, last = TOLERANCES[plan.job.precision]
    return [
        Comparison(
            step + 1, loss, expected_loss, norm, expected_norm, first + (last - first) * step / max(1, steps - 1)
        )
        for step, ((loss, norm), (expected_loss, expected_norm)) in enumerate(zip(found, expected, strict=True))
    ]


def one_device(plan: Plan, steps: int) -> Iterator[tuple[float, float]]:
    """Loss and pre-clip gradient norm of each step in plain PyTorch: the module, its optimizer, clipping by the norm.

    The global batch is processed in micro-batches, each weighted by its scored tokens, to save memory.
    """
    job, settings = plan.job, plan.job.optimizer
    model = with_adapters(rehearsal.model(plan), job.lora, seed=job.seed)
    if job.dtype != "fp32":
        hold_in(model, COMPUTE_DTYPE[job.dtype])
    if job.precision == "fp8":
        refuse_without_torchao()
        for block in find_blocks(model).blocks:
            Fp8().convert(block)
    optimizers = plain_optimizers(model, settings)
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    causal = not is_masked(model)
    documents = documents_apart(model, job.sequence_length) if job.document_mask else None
    for step in range(steps):
        data = rehearsal.batch(plan, step, rehearsal.vocabulary(model))
        targets = F.pad(data["labels"][:, 1:], (0, 1), value=-100) if causal else data["labels"]
        scored = (targets != -100).sum()
        total = 0.0
        size = plan.parallelism.micro_batch_size
        inputs = {key: value for key, value in data.items() if key != "labels"}
        for part, wanted in split_rows(inputs, targets, size):
            logits, balance = _outputs(model, part, documents, COMPUTE_DTYPE[job.precision])
            of_tokens = F.cross_entropy(
                logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="sum"
            )
            loss = of_tokens / scored + balance * len(wanted) / len(targets)
            scaler.scale(loss).backward()
            total += loss.item()
        limit = settings.grad_clip if settings.grad_clip is not None else float("inf")
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = _norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, job.steps)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        yield total, norm.item()


def _norm(model: nn.Module) -> torch.Tensor:
    """The norm of all gradients, float32 scalar. In float64: ``clip_grad_norm_`` adds up in float32, on a CPU element by element, and the norm
    of one embedding of 4e7 weights comes out 0.3 % too small."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def plain_optimizers(model: nn.Module, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """torch's own optimizers on a whole model, as the settings mean them; for 8-bit moments the runtime's, on whole weights."""
    names = matrices_of(model, settings)
    if settings.name == "adamw8bit":
        in_8_bits = {n: p for n, p in model.named_parameters() if p.requires_grad and held_in_8_bits(tuple(p.shape))}
        others = [p for n, p in model.named_parameters() if n not in in_8_bits]
        return [*_adamw(others, settings), WholeEightBit(in_8_bits, settings)]
    matrices = [p for name, p in model.named_parameters() if name in names]
    found = _adamw([p for name, p in model.named_parameters() if name not in names], settings)
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        found.append(muon)
    return found


def _adamw(parameters: list[nn.Parameter], settings: Optimizer) -> list[torch.optim.Optimizer]:
    vectors = [p for p in parameters if p.ndim < 2 and not settings.decay_norms_and_biases]
    kept = {id(p) for p in vectors}
    groups = [
        {"params": [p for p in parameters if id(p) not in kept], "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # The fused kernel computes in fp32 and rounds once; torch's default on a CPU rounds to the weights' 16 bits after each operator.
    fused = any(p.dtype is torch.bfloat16 for p in parameters)
    return [torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=fused or None)]


class WholeEightBit(torch.optim.Optimizer):
    """``EightBitAdamW`` on whole weights, with the interface that a single-process loop calls."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Optimizer) -> None:
        super().__init__(list(parameters.values()) or [nn.Parameter(torch.zeros(1))], {"lr": settings.learning_rate})
        self.inner = EightBitAdamW(parameters, dict.fromkeys(parameters, settings.weight_decay), settings)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(self.param_groups[0]["lr"], None)


def _outputs(
    model: nn.Module, inputs: Inputs, documents: Documents | None, dtype: torch.dtype
) -> tuple[torch.Tensor, Any]:
    """Logits, and the weighted balance loss if the model's config asks for one, as transformers computes it (else 0).

    Weights are cast to ``dtype`` on their way in: fp32 masters receive the gradients.
    """
    cast = {name: p.to(dtype) for name, p in model.named_parameters() if p.dtype is not dtype}
    with with_weights(model, cast) if cast else nullcontext():
        if (balance := balance_of(model)) is None:
            return logits_of(call_model(model, **inputs, documents=documents)), 0.0
        args, kwargs = model_arguments(model, **inputs, documents=documents)
        output = model(*args, **{**kwargs, "output_router_logits": True})
        return logits_of(output), balance.coefficient * output.aux_loss


def _refuse_too_large(plan: Plan) -> None:
    import psutil

    parameters = sum(p.numel() for p in build_model(plan.model, device="meta").parameters())
    needed = parameters * STATE_BYTES * plan.parallelism.world_size
    free = psutil.virtual_memory().available
    if needed > free:
        raise HardwareMismatch(
            f"world size {plan.parallelism.world_size}: verifying needs about {gib(needed)} on this machine, which has "
            f"{gib(free)} free; verify the same layout on a smaller model (fewer layers, smaller widths)"
        )


def main(argv: list[str]) -> int:
    """One rank: ``python -m ahp.runtime.check.verify FOLDER DEVICE STEPS`` under the launcher's variables."""
    with rehearsal.as_rank(argv) as (plan, ranks, answer):
        parallel, tokens = rehearsal.parallel_model(plan, ranks.device, on_any_device=True)
        results = [parallel.step(parallel.shard(rehearsal.batch(plan, step, tokens))) for step in range(int(argv[2]))]
        answer(json.dumps([(result.loss, result.grad_norm) for result in results]))
    return 0


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
