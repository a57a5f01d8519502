"""The interpreter: carries out one rank's list of actions, and knows nothing about schedules or models.

F runs the stage's blocks and keeps what backward needs; B runs autograd from the outputs' gradients; the rest moves
tensors. Receives are posted at their place in the list and waited for where their data is used. A send is waited for
when as many later ones have begun as there are stages, the rest at the end: what was sent does not pile up over the
micro-batches, and a validated schedule could even wait for each send at once. Gradients of an output with several
consumers are added in the order of the consuming stages.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.comm import Group, receive, send, wait
from trainer.pipeline.graph import FieldRef, Graph, ValueRef
from trainer.pipeline.schedule import Action, Op

Handles = list[Any]


@dataclass(slots=True)
class _MicroBatch:
    """What one micro-batch keeps on this stage between its actions."""

    received: dict[ValueRef, torch.Tensor] = field(default_factory=dict)
    kept: dict[ValueRef, torch.Tensor] = field(default_factory=dict)
    arriving: dict[int, dict[ValueRef, torch.Tensor]] = field(default_factory=dict)
    to_send_back: dict[ValueRef, torch.Tensor] = field(default_factory=dict)
    incoming: Handles = field(default_factory=list)


class Interpreter:
    """Runs action lists of one stage. `modules` are the built blocks of this stage by block name."""

    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], *, stage: int, pp: Group, device: torch.device
    ) -> None:
        self.graph, self.stage, self.pp, self.device = graph, stage, pp, device
        self.nodes = tuple((node, modules[node.block]) for node in graph.on_stage(stage))
        travelling = {v for (source, _), values in graph.edges.items() if source == stage for v in values}
        self.has_loss = graph.loss_stage == stage
        self.keeps = travelling | ({graph.loss} if self.has_loss else set())

    def run(self, actions: Sequence[Action], fields: Sequence[Mapping[str, Any]], *, is_training: bool) -> torch.Tensor:
        """Carry out `actions`; `fields[i]` are micro-batch i's batch fields. Returns Σ loss (fp64; 0 without a loss).

        Gradients are added to the parameters' `.grad`. Comm: the messages in `actions`, over pp.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        alive = [_MicroBatch() for _ in fields]
        last = {action.micro_batch: index for index, action in enumerate(actions)}
        sending: deque[tuple[Handles, list[torch.Tensor]]] = deque()
        with torch.set_grad_enabled(is_training):
            for index, action in enumerate(actions):
                state = alive[action.micro_batch]
                match action.op:
                    case Op.F:
                        loss += self._forward(state, fields[action.micro_batch])
                    case Op.B:
                        self._backward(state)
                    case Op.SEND_F | Op.SEND_B:
                        sending.append(self._send(action, state))
                        if len(sending) > self.pp.size:
                            wait(sending.popleft()[0])
                    case Op.RECV_F | Op.RECV_B:
                        self._receive(action, state, is_training=is_training)
                if index == last[action.micro_batch]:
                    alive[action.micro_batch] = _MicroBatch()
        for handles, _ in sending:
            wait(handles)
        return loss

    def _forward(self, state: _MicroBatch, fields: Mapping[str, Any]) -> torch.Tensor | float:
        wait(state.incoming)
        state.incoming = []
        values = dict(state.received)
        for node, module in self.nodes:
            inputs = {key: fields[ref.name] if isinstance(ref, FieldRef) else values[ref] for key, ref in node.inputs}
            out = module(**inputs)
            for index, tensor in enumerate(out if isinstance(out, tuple) else (out,)):
                values[ValueRef(node.index, index)] = tensor
        state.kept = {ref: values[ref] for ref in self.keeps}
        return values[self.graph.loss].detach() if self.has_loss else 0.0

    def _backward(self, state: _MicroBatch) -> None:
        wait(state.incoming)
        state.incoming = []
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        for ref, tensor in state.kept.items():
            arrived = [state.arriving[peer][ref] for peer in sorted(state.arriving) if ref in state.arriving[peer]]
            if ref == self.graph.loss and self.has_loss:
                roots.append(tensor)
                gradients.append(None)
            elif arrived and tensor.requires_grad:
                roots.append(tensor)
                gradients.append(sum(arrived[1:], start=arrived[0]))
        torch.autograd.backward(roots, gradients)
        state.to_send_back = {
            ref: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for ref, leaf in state.received.items()
        }
        state.kept, state.received, state.arriving = {}, {}, {}

    def _send(self, action: Action, state: _MicroBatch) -> tuple[Handles, list[torch.Tensor]]:
        """Start a send; the tensors are returned so that they live as long as the message."""
        assert action.peer is not None
        if action.op is Op.SEND_F:
            tensors = [state.kept[ref].detach().contiguous() for ref in self.graph.edges[self.stage, action.peer]]
        else:
            tensors = [state.to_send_back[ref].contiguous() for ref in self.graph.floating(action.peer, self.stage)]
        return send(tensors, self.pp.ranks[action.peer], self.pp), tensors

    def _receive(self, action: Action, state: _MicroBatch, *, is_training: bool) -> None:
        """Post a receive into new buffers, shaped as traced. Activations become leaves that collect a gradient."""
        assert action.peer is not None
        if action.op is Op.RECV_F:
            refs = self.graph.edges[action.peer, self.stage]
            buffers = {ref: self._empty(ref, needs_grad=is_training) for ref in refs}
            state.received.update(buffers)
        else:
            refs = self.graph.floating(self.stage, action.peer)
            buffers = {ref: self._empty(ref, needs_grad=False) for ref in refs}
            state.arriving[action.peer] = buffers
        tensors = [buffer.detach() for buffer in buffers.values()]
        state.incoming += receive(tensors, self.pp.ranks[action.peer], self.pp)

    def _empty(self, ref: ValueRef, *, needs_grad: bool) -> torch.Tensor:
        meta = self.graph.meta(ref)
        buffer = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self.device)
        return buffer.requires_grad_(needs_grad and meta.is_floating)
