"""What a request is to load from the host, the load in flight, and several copies as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from hicache.flow.prompt import Prompt
from hicache.host import RunPart
from hicache.tiers import Component
from hicache.transfer.base import TransferOp
from hicache.tree.node import NodeRun, TreeNode


class JointOp:
    """Copies that belong together, one a component: done when all are, failed when one is."""

    def __init__(self, ops: Sequence[TransferOp]) -> None:
        self._ops = tuple(ops)
        self.num_bytes = sum(op.num_bytes for op in ops)

    @property
    def error(self) -> Exception | None:
        return next((op.error for op in self._ops if op.error is not None), None)

    def done(self) -> bool:
        return all(op.done() for op in self._ops)

    def wait(self) -> None:
        for op in self._ops:
            op.wait()

    def wait_outcome(self) -> None:
        for op in self._ops:
            op.wait_outcome()

    @property
    def is_undelayed(self) -> bool:
        return all(op.is_undelayed for op in self._ops)

    def seconds(self) -> float:
        """Of the longest."""
        return max(op.seconds() for op in self._ops)


class Load:
    """A load in flight of `parts` of the host, for the prefix of `prompt` that ends with `node`. `runs` follow the
    nodes that it brings to the tree.

    `readers`: leases and later loads that read what it brings. A failed load's slots stay out of use until the last of
    them ends: `orphans`. `depends_on`: loads in flight that this one continues; it fails with them. `reading`: the host
    pages it reads; `load_ids`: its number in the layer counter, `orphan_states`: values, by
    component, that left a lease or the tree before the load had written to them.
    """

    def __init__(
        self, node: TreeNode, prompt: Prompt, parts: Mapping[Component, Sequence[RunPart]], depends_on: Sequence[Load]
    ) -> None:
        self.node, self.prompt, self.parts, self.depends_on = node, prompt, parts, tuple(depends_on)
        self.runs: dict[Component, NodeRun] = {}
        self.load_ids: dict[Component, int] = {}
        self.reading: dict[Component, torch.Tensor] = {}
        self.ops: list[TransferOp] = []
        self.readers = 0
        self.completed = self.abandoned = False
        self._cause: Exception | None = None
        self.orphans: list[torch.Tensor] = []
        self.orphan_states: dict[Component, list[torch.Tensor]] = {}

    @cached_property
    def op(self) -> JointOp:
        return JointOp(self.ops)

    @property
    def error(self) -> Exception | None:
        """Why it failed; of a load that failed with another, why that did. Final after `wait_outcome`."""
        below = (load.error for load in self.depends_on)
        return self._cause or self.op.error or next((error for error in below if error is not None), None)

    def complete(self) -> None:
        """It has ended, and so has all that it depends on."""
        self._cause, self.depends_on, self.completed = self.error, (), True

    def brings(self, node: TreeNode) -> bool:
        return any(node in run.nodes for run in self.runs.values())

    def detach(self) -> None:
        for run in self.runs.values():
            run.detach()
        self.runs = {}
