"""Hit rates of the eviction policies: a trace of prompts replayed through the real prefix tree, on the CPU.

A trace has a JSON object a line, with `hash_ids`: one id for each block of the prompt. A request hits its longest held
prefix, keeps that from going, makes room for the rest and inserts it; then the whole prompt is newly used. Of a victim
only as much goes as is needed, tail first. Capacity counts blocks, and a block is a page of one token, the id.

`optimal` replaces nothing by anything that is asked for later (Belady) and may drop what it has just computed: no order
can hit more. It is the ceiling of every case, so a ratio is a share of what is possible at that capacity.
"""

from __future__ import annotations

import argparse
import heapq
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.common import BenchUnavailable, Case, Report
from hicache.tree import DEVICE, FULL, PageHasher, RadixTree
from hicache.tree.key import Tokens
from hicache.tree.policy import ORDERS

NAME = "policy"
DESCRIPTION = "hit rates of the eviction policies over a trace, per capacity, against the optimal ones"

CAPACITIES = (1_000, 3_000, 10_000, 30_000)
UNLIMITED = 0
_MAX_ID = 1 << 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids (default: a small synthetic trace)")
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=[*CAPACITIES, UNLIMITED],
        help=f"in blocks, {UNLIMITED} for no limit (default: %(default)s)",
    )
    parser.add_argument("--policies", nargs="+", choices=sorted(ORDERS), default=list(ORDERS), help="default: all")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.trace is None:
        requests, source = synthetic_trace(), "synthetic trace"
    else:
        requests, source = read_trace(args.trace), args.trace.name
        hide_folder(report, args.trace)
    if min(args.capacities) < 0:
        raise BenchUnavailable(f"--capacities {min(args.capacities)}: blocks, or {UNLIMITED} for no limit")
    num_blocks = sum(map(len, requests))
    title = f"{source}: {len(requests)} requests, {num_blocks} blocks"
    report.add(Case.of("trace", [num_blocks], "blocks", note=title))
    best = {capacity: optimal_hits(requests, capacity) / num_blocks for capacity in args.capacities}
    rates = {
        policy: [replay(requests, policy, capacity) / num_blocks for capacity in args.capacities]
        for policy in args.policies
    }
    rates["optimal"] = list(best.values())
    print_table(title, args.capacities, rates)
    for policy, row in rates.items():
        for capacity, rate in zip(args.capacities, row, strict=True):
            report.add(Case.of(f"{policy}.{_name(capacity)}", [rate], "hit rate", ceiling=best[capacity] or None))


def hide_folder(report: Report, path: Path) -> None:
    """Name a file in the report's command without its folder, which is this machine's own business."""
    report.command = shlex.join([path.name if word == str(path) else word for word in shlex.split(report.command)])


def read_trace(path: Path) -> list[Tokens]:
    """The block ids of every request that has any, in the order of the file. Raises BenchUnavailable."""
    requests = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            ids = np.array(json.loads(line)["hash_ids"])
            if ids.shape == (0,):
                continue
            if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= _MAX_ID:
                raise BenchUnavailable(f"{path.name}, line {number}: hash_ids must be integers from 0 to 2^32 - 1")
            requests.append(ids.astype(np.int64))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchUnavailable(f"--trace {path} cannot be read: {error!r}") from error
    if not requests:
        raise BenchUnavailable(f"--trace {path} holds no request")
    return requests


def synthetic_trace(num_requests: int = 2_000, seed: int = 0) -> list[Tokens]:
    """Chats over a few system prompts. A turn repeats the chat and adds blocks of its own; some repeat or replace the
    turn before, and now and then a chat is taken up again that was long silent."""
    dice = np.random.default_rng(seed)
    next_id = 0

    def fresh(most: int) -> Tokens:
        nonlocal next_id
        start, next_id = next_id, next_id + int(dice.integers(1, most + 1))
        return np.arange(start, next_id)

    systems = [fresh(8) for _ in range(20)]
    chats: list[list[Tokens]] = []
    requests = []
    for _ in range(num_requests):
        turn = dice.random()
        if turn < 0.4 or not chats:
            chats.append([systems[min(int(dice.zipf(1.5)), len(systems)) - 1]])
            chat = chats[-1]
        else:
            chat = chats[-1 - int(dice.exponential(150)) % len(chats)]
            if turn < 0.5 and len(chat) > 1:
                chat.pop()
        if turn < 0.9:
            chat.append(fresh(32))
        requests.append(np.concatenate(chat))
    return requests


def replay(requests: Sequence[Tokens], policy: str, capacity: int) -> int:
    """How many blocks of the requests were held when they came. `capacity`: blocks, or UNLIMITED."""
    tree = RadixTree(1, PageHasher(b"bench", 1), policy=policy)
    slots = torch.zeros(max(map(len, requests)), dtype=torch.int64)
    held = hits = 0
    for request in requests:
        match = tree.match(request)
        node = tree.node_at(match, match.device_len)
        for at in node.path():
            at.hit_count += 1
        hits += match.device_len
        tree.lock(node, DEVICE)
        rest = request[match.device_len :]
        if capacity != UNLIMITED:
            held -= _make_room(tree, held + len(rest) - capacity)
            rest = rest[: capacity - held]
        tree.insert(node, rest, slots[: len(rest)], DEVICE)
        held += len(rest)
        tree.unlock(node, DEVICE)
    tree.check()
    if held != tree.evictable(FULL, DEVICE) or (capacity != UNLIMITED and held > capacity):
        raise AssertionError(f"{policy}: {held} blocks were counted of {capacity}, the tree holds another number")
    return hits


def optimal_hits(requests: Sequence[Tokens], capacity: int) -> int:
    """The most blocks that any order could have held when they came.

    Of what is held and what a request has brought, that stays which is asked for soonest; of equals what is nearer to
    the root, so that what is held stays prefixes: a block is asked for whenever one behind it is.
    """
    prompts = _prefix_ids(requests)
    never = len(prompts)
    next_use = {block: never for prompt in prompts for block in prompt}
    uses: list[list[int]] = []
    for at in reversed(range(never)):
        uses.append([next_use[block] for block in prompts[at]])
        next_use.update(dict.fromkeys(prompts[at], at))
    held: dict[int, int] = {}  # block -> next use
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for prompt, next_uses in zip(prompts, reversed(uses), strict=True):
        hits += sum(block in held for block in prompt)
        for depth, (block, use) in enumerate(zip(prompt, next_uses, strict=True)):
            held[block] = use
            heapq.heappush(heap, (-use, -depth, block))
        while capacity != UNLIMITED and len(held) > capacity:
            use, _, block = heapq.heappop(heap)
            if held.get(block) == -use:
                del held[block]
    return hits


def print_table(title: str, capacities: Sequence[int], rates: dict[str, list[float]]) -> None:
    """Policies as rows, capacities as columns."""
    print(f"hit rate, {title}\n{'capacity, blocks':>16}" + "".join(f"{_name(capacity):>11}" for capacity in capacities))
    for policy, row in rates.items():
        print(f"{policy:>16}" + "".join(f"{rate:11.4f}" for rate in row))


def _make_room(tree: RadixTree, short: int) -> int:
    """Evict `short` blocks, or all that may go; returns how many went."""
    gone = 0
    while gone < short and (node := tree.victim(FULL, DEVICE)) is not None:
        spare = node.num_tokens - (short - gone)
        if spare > 0:
            node = tree.split_suffix(node, spare)
        gone += sum(released.size for released in tree.drop(node, FULL, DEVICE))
    return gone


def _prefix_ids(requests: Sequence[Tokens]) -> list[list[int]]:
    """The requests with ids that stand for a block and all before it."""
    known: dict[tuple[int, int], int] = {}
    prompts = []
    for request in requests:
        above, prompt = -1, []
        for block in request.tolist():
            above = known.setdefault((above, block), len(known))
            prompt.append(above)
        prompts.append(prompt)
    return prompts


def _name(capacity: int) -> str:
    return str(capacity) if capacity != UNLIMITED else "unlimited"
