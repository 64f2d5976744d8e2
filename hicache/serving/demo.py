"""`hicache demo`: serves conversations about documents with a device tier that is too small for them, and checks every
generated token.

Each turn is served twice. First an engine with device, host and disk serves all turns; then another engine serves all
turns again without any hit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import transformers

from hicache.build.factory import build_engine
from hicache.build.sizing import row_bytes
from hicache.build.validation import device_named, require_usable
from hicache.config import EngineConfig
from hicache.config.flags import naming_flags
from hicache.console import duration, new_console, printable
from hicache.engine import CacheEngine
from hicache.errors import ConfigError, PromptTooLong
from hicache.layout import ModelGeometry
from hicache.serving.document_chats import Conversation, chats_about_diaries
from hicache.serving.interrupt import DeferredInterrupt
from hicache.serving.models import LoadedModel, load_local, random_model
from hicache.serving.packaged_model import choose_model
from hicache.serving.request import Request, RequestOutput
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from hicache.serving.support import check_supported

Say: TypeAlias = Callable[[str], object]

TIERS = ("device", "host", "disk", "remote")
_CHUNK_TOKENS = 8192  # prompt tokens of one forward pass
# The packaged model has 36 times the weights of the random model. With 1024 tokens, two CPU cores need about a minute.
_PACKAGED_DOCUMENT_TOKENS, _DOCUMENT_TOKENS = 1024, 12288
_MEASURED_TURN = 2  # number of the turn that is timed; the first turn also loads libraries and compiles
_WIDTHS = (34, 7, 7, 7, 7, 7, 9, 9)


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation, with its output in the run with the cache, and its output in the run without a
    cache."""

    name: str
    number: int
    cached: RequestOutput
    recomputed: RequestOutput

    @property
    def identical(self) -> bool:
        """Return whether the generated tokens equal those of the run without a cache."""
        return self.recomputed.tokens == self.cached.tokens

    def line(self) -> str:
        """Return a line of the comparison: milliseconds to the first token with the cache and without."""
        times = [f"{one.ttft_s * 1e3:.0f} ms" for one in (self.cached, self.recomputed)]
        verdict = "identical" if self.identical else "DIFFERENT"
        return f"{_short(self.name)}first token {times[0]}, without a cache {times[1]}: {verdict}"


def _row(name: str, output: RequestOutput) -> str:
    """Return a row of the table: numbers of tokens, and the milliseconds to the first token."""
    hit = dataclasses.asdict(output.hit)
    ttft_ms = f"{output.ttft_s * 1e3:.0f}"
    return _line(name, output.prompt_tokens, *(hit[tier] for tier in TIERS), output.computed_tokens, ttft_ms)


def _text(question: str, answer: str, output: RequestOutput) -> str:
    """Return question and answer in one line each, with the prompt tokens from each tier."""
    end = " ..." if output.finish_reason == "length" else ""
    hits = [f"{tokens} from {tier}" for tier, tokens in dataclasses.asdict(output.hit).items() if tokens]
    return (
        f"Q: {question}   ({output.prompt_tokens} tokens: {', '.join(hits) or 'all computed'})\n"
        f"A: {printable(' '.join(answer.split()))}{end}"
    )


@dataclass(frozen=True)
class Outcome:
    """The results of a demo. `sizes`: numbers of tokens that the device tier and the host tier can store, and that all
    conversations need. `stats`: the engine's metrics at the end. `device`: name of the processor."""

    turns: Sequence[Turn]
    sizes: Mapping[str, int]
    stats: Mapping[str, float]
    device: str
    seconds: float

    @property
    def identical(self) -> bool:
        return all(turn.identical for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.cached.prompt_tokens for turn in self.turns)

    @property
    def hit_tokens(self) -> dict[str, int]:
        """The number of prompt tokens found in each tier, summed over all turns."""
        hits = [dataclasses.asdict(turn.cached.hit) for turn in self.turns]
        return {tier: sum(hit[tier] for hit in hits) for tier in TIERS}

    def summary(self) -> str:
        """Return the most important results, in a few lines of text."""
        total = self.prompt_tokens
        shares = ", ".join(f"{tier} {tokens} ({tokens / total:.0%})" for tier, tokens in self.hit_tokens.items())
        computed = sum(turn.cached.computed_tokens for turn in self.turns)
        lines = [
            f"identical: {'yes' if self.identical else 'NO'}   {self._compared()}",
            f"prompt tokens {total}: {shares}, computed {computed}",
            f"{len(self.turns)} requests, each served twice, on {self.device} in {self.seconds:.1f} s",
        ]
        if later := [turn for turn in self.turns if turn.number]:
            cached_ms = statistics.median(turn.cached.ttft_s * 1e3 for turn in later)
            recomputed_ms = statistics.median(turn.recomputed.ttft_s * 1e3 for turn in later)
            lines.append(
                f"median time to first token after the first turn: {cached_ms:.0f} ms, "
                f"without a cache {recomputed_ms:.0f} ms: {recomputed_ms / cached_ms:.1f} times shorter"
            )
        return "\n".join(lines)

    def _compared(self) -> str:
        different = [turn.name for turn in self.turns if not turn.identical]
        if different:
            return f"tokens differ in {', '.join(different)}"
        return "every generated token equals that of a run without a cache"


@dataclass(frozen=True)
class _Workload:
    """The model, the conversations and the maximum length of an answer. `has_answers`: whether answers have a meaning,
    which is False for random weights."""

    loaded: LoadedModel
    geometry: ModelGeometry
    conversations: Sequence[Conversation]
    max_new_tokens: int
    has_answers: bool

    @property
    def max_len(self) -> int:
        """The number of tokens of the longest prompt together with its answer."""
        return max(len(prompt) for one in self.conversations for prompt in one.prompts) + self.max_new_tokens

    @property
    def working_set(self) -> int:
        """The number of tokens whose KV must be stored for all conversations together."""
        return sum(conversation.distinct_tokens(self.max_new_tokens) for conversation in self.conversations)

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that the run with the cache and the run without a cache compute together, if the run
        with the cache computes each token once."""
        prompts = sum(len(prompt) for one in self.conversations for prompt in one.prompts)
        return self.working_set + prompts

    @property
    def num_turns(self) -> int:
        return sum(len(conversation.prompts) for conversation in self.conversations)

    @property
    def order(self) -> list[tuple[int, int]]:
        """Return the turns as (conversation, turn). Each round has one turn of every conversation. Every second round
        has the reverse order.

        So a round starts with the last conversation of the previous round, and all tiers get hits. If all rounds had
        the same order, LRU would evict each page just before it is needed again.
        """
        documents, turns = range(len(self.conversations)), range(len(self.conversations[0].prompts))
        return [(document, turn) for turn in turns for document in (reversed(documents) if turn % 2 else documents)]

    def request(self, conversation: int, turn: int) -> Request:
        """Return the request of a turn. Its id contains both numbers and the name of the conversation."""
        about = self.conversations[conversation]
        return Request(
            request_id=f"{conversation + 1}.{turn + 1} {about.name}",
            tokens=np.array(about.prompts[turn], dtype=np.int64),
            max_new_tokens=self.max_new_tokens,
            eos_ids=self.loaded.eos_ids,
            branch_points=(about.shared,),
        )

    def answer(self, conversation: int, turn: int, output: RequestOutput) -> str:
        decoder = self.loaded.tokenizer.decoder(self.conversations[conversation].prompts[turn])
        return ("".join(map(decoder.push, output.tokens)) + decoder.finish()).strip()


def run(flags: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if both runs generate equal tokens, else 1."""
    say: Say = functools.partial(new_console().print, highlight=False, markup=False, soft_wrap=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    outcome = converse(flags, say)
    say("\n" + outcome.summary())
    return 0 if outcome.identical else 1


def converse(flags: argparse.Namespace, say: Say) -> Outcome:
    """Serve every turn of every conversation. Print the table, the answers (unless the weights are random), and the
    comparison of both runs."""
    start_s = time.perf_counter()
    workload = _load(flags, say)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-demo-"))
        config = _configure(flags, workload, Path(folder) / "store")
        with naming_flags(EngineConfig.sources_of(flags)):
            engine = stack.enter_context(build_engine(config, workload.geometry))
        plain = stack.enter_context(_without_cache(workload, config))
        host_tokens = int(engine.stats().get("host.free_pages", 0)) * config.host_page_size
        _announce(workload, config, host_tokens, say)
        turns = _serve(workload, engine, plain, say)
        engine.check()
        stats = dict(engine.stats())
    return Outcome(
        turns=turns,
        sizes={"device": config.device_tokens, "host": host_tokens, "working_set": workload.working_set},
        stats=stats,
        device=_device_name(config.device),
        seconds=time.perf_counter() - start_s,
    )


def _serve(workload: _Workload, engine: CacheEngine, plain: CacheEngine, say: Say) -> list[Turn]:
    """Serve the turns one after another with the cache, then without a cache. Print a line for each turn."""
    order, cached, texts = workload.order, list[RequestOutput](), list[str]()
    scheduler = _scheduler(workload, engine)
    say(_line("request", "prompt", *TIERS, "computed", "ttft ms"))
    with DeferredInterrupt() as interrupt:
        for number, (conversation, turn) in enumerate(order, 1):
            request, begin_s = workload.request(conversation, turn), time.perf_counter()
            output = _answer(scheduler, request, interrupt)
            engine.flush()  # real users' turns are seconds apart, so a turn is on disk before the next
            cached.append(output)
            row = _row(f"{_numbered(number, len(order))}  {request.request_id}", output)
            if number == _MEASURED_TURN:
                seconds = (time.perf_counter() - begin_s) / output.prompt_tokens * workload.computed_tokens
                row += f"  about {duration(seconds)} in all"
            say(row)
            question = workload.conversations[conversation].questions[turn]
            texts.append(_text(question, workload.answer(conversation, turn, output), output))
        if workload.has_answers:
            say("\n" + "\n".join(texts))
        say(f"\nThe same {len(order)} requests without a cache, compared token by token:")
        return list(_compared(workload, plain, cached, interrupt, say))


def _compared(
    workload: _Workload, plain: CacheEngine, cached: Sequence[RequestOutput], interrupt: DeferredInterrupt, say: Say
) -> Iterator[Turn]:
    """Serve the turns without a cache, and print a line for each."""
    scheduler = _scheduler(workload, plain)
    for index, ((conversation, number), output) in enumerate(zip(workload.order, cached, strict=True)):
        request = workload.request(conversation, number)
        unshared = dataclasses.replace(request, namespace=f"turn {index}")
        turn = Turn(request.request_id, number, output, _answer(scheduler, unshared, interrupt))
        say(f"{_numbered(index + 1, len(cached))}  {turn.line()}")
        yield turn


def _numbered(number: int, of: int) -> str:
    """Return `number/of`, as wide for each number."""
    return f"{number:>{len(str(of))}}/{of}"


def _scheduler(workload: _Workload, engine: CacheEngine) -> Scheduler:
    runner = ModelRunner(workload.loaded.model, engine, workload.geometry)
    return Scheduler(engine, runner, chunk_tokens=_CHUNK_TOKENS, max_running=1)


def _answer(scheduler: Scheduler, request: Request, interrupt: DeferredInterrupt) -> RequestOutput:
    """Serve one request. Raises its error if it fails, and KeyboardInterrupt between two steps."""
    scheduler.submit(request)
    try:
        outputs: list[RequestOutput] = []
        while not outputs:
            interrupt.check()
            outputs = scheduler.step()
    finally:
        scheduler.abort_all()
    (output,) = outputs
    if output.error is not None:
        raise output.error
    return output


def _without_cache(workload: _Workload, config: EngineConfig) -> CacheEngine:
    """Return an engine with a device tier for one request and no lower tiers."""
    device_tokens = _pages(workload.max_len, config.page_size) * config.page_size
    window_tokens = max(config.window_tokens, device_tokens) if workload.geometry.window_layers else 0
    device_only = dataclasses.replace(
        config,
        host_bytes=0,
        host_states=0,
        disk=None,
        remote=None,
        device_tokens=device_tokens,
        window_tokens=window_tokens,
    )
    return build_engine(device_only, workload.geometry)


def _load(flags: argparse.Namespace, say: Say) -> _Workload:
    """Load the model and the conversations. Raises ConfigError if a conversation is too long for the model."""
    basis = _basis(flags)
    with naming_flags(EngineConfig.sources_of(flags)):
        require_usable(basis)
    device, dtype = device_named(basis.device), basis.torch_dtype
    if dtype.itemsize == 1:
        dtype = torch.bfloat16  # with fp8, only the pool stores 8 bits
    choice = choose_model(flags.model, say)
    loaded = random_model(dtype, device) if choice.path is None else load_local(choice.path, dtype, device)
    if choice.hub_name:  # the folder name of a hub model is only a revision
        loaded = dataclasses.replace(loaded, name=choice.hub_name)
    if choice.is_packaged:  # end answers of the small model after their first sentence
        loaded = dataclasses.replace(loaded, eos_ids=loaded.eos_ids.union(loaded.tokenizer.encode(".")))
    document_tokens = _PACKAGED_DOCUMENT_TOKENS if choice.is_packaged else _DOCUMENT_TOKENS
    workload = _Workload(
        loaded=loaded,
        geometry=check_supported(loaded.model),
        conversations=chats_about_diaries(
            flags.documents, flags.turns, flags.document_tokens or document_tokens, loaded.tokenizer
        ),
        max_new_tokens=flags.max_new_tokens,
        has_answers=choice.path is not None,
    )
    if workload.max_len > loaded.max_context_len:
        raise ConfigError(
            f"the longest conversation has {workload.max_len} tokens, the model takes {loaded.max_context_len}; lower "
            "--document-tokens or --max-new-tokens"
        )
    return workload


def _configure(flags: argparse.Namespace, workload: _Workload, store: Path) -> EngineConfig:
    """Return the engine's configuration. Unless flags give sizes, the device has capacity for a quarter of the working
    set, and the host for half of it."""
    config = _config(flags, **_defaults(flags, workload, store))
    capacity = config.device_tokens // config.page_size * config.page_size
    for limit, setting in ((capacity, "device_tokens"), (config.max_context_len, "max_context_len")):
        if workload.max_len > limit:
            raise PromptTooLong(workload.max_len, limit, setting)
    return config


def _basis(flags: argparse.Namespace) -> EngineConfig:
    """Return the settings with placeholders for sizes that depend on the workload. Used to raise for invalid settings
    before the model is loaded."""
    disk = {"disk": {"path": tempfile.gettempdir()}} if _has_disk_settings(flags) else {}
    return _config(flags, device_tokens=1 << 20, host_bytes=1 << 20, device="cpu", model_id="not loaded yet", **disk)


def _config(flags: argparse.Namespace, **defaults: object) -> EngineConfig:
    """Return the engine configuration that `flags` describe; dtype is float32 unless given."""
    config = EngineConfig.from_flags(flags, **defaults)
    return dataclasses.replace(config, dtype="float32") if config.dtype == "auto" else config


def _has_disk_settings(flags: argparse.Namespace) -> bool:
    return any(name.startswith("disk.") for name in EngineConfig.sources_of(flags))


def _defaults(flags: argparse.Namespace, workload: _Workload, store: Path) -> dict[str, object]:
    basis = _basis(flags)
    page, rows = basis.host_page_size, row_bytes(workload.geometry, basis.torch_dtype)
    # The device must have capacity for the longest conversation, plus one page for the end of its answer.
    device_tokens = max(_pages(workload.working_set // 4, page), _pages(workload.max_len, page) + 1) * page
    # The host gets at least two pages, and page 0 for padding.
    host_bytes = (max(2, _pages(workload.working_set // 2, page)) + 1) * page * (rows.full + rows.window)
    defaults: dict[str, object] = {
        "device_tokens": device_tokens,
        "host_bytes": host_bytes,
        "device": "cpu",
        "max_requests": 1,
        "max_context_len": _pages(workload.max_len, page) * page,
        "prefill_chunk_tokens": _CHUNK_TOKENS,
        # Load every prefix, so that the demo shows all hits on machines of any speed.
        "prefetch_mode": "wait_complete",
        "prefill_tokens_per_s": 0,
        "model_id": workload.loaded.model_id,
    }
    sources = EngineConfig.sources_of(flags)
    if rows.state and "host_bytes" not in sources:
        # A turn stores two states, at the end of its prompt and at the end of its answer. State 0 is for padding.
        defaults["host_states"] = 2 * workload.num_turns
        defaults["host_bytes"] = host_bytes + (2 * workload.num_turns + 1) * rows.state
    if workload.geometry.window_layers:
        # Window slots suffice for the windows of two requests and for one prefill chunk.
        windows = 2 * (_pages(workload.geometry.window, page) + 1)
        chunk = _pages(min(_CHUNK_TOKENS, workload.max_len), page)
        defaults["window_tokens"] = max(device_tokens, (windows + chunk) * page)
    if _has_disk_settings(flags) or basis.has_host:
        defaults["disk"] = {"path": str(store)}
    return defaults


def _announce(workload: _Workload, config: EngineConfig, host_tokens: int, say: Say) -> None:
    """Print the model and the sizes of the tiers."""
    loaded, rows = workload.loaded, row_bytes(workload.geometry, config.torch_dtype)
    kib = (rows.full + rows.window) / 1024
    disk = "none" if config.disk is None else config.disk.path
    say(
        f"{loaded.name}, {loaded.num_weights / 1e6:.1f} million weights, {kib:g} KiB of KV a token, "
        f"on {_device_name(config.device)}\n"
        f"{len(workload.conversations)} conversations need {workload.working_set} tokens of KV: "
        f"device {config.device_tokens}, host {host_tokens}, disk {disk}\n"
    )


def _line(name: str, *columns: object) -> str:
    cells = "".join(f"{cell:>{width}}" for cell, width in zip(columns, _WIDTHS[1:], strict=True))
    return f"{_short(name)}{cells}".rstrip()


def _short(name: str) -> str:
    """Return the name in the width of its column."""
    return f"{name if len(name) < _WIDTHS[0] else f'{name[: _WIDTHS[0] - 2]}…':<{_WIDTHS[0]}}"


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


def _device_name(name: str) -> str:
    return torch.cuda.get_device_name(name) if name.startswith("cuda") else name
