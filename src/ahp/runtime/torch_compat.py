"""All use of private PyTorch, so that a new release breaks one file. Written for 2.11 to 2.15.

``ahp.graph``, ``ahp.runtime.ranks`` and ``ahp.runtime.pipeline`` have a ``torch_compat`` of their own. Operators (``torch.ops``,
``torch._ops.OpOverload``) are used directly."""

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import _disable_current_modes

from ahp.errors import BadInput, first_line
from ahp.graph.torch_compat import FakeTensor as FakeTensor
from ahp.graph.torch_compat import FakeTensorMode as FakeTensorMode
from ahp.graph.torch_compat import TorchDispatchMode as TorchDispatchMode
from ahp.graph.torch_compat import memory_of as memory_of
from ahp.graph.torch_compat import pytree as pytree
from ahp.graph.torch_compat import sets_gradient_mode as sets_gradient_mode
from ahp.graph.two_types import is_of_two_types


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory; outside autograd. ``to_local`` would make a new view at each call."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like_distributed(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is distributed like ``like``."""
    if not isinstance(like, DTensor):
        return local
    return DTensor(local, like._spec, requires_grad=False)


def refuse_outside(ids: torch.Tensor, size: int, ignored: int | None = None) -> None:
    """Raises IndexError for an id outside of a table of ``size`` rows that is split over ranks. The whole table would refuse it, but each rank
    takes it for another rank's row. On a GPU the kernel asserts, as torch's own kernels do; the host does not wait."""
    bad = (ids < 0) | (ids >= size)
    if ignored is not None:
        bad &= ids != ignored
    if ids.is_cuda:
        torch._assert_async(~bad.any(), f"token id or label outside of the vocabulary of {size}")
    elif bad.any():
        ignoring = "" if ignored is None else f", or {ignored}, which is not scored"
        raise IndexError(
            f"token id or label = {int(ids[bad][0])}: the vocabulary has {size} tokens (valid: 0 to {size - 1}{ignoring})"
        )


def sum_gradients(module: FSDPModule, on_reduced: Callable[[torch.Tensor, bool], None] | None) -> None:
    """Make a sharded module add gradients up, never average them; then hand each reduced buffer to ``on_reduced``, and whether FSDP2 will add it
    to an earlier one of this step at once (of a block that is called twice).

    Any other divide factor needs a pre-multiplied sum, which gloo does not have.
    """
    for group in _parameter_groups(module):
        if group._reduce_scatter_process_group.size() > 1 or group._is_hsdp:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if on_reduced is not None:
            module.set_all_reduce_hook(_reduced(on_reduced, group))


def _reduced(on_reduced: Callable[[torch.Tensor, bool], None], group: Any) -> Callable[[torch.Tensor], None]:
    return lambda buffer: on_reduced(buffer, any(p.sharded_param.grad is not None for p in group.fsdp_params))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def reduce_every_gradient(module: FSDPModule, given: set[int], zeros: set[int]) -> None:
    """Make a sharded module reduce a gradient for each trainable parameter: zeros if this rank's data gave it none.

    FSDP2 sends only the gradients that exist: ranks with different ones would add up different parameters, or fail in the backend. ``given``,
    ``zeros``: collect the ``id`` of each parameter that had a gradient, and of each that got zeros. (``set_reduce_scatter_unused_params`` of
    2.13 does not report them.)
    """
    for group in _parameter_groups(module):
        group.post_backward = _with_every_gradient(group, group.post_backward, given, zeros)


def _with_every_gradient(group: Any, own: Callable[..., None], given: set[int], zeros: set[int]) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        # Once per backward: the root calls this again at its end.
        if group.reduce_grads and group._training_state.name != "POST_BACKWARD":
            held = [p for p in group.fsdp_params if getattr(p, "_unsharded_param", None) is not None]
            accumulated = not AUTOGRAD_ADDS_UP and any(p.unsharded_accumulated_grad is not None for p in held)
            for p in held:
                if p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None:
                    given.add(id(p.sharded_param))
                elif p._unsharded_param.requires_grad:
                    zeros.add(id(p.sharded_param))
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param, dtype=p._unsharded_param.grad_dtype)
                if accumulated:  # so that all gradients have one dtype
                    _accumulate(p)
            if group._orig_dtype is None:  # nothing of it was trained at its first step, when FSDP2 looks at types
                group._init_mp_dtypes()
        own(*unused)

    return post_backward


def pass_through(module: FSDPModule, x: torch.Tensor) -> torch.Tensor:
    """``x`` as if a sharded module had been called that returns its input: weights are gathered, and gradients of zeros are sent in backward,
    where those of any other call would be."""
    assert isinstance(module, nn.Module), "a sharded module is one"
    groups = _parameter_groups(module)
    for group in groups:
        (x,), _ = group.pre_forward(module, (x,), {})
    for group in groups:
        x = group.post_forward(module, (x,), x)
    if torch.is_grad_enabled() and not x.requires_grad and any(p.requires_grad for p in module.parameters()):
        x = x.detach().requires_grad_()  # as what trained weights make of it
    return module._get_fsdp_state()._register_pre_backward_hook(x)


def why_fsdp2_refused(error: RuntimeError) -> Literal["not gathered", "written in place", "two types"] | None:
    """What a forward does that torch refuses under FSDP2 alone; None for any other error."""
    if is_of_two_types(error):
        return "two types"
    if "mixed torch.Tensor and DTensor" in str(error):
        return "not gathered"
    # What dynamo says, which traces FSDP2's views as views of its own.
    compiled = "AsStrided is a view and is being modified inplace" in str(error)
    return "written in place" if compiled or "RegisterPostBackwardFunction" in str(error) else None


def forget_backward(root: FSDPModule) -> None:
    """Reset a sharded model to before a forward or backward that raised. Raises BadInput if torch cannot (before 2.13)."""
    if not hasattr(root, "reset_iter_state"):
        raise BadInput(
            f"step: the step before raised, and torch {torch.__version__} cannot go on after it; call ahp.parallelize again, and load a checkpoint"
        )
    if root._get_fsdp_state()._is_root is None:  # nothing has run
        return
    root.reset_iter_state()
    assert isinstance(root, nn.Module), "a sharded module is one"
    for parameter in _sharded_parameters(root):
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            whole.grad = None
            if not AUTOGRAD_ADDS_UP:
                parameter.unsharded_accumulated_grad = None


def _sharded_parameters(root: nn.Module) -> Iterator[Any]:
    """FSDP2's own records (``FSDPParam``) of the parameters."""
    for module in root.modules():
        for group in _parameter_groups(module) if isinstance(module, FSDPModule) else ():
            yield from group.fsdp_params


def whole_parameters(root: FSDPModule) -> set[int]:
    """The ``id`` of each whole parameter that FSDP2 puts into the place of a shard."""
    assert isinstance(root, nn.Module), "a sharded module is one"
    return {id(getattr(parameter, "_unsharded_param", None)) for parameter in _sharded_parameters(root)}


def gather_outside_modes(module: FSDPModule) -> None:
    """Hide what a sharded module does around its forward from the mode with which selective recompute watches operators.

    For a module inside of a recomputed block: in the second run FSDP2 takes it for the root, and runs more operators than in the first run,
    where weights are gathered already. From 2.13 on recompute takes that for another computation.
    """
    state: Any = module._get_fsdp_state()
    state._root_pre_forward = _outside(state._root_pre_forward)
    for group in _parameter_groups(module):
        group.pre_forward, group.post_forward = _outside(group.pre_forward), _outside(group.post_forward)


def _outside(run: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with outside_modes():
            return run(*args, **kwargs)

    return outside


AUTOGRAD_ADDS_UP = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
"""From torch 2.15 on: adding a second gradient puts a weight's own ``grad`` into the reduction's dtype, and FSDP2 keeps no other sum."""


def accumulate_in_reduce_dtype(root: nn.Module) -> None:
    """Add gradients made outside of FSDP2's backward to the sums that FSDP2 keeps for the reduction, in fp32."""
    if AUTOGRAD_ADDS_UP:
        return
    for parameter in _sharded_parameters(root):
        _accumulate(parameter)


def _accumulate(parameter: Any) -> None:
    # A later forward may have freed the whole weight, so the gradient is read from the private tensor, as FSDP2 does.
    gradient = parameter._unsharded_param.grad
    if gradient is None or parameter.reduce_dtype in (None, gradient.dtype):
        return
    parameter._unsharded_param.grad = None
    if parameter.unsharded_accumulated_grad is None:
        parameter.unsharded_accumulated_grad = gradient.to(parameter.reduce_dtype)
    else:
        parameter.unsharded_accumulated_grad += gradient


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool, scale: float
) -> Literal["cudnn", "flash", "efficient", "math"]:
    """The kernel that scaled_dot_product_attention picks on a GPU, forward and backward (ATen/native/transformers/cuda/sdp_utils.cpp)."""
    with torch.enable_grad():  # for some head widths a kernel has a forward and no backward
        asked = q.detach().requires_grad_()
        found = torch._fused_sdp_choice(asked, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True)
    names: dict[int, Literal["cudnn", "flash", "efficient"]] = {
        SDPBackend.CUDNN_ATTENTION.value: "cudnn",
        SDPBackend.FLASH_ATTENTION.value: "flash",
        SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    }
    return names.get(found, "math")


gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group): the ranks' inputs, joined along dim 0. 2.13 renamed it, and warns about the old name."""
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group): this rank's rows of the sum of the ranks' inputs."""


def attention_of_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    window: tuple[int | None, int | None],
    scale: float | None,
) -> torch.Tensor:
    """FlashAttention over sequences of different lengths, on a GPU. q [tokens, H, D], k and v [tokens, G, D], one sequence after the other;
    ``bounds`` int32 [sequences + 1]: where sequences begin and end. ``window``: how many tokens before and after itself a token sees, None = all.

    torch.nn.attention.varlen calls the same operator, with different arguments in each release.
    """
    before, after = window
    causal = before is None and after == 0
    left, right = (None, None) if causal else (-1 if before is None else before, -1 if after is None else after)
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory without values, and move real tensors to the device. Tied parameters come apart."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values brought near 1, in bf16, exactly as ``torch.optim.Muon`` does it by default."""
    return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)


@contextmanager
def recordable_trunc_normal() -> Iterator[None]:
    """Within, ``trunc_normal_`` is a chain of operators that read no values, on the meta device too: the quantile of a uniform number.

    From 2.13 on torch's own does nothing on the meta device, and on real memory redraws values outside of the bounds.
    """
    own = nn.init._no_grad_trunc_normal_

    def quantile(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        low, high = (math.erf((end - mean) / std / 2**0.5) for end in (a, b))
        with torch.no_grad():
            return tensor.uniform_(low, high).erfinv_().mul_(std * 2**0.5).add_(mean).clamp_(a, b)

    nn.init._no_grad_trunc_normal_ = quantile
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = own


def outside_modes() -> AbstractContextManager[object]:
    """Within, operators run as they are, unseen by dispatch modes such as that of selective recompute."""
    return _disable_current_modes()


def forget_own_hooks(module: nn.Module) -> None:
    """Remove the hooks on the module itself; those on its submodules stay."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        hooks.clear()


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether this tensor has a hook on its gradient, run before or after it is added to ``grad``."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def with_weights(module: nn.Module, weights: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Within, the module computes with these weights; tied parameters stay tied. The public functional_call is no context manager."""
    return _reparametrize_module(module, weights, tie_weights=True)


def forget_meshes() -> None:
    """Empty DTensor's caches, whose keys keep every mesh that was ever used alive, with its process groups and their threads.

    For a process that drops a layout and goes on: under gloo each group's three threads wake a hundred times a second.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    caches = [
        propagator.propagate_op_sharding,
        getattr(type(propagator), "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
        _collective_utils.MeshTopoInfo.build_from_mesh,  # used from 2.15 on
    ]
    for cache in (one for one in caches if hasattr(one, "cache_clear")):
        cache.cache_clear()
    for clear in (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
    ):
        if clear is not None:
            clear()
    # Before 2.13 the arguments of every sharding rule that ran stay alive (pytorch/pytorch#181792), and their mesh with them.
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        for mesh in (one for one in gc.get_objects() if type(one) is DeviceMesh):
            mesh._pg_registry = {
                name: group for name, group in mesh._pg_registry.items() if group in distributed_c10d._world.pg_map
            }


def why_graph_broke(error: Exception) -> str | None:
    """Why torch.compile could not make one whole graph, in its own words; None for any other error."""
    from torch._dynamo.exc import (  # a second of imports
        FailOnRecompileLimitHit,
        UncapturedHigherOrderOpError,
        Unsupported,
        UserError,
    )

    if isinstance(error, FailOnRecompileLimitHit):  # its own message is "Hard failure due to fullgraph=True"
        return f"torch.compile has made {MOST_GRAPHS} graphs of it, for sequences of other lengths or other trained weights, and makes no more"
    if isinstance(error, UserError) and "data-dependent" in str(error):
        return f"its Python code reads a number that is known only when it runs ({first_line(error)})"
    # torch itself goes on with another graph at each of these, if it may
    broke = isinstance(error, (Unsupported, UncapturedHigherOrderOpError, UserError))
    return first_line(error) if broke else None


MOST_GRAPHS = 256
"""The most graphs that torch.compile makes of one code object, over all its users. One forward that many blocks run needs a graph for each kind of
block, each choice of trained weights and each sequence length, and one more of each without gradients."""


def allow_graphs() -> None:
    """Let torch.compile make ``MOST_GRAPHS`` of one code object. By default the ninth is an error under ``fullgraph``, else runs uncompiled."""
    from torch._dynamo import config  # a second of imports

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)


MEMORY_EVENTS = 100_000
"""How many of the newest events a GPU's memory history keeps, as in torchtitan (tools/profiling.py): some hundred MB at most."""


def begin_memory_history(device: torch.device) -> None:
    """Start recording allocations and frees on a GPU, with their stacks; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python", device=device)


def end_memory_history(device: torch.device, file: Path) -> None:
    """Write the recorded history, for pytorch.org/memory_viz, and stop; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)


def norms_of(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """fp32: the Euclidean norm of each tensor, many in one kernel, as ``torch.nn.utils.get_total_norm`` takes it."""
    return tuple(torch._foreach_norm(tensors, 2.0, dtype=torch.float32))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors in place by a scalar on their device, many in one kernel."""
    torch._foreach_mul_(tensors, factor)


def leave_out_update(optimizer: torch.optim.Optimizer, leave_out: torch.Tensor | None) -> None:
    """Make the next steps of a fused optimizer change nothing if ``leave_out``, a bool scalar on its device, is true: sets the attribute
    that ``torch.amp.GradScaler`` sets on optimizers that read it themselves."""
    optimizer.found_inf = None if leave_out is None else leave_out.float()  # type: ignore[attr-defined]


def update_loss_scale_(
    scale: torch.Tensor,
    good_steps: torch.Tensor,
    overflowed: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """``torch.amp.GradScaler``'s rule, on the device: float32 scale, int32 number of steps, float32 0 or 1."""
    torch._amp_update_scale_(scale, good_steps, overflowed, growth, backoff, interval)


def within_checkpoint(graph: GraphModule, contexts: Callable[[], Any] | None = None) -> GraphModule:
    """A torch.compile graph wrapped as if its source had been called by ``checkpoint``, with this ``context_fn`` or none."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    outer = Graph()
    inputs = [outer.node_copy(node) for node in graph.graph.find_nodes(op="placeholder")]
    called = outer.call_function(tag_activation_checkpoint, (outer.get_attr("body"), *inputs), {"use_reentrant": False})
    outputs: Any = graph.graph.output_node().args[0]
    outer.output(tuple(outer.call_function(operator.getitem, (called, i)) for i in range(len(outputs))))
    if contexts is not None:
        graph.meta["_checkpoint_context_fn"] = contexts
    return GraphModule({"body": graph}, outer)


def take_codegen(graph: Graph, source: Graph) -> None:
    """Give a graph the call signature of another one: its code generator knows how nested inputs and outputs are put together."""
    graph.set_codegen(source._codegen)


def writes_inputs(graph: GraphModule, inputs: list[torch.Tensor]) -> bool:
    """Whether a torch.compile graph writes into one of its inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        ]
        tensors = [x for x in fakes if isinstance(x, torch.Tensor)]
        versions = [x._version for x in tensors]
        graph(*fakes)
        return versions != [x._version for x in tensors]


def compile_graph(graph: GraphModule, inputs: list[torch.Tensor], backend: str) -> Callable[..., Any]:
    """A torch.compile graph, compiled by one of torch.compile's backends."""
    from torch._dynamo import lookup_backend

    return lookup_backend(backend)(graph, inputs)


def metadata_names(module: str, name: str) -> Any:
    """The object of this name, if the pickle of a checkpoint's metadata may name it, else None. None of them does more than hold values."""
    from torch.distributed.checkpoint import filesystem, metadata

    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    formats = metadata._MEM_FORMAT_ENCODING
    return {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _layout,
        (metadata.__name__, "Metadata"): metadata.Metadata,
        (metadata.__name__, "TensorStorageMetadata"): metadata.TensorStorageMetadata,
        (metadata.__name__, "TensorProperties"): metadata.TensorProperties,
        (metadata.__name__, "ChunkStorageMetadata"): metadata.ChunkStorageMetadata,
        (metadata.__name__, "MetadataIndex"): metadata.MetadataIndex,
        (metadata.__name__, "StorageMeta"): metadata.StorageMeta,
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): formats,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        # How some Pythons, such as 3.11, pickle a member of an enum.
        ("builtins", "getattr"): lambda enum, member: formats[member],
        # The checkpoint's path. Python 3.13 moved the class.
        ("pathlib", "PosixPath"): PurePosixPath,
        ("pathlib._local", "PosixPath"): PurePosixPath,
    }.get((module, name))


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name} is no layout")
    return found
