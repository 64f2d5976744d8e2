"""A prefix on the host, a forward that needs it, and the variants of running load and forward.

Every forward is compared bit by bit with a forward over a resident prefix, and a prefix is poisoned on the device
before it is loaded, both outside the timing. A helper of the overlap bench.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hicache.bench.common import Timer, wall_timer
from hicache.bench.forward8b import Forward, ForwardShape, Suffix
from hicache.bench.transfer import Layout, Rig
from hicache.transfer import TransferOp

_POISON = -7.0
_WARM_TOKENS = 1024  # maximum tokens of the warm-up forward before a variant: 75 ms of an 8B model's work

Sync = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """A variant, with functions that run before and after it outside the timing."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        return self.run()


def step_timer(sync: Sync | None) -> Timer:
    """Make a timer of a `Step`'s run by the host's clock, between two calls of `sync`."""
    clock = wall_timer(sync)

    def measure(run: Callable[[], object]) -> float:
        step = run if isinstance(run, Step) else Step(run)
        step.before()
        seconds = clock(step.run)
        step.after()
        return seconds

    return measure


class Stage:
    """A prefix on the host, its slots on the device, and a forward over them.

    Owns the pools and the backend of a `Rig`. `output`: result of the last forward; `new_slots`: slots that the prefix
    does not use. Used by one thread.
    """

    def __init__(
        self,
        shape: ForwardShape,
        layout: Layout,
        prefix_tokens: int,
        device: torch.device,
    ) -> None:
        self.rig = Rig(shape.geometry, layout, prefix_tokens, device)
        self.device = device
        self.shape = shape
        self.sync: Sync | None = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        pool = self.rig.pool
        pool.register_layer_transfer_counter(self.rig.counter)
        unused = torch.ones(pool.size + pool.page_size, dtype=torch.bool, device=device)
        unused[: pool.page_size] = False
        unused[self.rig.slots] = False
        self.new_slots = unused.nonzero().flatten()
        self.forward = Forward(shape, pool, self.rig.slots, self.new_slots)
        self.output = torch.empty(0, device=device)
        self.rig.verify()

    def load(self) -> None:
        self.rig.counter.set_consumer(-1)
        self.rig.whole_up()

    def resident(self, suffix: Suffix) -> None:
        self.rig.counter.set_consumer(-1)
        self.output = self.forward(suffix)

    def together(self, suffix: Suffix) -> None:
        """Run load and forward concurrently; each layer of the forward waits for the same layer of the load."""
        self._behind_load(suffix, wait_all=False)

    def control(self, suffix: Suffix) -> None:
        """Run load and forward without layer events: the forward begins when the last layer has arrived."""
        self._behind_load(suffix, wait_all=True)

    def beside(self, suffix: Suffix) -> None:
        """Run a forward over the resident prefix without waiting for layers, while a load writes the same bytes
        again."""
        _, op = self.submit()
        self.resident(suffix)
        op.wait()

    def submit(self) -> tuple[int, TransferOp]:
        counter = self.rig.counter
        assert counter.can_begin()
        load_id = counter.begin()
        return load_id, self.rig.backend.load(self.rig.pages, self.rig.chosen, load_id)

    def poison(self) -> None:
        """Overwrite the prefix on the device."""
        for layer in self.rig.pool.layer_ids:
            for buffer in self.rig.pool.layer_buffers(layer):
                buffer.index_fill_(0, self.rig.slots, _POISON)

    def steps(self, suffix: Suffix) -> dict[str, Step]:
        """The variants of one suffix. Each forward is compared with a forward over the present prefix on the device.

        Before each variant a forward runs untimed, because a device that was idle before would have higher clocks.
        """
        before = suffix if len(suffix.x) <= _WARM_TOKENS else self.forward.suffix(_WARM_TOKENS)
        self.resident(suffix)
        expected = self.output

        def check() -> None:
            if not torch.equal(self.output, expected):
                raise AssertionError(f"{len(suffix.x)} new tokens: the output is not that over a resident prefix")

        def warm() -> None:
            self.resident(before)
            self.output = torch.zeros_like(expected)

        def poisoned() -> None:
            warm()
            self.poison()

        return {
            "load": Step(self.load, warm),
            "compute": Step(lambda: self.resident(suffix), warm, check),
            "together": Step(lambda: self.together(suffix), poisoned, check),
            "control": Step(lambda: self.control(suffix), poisoned, check),
            "beside": Step(lambda: self.beside(suffix), warm, check),
        }

    def close(self) -> None:
        self.rig.close()

    def _behind_load(self, suffix: Suffix, *, wait_all: bool) -> None:
        counter = self.rig.counter
        load_id, op = self.submit()
        counter.set_consumer(load_id)
        if wait_all:
            counter.wait_all()
            counter.set_consumer(-1)
        self.output = self.forward(suffix)
        counter.set_consumer(-1)
        op.wait()  # the forward waited for the last layer; only the end of the operation remains
        if op.error is not None:
            raise op.error
