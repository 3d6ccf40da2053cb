"""Whether torch.compile makes one graph of each block, found on tensors without data, before a layout that needs one is chosen or run."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule

from ahp.graph.blocks import NoBlocks, find_blocks
from ahp.graph.call import Documents, call_model
from ahp.graph.copies import fake_copy
from ahp.graph.fake_mode import as_on_data
from ahp.graph.fake_run import train_whole
from ahp.graph.host_numbers import Generators
from ahp.graph.torch_compat import FakeTensorMode
from ahp.job import Job
from ahp.runtime.compute.compile import Forward, GraphBroke, in_one_graph, refuse_writes
from ahp.runtime.experts.balance_loss import balance_of
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
from ahp.runtime.torch_compat import allow_graphs


def why_several_graphs(module: nn.Module, job: Job, documents: Documents | None = None) -> str | None:
    """Why torch.compile would make several graphs of a block, in its own words. None if it makes one, and if the model cannot be looked at
    without values, or keeps routers' outputs by hooks, which the runtime takes out of the blocks."""
    if balance_of(module) is not None:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # a table that is no part of the module
    with mode:
        fake = fake_copy(module, COMPUTE_DTYPE[job.precision])
    try:
        found, kinds = find_blocks(fake), find_blocks(module).kinds()
    except NoBlocks:
        return None
    train_whole(fake)
    allow_graphs()
    for kind in set(kinds):
        block = found.blocks[kinds.index(kind)]
        block.forward = in_one_graph(block.forward, _as_it_is)
    on_data = as_on_data(fake, document_mask=documents is not None)
    with on_data, mode, torch.enable_grad(), Generators(fake).seeded(0):
        input_ids = torch.zeros((1, job.sequence_length), dtype=torch.int64)
        try:
            call_model(fake, input_ids, torch.zeros_like(input_ids) if documents else None, documents)
        except GraphBroke as error:
            return str(error)
        except Exception:  # the run, or a look at the whole model, says what is wrong
            return None
    return None


def _as_it_is(graph: GraphModule, inputs: list[torch.Tensor]) -> Forward:
    """A backend for torch.compile that compiles nothing."""
    refuse_writes(graph, inputs)
    return graph
