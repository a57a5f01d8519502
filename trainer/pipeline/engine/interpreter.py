"""The interpreter: carries out one rank's list of actions, and knows nothing about schedules or models.

F runs the blocks of a stage and keeps what backward needs; B runs autograd from the outputs' gradients; I is B without
the weight gradients of linear layers, W adds those. The rest moves tensors between ranks; stages of one rank hand over
directly. Receives are posted at their place in the list and waited for where their data is used. A send is waited for
when as many later ones have begun as there are ranks, the rest at the end: what was sent does not pile up over the
micro-batches, and a validated schedule could even wait for each send at once. Gradients of an output with several
consumers are added in the order of the consuming stages.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from trainer.comm import Group, receive, send, wait
from trainer.layers.deferred import take_noted
from trainer.pipeline.engine.parts import Call, Complete, Handles, MicroBatch, Watch, WeightGradients, empty, stage_part
from trainer.pipeline.graph import FieldRef, Graph, ValueRef
from trainer.pipeline.schedule import Action, Op, Placement, last_gradients

Fields = Sequence[Mapping[str, Any]]


class Interpreter:
    """Runs action lists of this rank. `modules` are the built blocks of its stages by block name; `calls`, where
    given, are called in their place."""

    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], *, placement: Placement, pp: Group, device: torch.device,
        calls: Mapping[str, Call] | None = None, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.placement, self.pp, self.device = graph, placement, pp, device
        self.watch = watch or Watch()
        self.weights = WeightGradients(modules.values())
        by_name = {name: self.weights.watched(call) for name, call in (modules if calls is None else calls).items()}
        self.parts = {stage: stage_part(graph, by_name, stage, placement) for stage in placement.stages_of(pp.rank)}
        self._alive: dict[tuple[int, int], MicroBatch] = {}

    def run(self, actions: Sequence[Action], fields: Fields, *, is_training: bool) -> torch.Tensor:
        """Carry out `actions`; `fields[i]` are micro-batch i's batch fields. Returns Σ loss (fp64; 0 without a loss).

        Gradients are added to the parameters' `.grad`. Comm: the messages in `actions`, over pp.
        """
        losses: dict[int, torch.Tensor] = {}
        self._alive = {}
        take_noted()  # of a run that an error cut off
        last = {(action.stage, action.micro_batch): index for index, action in enumerate(actions)}
        last_gradient = last_gradients(actions)
        sending: deque[tuple[Handles, list[torch.Tensor]]] = deque()
        with torch.set_grad_enabled(is_training):
            for index, action in enumerate(actions):
                state = self._state(action.stage, action.micro_batch)
                complete = self.watch.complete if index == last_gradient.matrices.get(action.stage) else None
                match action.op:
                    case Op.F:
                        self._forward(action, state, fields[action.micro_batch], losses, is_training=is_training)
                    case Op.B | Op.I:
                        self._backward(action, state, complete, is_last=index == last_gradient.others[action.stage])
                    case Op.W:
                        self.weights.add(state.pending, complete)
                        state.pending = []
                    case Op.SEND_F | Op.SEND_B:
                        sending.append(self._send(action, state))
                        if len(sending) > self.pp.size:
                            wait(sending.popleft()[0])
                    case Op.RECV_F | Op.RECV_B:
                        self._receive(action, state, is_training=is_training)
                if index == last[action.stage, action.micro_batch]:
                    del self._alive[action.stage, action.micro_batch]
        for handles, _ in sending:
            wait(handles)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((losses[i] for i in sorted(losses)), start=zero)  # fp64, in one order under every schedule

    def _state(self, stage: int, micro_batch: int) -> MicroBatch:
        return self._alive.setdefault((stage, micro_batch), MicroBatch())

    def _forward(
        self, action: Action, state: MicroBatch, fields: Mapping[str, Any], losses: dict[int, torch.Tensor], *,
        is_training: bool,
    ) -> None:  # fmt: skip
        part = self.parts[action.stage]
        state.wait()
        values = dict(state.received)
        for node, call in part.nodes:
            self.watch.before_block(node.block)
            inputs = {key: fields[ref.name] if isinstance(ref, FieldRef) else values[ref] for key, ref in node.inputs}
            out = call(**inputs)
            for index, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
                values[ValueRef(node.index, index)] = tensor
        state.keep({ref: values[ref] for ref in part.travelling}, unsent=len(part.remote_targets))
        for target in part.local_targets:
            handed = {ref: values[ref].detach().contiguous() for ref in self.graph.edges[action.stage, target]}
            for ref, tensor in handed.items():
                tensor.requires_grad_(is_training and self.graph.meta(ref).is_floating)
            self._state(target, action.micro_batch).received.update(handed)
        if part.loss is not None:
            losses[action.micro_batch] = values[part.loss].detach()
            state.loss = get_gradient_edge(values[part.loss]) if is_training else None

    def _backward(self, action: Action, state: MicroBatch, complete: Complete | None, *, is_last: bool) -> None:
        """Add gradients to all parameters; in I not to linear weights, whose notes are left in `state.pending`."""
        part = self.parts[action.stage]
        state.wait()
        self.watch.is_last_backward = is_last
        state.pending = self.weights.backward(*state.backward_arguments(), action.op is Op.B, complete)
        self.watch.is_last_backward = False
        self.watch.after_backward()
        back = {ref: torch.zeros_like(x) if x.grad is None else x.grad for ref, x in state.received.items()}
        state.release()
        state.to_send_back = {
            source: [back[ref] for ref in self.graph.floating(source, action.stage)] for source in part.remote_sources
        }
        for source in part.local_sources:
            handed = {ref: back[ref] for ref in self.graph.floating(source, action.stage)}
            self._state(source, action.micro_batch).arriving[action.stage] = handed

    def _send(self, action: Action, state: MicroBatch) -> tuple[Handles, list[torch.Tensor]]:
        """Start a send; the tensors are returned so that they live as long as the message."""
        assert action.peer is not None
        if action.op is Op.SEND_F:
            tensors = state.outgoing(self.graph.edges[action.stage, action.peer])
        else:
            tensors = state.to_send_back.pop(action.peer)
        tensors = [tensor.contiguous() for tensor in tensors]
        return send(tensors, self._global_rank(action.peer), self.pp), tensors

    def _receive(self, action: Action, state: MicroBatch, *, is_training: bool) -> None:
        """Post a receive into new buffers, shaped as traced. Activations become leaves that collect a gradient."""
        assert action.peer is not None
        if action.op is Op.RECV_F:
            refs = self.graph.edges[action.peer, action.stage]
            buffers = {ref: empty(self.graph.meta(ref), self.device, needs_grad=is_training) for ref in refs}
            state.received.update(buffers)
        else:
            refs = self.graph.floating(action.stage, action.peer)
            buffers = {ref: empty(self.graph.meta(ref), self.device, needs_grad=False) for ref in refs}
            state.arriving[action.peer] = buffers
        tensors = [buffer.detach() for buffer in buffers.values()]
        state.incoming += receive(tensors, self._global_rank(action.peer), self.pp)

    def _global_rank(self, stage: int) -> int:
        return self.pp.ranks[self.placement.ranks[stage]]
