"""All use of private PyTorch by pipelines: torch's pipeline runtime, and FSDP2 under it. Written for 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def give_peers(
    stage: Any,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    group: dist.ProcessGroup,
    stage_ranks: Sequence[int],
    pipeline_rank: int,
) -> None:
    """Give each input and each output of torch's PipelineStage its own peer rank; gradients go the other way.

    torch has one peer per stage, and a group with one rank per pipeline rank. ``group``: holds all these peers, and this rank.
    """
    for name, peers in (
        ("get_fwd_recv_ops", sources),
        ("get_fwd_send_ops", targets),
        ("get_bwd_recv_ops", targets),
        ("get_bwd_send_ops", sources),
    ):
        setattr(stage, name, _with_peers(getattr(stage, name), peers))
    # Before the first step neighbors exchange one vote with one peer each: in 2.13 whether all shapes are given, in 2.11 and 2.12 nothing.
    agreed = torch.ones(1, dtype=torch.int32, device=stage.device)
    stage._warmup_forward_vote = stage._warmup_backward_result = lambda *args, **kwargs: agreed
    stage._get_init_p2p_neighbors_ops = list
    stage.group, stage.group_rank, stage.group_size = group, pipeline_rank, max(stage_ranks) + 1
    stage._downstream_group = stage._upstream_group = group  # 2.14 alone has a group for each direction
    stage.stage_index_to_group_rank = dict(enumerate(stage_ranks))


def _with_peers(
    operations: Callable[[int], list[dist.P2POp]], peers: Sequence[int]
) -> Callable[[int], list[dist.P2POp]]:
    """The same messages, each with its own peer."""

    def found(micro_batch: int) -> list[dist.P2POp]:
        made = operations(micro_batch)
        pairs = zip(made, peers if made else (), strict=True)
        return [dist.P2POp(one.op, one.tensor, peer, one.group) for one, peer in pairs]

    return found


def pipeline_of_steps(stages: list[Any], ranks: list[list[str]], *, gathers_ahead: bool = True, **settings: Any) -> Any:
    """torch's pipeline runtime under our own order: each rank's computations, sends and receives, in torch's notation (``0F0``,
    ``0SEND_F0``). torch itself adds when weights are gathered and gradients reduced, by the rules of its other schedules.

    ``gathers_ahead``: all weights of a stage are gathered before its first forward; else FSDP2 gathers them block by block, as under torch's
    schedules with one stage per rank.
    """
    from torch.distributed.pipelining import schedules

    read = schedules._Action.from_str
    steps: dict[int, list[Any]] = {rank: [read(step) for step in steps] for rank, steps in enumerate(ranks)}
    computed = {rank: [step for step in steps if step.is_compute_op] for rank, steps in steps.items()}
    schedule = schedules._PipelineScheduleRuntime(stages, **settings)
    schedule.pipeline_order = computed
    schedule._prepare_schedule_with_comms({rank: list(actions) for rank, actions in computed.items()})
    gathering = () if gathers_ahead else (schedules.UNSHARD, schedules.RESHARD)
    for rank, lowered in schedule.pipeline_order_with_comms.items():
        kept = [action for action in lowered if action.computation_type not in gathering]
        schedule.pipeline_order_with_comms[rank] = _with_messages_of(steps[rank], kept)
    if not gathers_ahead:
        schedule._assert_unsharded = lambda stage: None
    # From 2.15 on an order also has the points where ranks wait for their sends.
    with_waits = getattr(schedules, "_add_wait_send", None)
    if with_waits is not None:
        schedule.pipeline_order_with_comms = with_waits(schedule.pipeline_order_with_comms)
    return schedule


def _with_messages_of(steps: list[Any], lowered: list[Any]) -> list[Any]:
    """The actions that torch made of a rank's computations, with the messages of ``steps`` instead of torch's: each right after
    the computation that it follows in ``steps``."""
    following: dict[Any, list[Any]] = {None: []}
    last = None
    for step in steps:
        if step.is_compute_op:
            last = step
            following[last] = []
        else:
            following[last].append(step)
    found = following[None]
    for action in lowered:
        if "SEND" in str(action) or "RECV" in str(action):
            continue
        found = [*found, action, *following.get(action, ())]
    return found


def greet_others_alone(stage: Any) -> None:
    """Make torch's PipelineStage send its first message to other ranks only. Before 2.13 each stage greets both neighbors, even one on the
    same rank, and gloo has no connection of a rank with itself."""
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", list)  # 2.15 has none
    stage._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.group_peer != stage.group_rank]


def receive_in_turn(stage: Any) -> None:
    """Let torch's PipelineStage have memory for a message from when it is asked for until the pass that reads it has run.

    torch makes room for the messages of all micro-batches before the first step, and keeps it (2.13, ``_setup_forward_recv_info``).
    """
    device, meta = stage.device, torch.device("meta")

    def move(messages: Sequence[Any], to: torch.device) -> None:
        for message in messages:
            held = getattr(message, "buffer", None)  # the first stage's inputs have none
            if held is not None and (held.device == meta) != (to == meta):
                message.buffer = torch.empty_like(held, device=to).requires_grad_(held.requires_grad)

    def prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def without_memory(*args: Any, **settings: Any) -> Any:
            stage.device = meta
            try:
                return prepare(*args, **settings)
            finally:
                stage.device = device

        return without_memory

    def receiving(operations: Callable[[int], Any], messages: dict[int, Sequence[Any]]) -> Callable[[int], Any]:
        def found(micro_batch: int) -> Any:
            move(messages.get(micro_batch, ()), device)
            return operations(micro_batch)

        return found

    def reading(run: Callable[..., Any], messages: dict[int, Sequence[Any]]) -> Callable[..., Any]:
        def done(micro_batch: int, *args: Any, **settings: Any) -> Any:
            result = run(micro_batch, *args, **settings)
            move(messages.get(micro_batch, ()), meta)
            return result

        return done

    stage._prepare_forward_infra = prepared(stage._prepare_forward_infra)
    stage._prepare_backward_infra = prepared(stage._prepare_backward_infra)
    outputs, gradients = stage.args_recv_info, stage.grad_recv_info
    stage.get_fwd_recv_ops = receiving(stage.get_fwd_recv_ops, outputs)
    stage.get_bwd_recv_ops = receiving(stage.get_bwd_recv_ops, gradients)
    stage.forward_one_chunk = reading(stage.forward_one_chunk, outputs)
    stage.backward_one_chunk = reading(stage.backward_one_chunk, gradients)


def forget_logits(stage: Any) -> None:
    """Let the last of torch's PipelineStages drop its output once the loss is computed, which keeps what its gradient needs.

    torch keeps the output until the backward pass, to detach it afterwards (2.13, ``backward_one_chunk``).
    """
    run = stage.forward_one_chunk

    def forward(micro_batch: int, *args: Any, **settings: Any) -> Any:
        output = run(micro_batch, *args, **settings)
        _, inputs = stage.fwd_cache[micro_batch]
        stage.fwd_cache[micro_batch] = ((), inputs)
        return output

    stage.forward_one_chunk = forward


def reduce_units_at_once(stage: nn.Module) -> None:
    """Let a stage's units reduce at the same time; to be called before its first forward. Their buffers take the memory of the gradients.

    By default each reduction waits for the one before, whose buffer it takes, and computation waits with it. Before 2.13 it stays so.
    """
    if isinstance(stage, FSDPModule) and hasattr(stage, "set_reduce_scatter_max_input_buffers"):
        stage.set_reduce_scatter_max_input_buffers(sum(isinstance(one, FSDPModule) for one in stage.modules()))


def reduce_beside(stage: Any, waits: list[Callable[[], None]]) -> None:
    """Let torch's PipelineStage go on once the reduction of its gradients has begun: functions that wait for it are put into ``waits``, to be
    called before the gradients are read.

    torch waits at once, so that a rank's other stages compute nothing in that time (2.13, ``perform_reduce_grad``).
    """
    if not isinstance(stage.submod, FSDPModule):
        return
    if hasattr(stage, "wait_for_gradient_reduction"):  # 2.15 begins and waits in two calls, one after the other
        finish = stage.wait_for_gradient_reduction
        stage.wait_for_gradient_reduction = lambda scale: waits.append(lambda: finish(scale))
        return
    state: Any = stage.submod._get_fsdp_state()
    reduce, wait = stage.perform_reduce_grad, state._root_post_backward_final_callback

    def begin(scale: int) -> None:
        state._root_post_backward_final_callback = lambda: waits.append(wait)
        try:
            reduce(scale)
        finally:
            state._root_post_backward_final_callback = wait

    stage.perform_reduce_grad = begin
