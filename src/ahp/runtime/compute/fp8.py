"""The linear layers of blocks in 8 bits (``precision: fp8``): which layers they are, and what a device must have for it.

Everything else computes in bf16: embedding, head, norms, attention, routers, stacked experts, and linear layers with a
dim that is no multiple of 16. The layers are chosen on the whole model, so they are the same under every plan.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from ahp.about import install_extra
from ahp.cluster.plain_groups import plain_groups
from ahp.engines.ahp import FP8_MULTIPLE
from ahp.errors import BadInput, HardwareMismatch, bad_input
from ahp.graph.blocks import BlockList
from ahp.graph.capture import Capture
from ahp.graph.experts import num_stacked
from ahp.graph.outline import Outline
from ahp.plan import Plan
from ahp.search.slicing.model import ModelSlicing
from ahp.search.slicing.placement import Split, Strategy, tensor_inputs

if TYPE_CHECKING:
    import torch.distributed as dist

    from ahp.runtime.compute.fp8_product import Product
    from ahp.runtime.pipeline.weight_gradients import WeightGradients

CAPABILITY = (8, 9)
"""Ada and Hopper are the first GPUs with products in 8 bits (the error of torch._scaled_mm says so)."""
OTHERS = "valid: bf16, fp32"
NOTHING = (False, False, False)

aten = torch.ops.aten


def refuse_without_fp8(plan: Plan, device: str) -> None:
    """Raise BadInput if torchao is missing, HardwareMismatch if a device that the plan is for has no products in 8 bits.

    ``device``: ``cpu`` or ``cuda``. Starts nothing on a GPU; ``refuse_device`` checks a worker's own GPU.
    """
    if plan.job.precision != "fp8":
        return
    if device == "cpu":
        raise HardwareMismatch(f"job.precision = 'fp8': processor cores have no products in 8 bits ({OTHERS})")
    for group in plain_groups(plan.cluster):
        if "fp8" not in group["device"]["peak_flops_per_s"]:
            raise HardwareMismatch(
                f"job.precision = 'fp8': {group['device']['name']} has no products in 8 bits ({OTHERS})"
            )
    refuse_without_torchao()


def refuse_without_torchao() -> None:
    """Raise BadInput if torchao is missing: its casts and products are used."""
    if importlib.util.find_spec("torchao") is None:
        raise BadInput(f"job.precision = 'fp8': torchao is not installed; {install_extra('fp8')} ({OTHERS})")


def refuse_device(device: torch.device) -> None:
    """On a worker: raise HardwareMismatch unless its GPU computes in 8 bits."""
    if device.type != "cuda":
        raise HardwareMismatch(f"job.precision = 'fp8': device {device} has no products in 8 bits ({OTHERS})")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name, wanted = torch.cuda.get_device_name(device), ".".join(map(str, CAPABILITY))
        raise HardwareMismatch(
            f"job.precision = 'fp8': needs compute capability {wanted}, and {name} has {found[0]}.{found[1]} ({OTHERS})"
        )


class Fp8:
    """How the blocks of one stage compute their linear layers in 8 bits."""

    def __init__(self, tokens: tuple[dist.ProcessGroup, ...] = (), later: WeightGradients | None = None) -> None:
        """``tokens``: groups whose ranks share the tokens of a micro-batch; ``later``: see ``Product``."""
        self.tokens, self.later = tokens, later

    def product(
        self, *, transposed: bool, tensor: dist.ProcessGroup | None = None, shared: tuple[bool, bool, bool] = NOTHING
    ) -> Product:
        """A product with a weight. ``shared``: whether the ranks of ``tensor`` have parts of x, of the weight, of the output."""
        from ahp.runtime.compute.fp8_product import Parts, Product

        x, weight, output = ((tensor,) if tensor is not None and part else () for part in shared)
        return Product(transposed, Parts(self.tokens + x, weight, self.tokens + output), self.later)

    def convert(self, block: nn.Module) -> None:
        """Make the linear layers of a block that is not sliced compute in 8 bits, in place. To be called before it is compiled."""
        for name, transposed in linear_weights(block).items():
            module = block.get_submodule(name.rpartition(".")[0])
            forward = _forward_by(self.product(transposed=transposed))
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _forward_by(product: Product) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A method, because torch.compile then shares one graph between modules; it would compile a ``partial`` again for each."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        bias: Any = module.bias
        return product(x, weight, bias)

    return forward


class InGraph:
    """``Fp8`` for a block that runs as its traced graph, of which each rank has a part."""

    def __init__(self, fp8: Fp8, block: nn.Module) -> None:
        """``block``: the whole block; a copy without memory is enough."""
        self.fp8 = fp8
        self.weights = linear_weights(block)

    def product(self, capture: Capture, node: Node, strategy: Strategy, group: dist.ProcessGroup) -> Product | None:
        """The product in 8 bits for a call of the graph; None if the call is no product with such a weight."""
        if node.target not in (aten.linear.default, aten.addmm.default):
            return None
        of_linear = node.target is aten.linear.default
        x, weight = (0, 1) if of_linear else (1, 2)  # places among its input tensors
        names = {weight: name for name, weight in capture.weight_nodes().items()}
        transposed = self.weights.get(names.get(tensor_inputs(node)[weight], ""))
        if transposed is None:
            return None
        assert transposed == of_linear, f"{node.format_node()}: the weight lies the other way"
        # A row-split product gives a summand on every rank: the gradient of the sum is whole.
        output = isinstance(strategy.output, Split) and not strategy.adds_bias_after_sum
        shared = isinstance(strategy.inputs[x], Split), isinstance(strategy.inputs[weight], Split), output
        return self.fp8.product(transposed=transposed, tensor=group, shared=shared)


def linear_weights(block: nn.Module) -> dict[str, bool]:
    """The weights of a whole block that are multiplied in 8 bits, and whether they are [N, K] (nn.Linear) or [K, N].

    A layer with as many outputs as the block has experts is a router, and not among them.
    """
    from transformers.pytorch_utils import Conv1D

    experts = {num_stacked(module) for module in block.modules()}
    found: dict[str, bool] = {}
    for path, module in block.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or not path:
            continue
        transposed = type(module) is nn.Linear
        shape = tuple(module.weight.shape)  # type: ignore[union-attr]
        outputs = shape[0 if transposed else 1]
        if not any(size % FP8_MULTIPLE for size in shape) and outputs not in experts:
            found[f"{path}.weight"] = transposed
    return found


def check_linear(blocks: BlockList | None) -> None:
    """Raise BadInput for a model in which nothing would be computed in 8 bits."""
    if not any(linear_weights(block) for block in (blocks.blocks if blocks else ())):
        what = "no linear layer whose dims are multiples of 16" if blocks else "no blocks"
        raise BadInput(f"job.precision = 'fp8': the model has {what} to compute in 8 bits ({OTHERS})")


def check_parts(module: nn.Module, found: Outline, sliced: ModelSlicing, degree: int) -> None:
    """Raise BadInput if tensor parallelism would cut a weight into parts too narrow for a product in 8 bits."""
    blocks = dict(module.get_submodule(found.blocks_path).named_children())
    for kind, solution in enumerate(sliced.blocks):
        number = found.kinds.index(kind)
        block = blocks[str(number)]
        for name in linear_weights(block):
            placed, shape = solution.weights.get(name), tuple(block.get_parameter(name).shape)
            if isinstance(placed, Split) and shape[placed.dim] % (degree * FP8_MULTIPLE):
                size = shape[placed.dim]
                valid = [d for d in range(1, degree) if size % (d * FP8_MULTIPLE) == 0]
                rule = (
                    f"would cut {found.blocks_path}.{number}.{name} {list(shape)} into parts of {size / degree:g}, and with "
                    f"job.precision 'fp8' they must be multiples of {FP8_MULTIPLE}"
                )
                raise bad_input("tensor_parallel_degree", degree, rule, valid)
