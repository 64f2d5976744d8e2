"""`hicache demo`: serves long conversations over a device tier far too small for them and compares every token.

choose sizes -> serve every turn through device, host and disk -> serve the same prompts without a cache -> compare
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import transformers

from hicache.build.factory import build_engine
from hicache.build.sizing import row_bytes
from hicache.build.validation import device_named, require_usable
from hicache.config import EngineConfig
from hicache.config.flags import naming_flags
from hicache.console import new_console, require_writable, write_whole
from hicache.errors import ConfigError, PromptTooLong
from hicache.serving.document_chats import chats_about_diaries
from hicache.serving.drive import serve_cached, serve_with_transformers, serve_without_cache
from hicache.serving.models import load_local, random_model
from hicache.serving.packaged_model import choose_model
from hicache.serving.report import HEADER, Report, Turn
from hicache.serving.support import check_supported
from hicache.serving.workload import DocumentShape, Workload, standard_library

Say: TypeAlias = Callable[[str], object]

AUDIT_FILE = "kv-audit.jsonl"
_SHAPE, _NEW_TOKENS = DocumentShape(documents=6, turns=3, document_tokens=12288), 16
# A model that can answer has 40 times as many weights: about a minute of two CPU cores.
_CHATS_SHAPE, _CHATS_NEW_TOKENS = DocumentShape(documents=4, turns=3, document_tokens=1024), 32


def run(flags: argparse.Namespace) -> int:
    """Run the demo. Returns 0, or 1 if a token or a page differs from the runs it is compared with."""
    start_s = time.perf_counter()
    say: Say = functools.partial(new_console().print, highlight=False, markup=False, soft_wrap=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if flags.json is not None:
        require_writable("--json", Path(flags.json))
    workload = _prepare(flags, say)
    with contextlib.ExitStack() as stack:
        temporary = ""
        if flags.disk_path is None:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-demo-"))
        config = _configure(flags, workload, temporary)
        sidecar = None
        if config.disk is not None and not (temporary and config.disk.path.startswith(temporary)):
            sidecar = Path(config.disk.path) / AUDIT_FILE
        with build_engine(config, workload.geometry) as engine:
            host_tokens = int(engine.stats().get("host.free_pages", 0)) * config.host_page_size
            _announce(workload, config, host_tokens, say)
            say(HEADER)
            served = serve_cached(workload, engine, config.dtype, sidecar, lambda turn: say(turn.line()))
        if flags.baseline:
            say("\nthe same prompts without a cache:")
            serve_without_cache(workload, config, served.turns, lambda turn: say(turn.line()))
        if flags.check_against:
            serve_with_transformers(workload, served.turns)
    _add_texts(workload, served.turns)
    report = Report(
        turns=served.turns,
        audit=served.audit,
        stats=served.stats,
        sizes={
            "working_set_tokens": workload.working_set,
            "device_tokens": config.device_tokens,
            "host_tokens": host_tokens,
        },
        model=workload.loaded.name,
        device=_device_name(config.device),
        seconds=time.perf_counter() - start_s,
        compared=flags.baseline,
        compared_generate=flags.check_against is not None,
    )
    if report.answers():
        say("\n" + report.answers())
    say("\n" + report.summary())
    if flags.json is not None:
        write_whole(Path(flags.json), json.dumps(report.to_json(), indent=1) + "\n")
    return 0 if report.identical else 1


def _prepare(flags: argparse.Namespace, say: Say) -> Workload:
    """Load the model and the conversations. Raises ConfigError if a conversation is too long for the model."""
    basis = _basis(flags)
    with naming_flags(EngineConfig.sources_of(flags)):
        require_usable(basis)
    device, dtype = device_named(basis.device), basis.torch_dtype
    if dtype.itemsize == 1:
        dtype = torch.bfloat16  # of the model; only the pool stores 8 bits
    choice = choose_model(flags.model, say)
    given = {name: getattr(flags, name) for name in ("documents", "turns", "document_tokens")}
    shape = dataclasses.replace(
        _CHATS_SHAPE if choice.is_packaged else _SHAPE, **{name: n for name, n in given.items() if n is not None}
    )
    path = choice.path
    loaded = random_model(flags.seed, dtype, device) if path is None else load_local(path, dtype, device)
    if choice.hub_name:  # its folder is called by the revision
        loaded = dataclasses.replace(loaded, name=choice.hub_name)
    if choice.is_packaged:  # a small model has little to add to its first sentence
        loaded = dataclasses.replace(loaded, eos_ids=loaded.eos_ids.union(loaded.tokenizer.encode(".")))
    geometry = check_supported(loaded.model)
    workload = Workload(
        loaded=loaded,
        geometry=geometry,
        conversations=(chats_about_diaries if choice.is_packaged else standard_library)(shape, loaded.tokenizer),
        max_new_tokens=flags.max_new_tokens or (_CHATS_NEW_TOKENS if choice.is_packaged else _NEW_TOKENS),
        chunk_tokens=flags.chunk,
    )
    if workload.max_len > loaded.max_context_len:
        raise ConfigError(
            f"the longest conversation has {workload.max_len} tokens, the model takes {loaded.max_context_len}; lower "
            "--document-tokens or --max-new-tokens"
        )
    return workload


def _add_texts(workload: Workload, turns: Sequence[Turn]) -> None:
    """Question and answer of each turn whose question is known."""
    for turn in turns:
        conversation = workload.conversations[turn.conversation]
        if conversation.questions:
            decoder = workload.loaded.tokenizer.decoder(conversation.prompts[turn.number])
            answer = "".join(map(decoder.push, turn.cached.tokens)) + decoder.finish()
            turn.question, turn.answer = conversation.questions[turn.number], answer.strip()


def _configure(flags: argparse.Namespace, workload: Workload, temporary: str) -> EngineConfig:
    """Capacity for a quarter of the working set on the device and half of it on the host, unless flags say
    otherwise."""
    config = _config(flags, **_defaults(flags, workload, temporary))
    capacity = config.device_tokens // config.page_size * config.page_size
    for limit, setting in ((capacity, "device_tokens"), (config.max_context_len, "max_context_len")):
        if workload.max_len > limit:
            raise PromptTooLong(workload.max_len, limit, setting)
    return config


def _basis(flags: argparse.Namespace) -> EngineConfig:
    """The settings, with placeholders for what depends on the workload: invalid ones raise before the model is
    loaded."""
    disk = {"disk": {"path": tempfile.gettempdir()}} if _has_disk_settings(flags) else {}
    return _config(flags, device_tokens=1 << 20, host_bytes=1 << 30, device="cpu", model_id="not loaded yet", **disk)


def _config(flags: argparse.Namespace, **defaults: object) -> EngineConfig:
    """The configuration of `flags`; dtype is float32 unless they say otherwise."""
    config = EngineConfig.from_flags(flags, **defaults)
    return dataclasses.replace(config, dtype="float32") if config.dtype == "auto" else config


def _has_disk_settings(flags: argparse.Namespace) -> bool:
    return any(name.startswith("disk.") for name in EngineConfig.sources_of(flags))


def _defaults(flags: argparse.Namespace, workload: Workload, temporary: str) -> dict[str, object]:
    basis = _basis(flags)
    page, rows = basis.host_page_size, row_bytes(workload.geometry, basis.torch_dtype)
    # The longest conversation must fit, and one page more for the end of its answer.
    device_tokens = max(_pages(workload.working_set // 4, page), _pages(workload.max_len, page) + 1) * page
    # At least two pages, and page 0, which is the sink.
    host_bytes = (max(2, _pages(workload.working_set // 2, page)) + 1) * page * (rows.full + rows.window)
    defaults: dict[str, object] = {
        "device_tokens": device_tokens,
        "host_bytes": host_bytes,
        "device": "cpu",
        "max_requests": 1,
        "max_context_len": _pages(workload.max_len, page) * page,
        "prefill_chunk_tokens": workload.chunk_tokens,
        # What the tiers bring is shown, however fast this machine computes.
        "prefetch_mode": "wait_complete",
        "prefill_tokens_per_s": 0,
        "model_id": workload.loaded.model_id,
    }
    sources = EngineConfig.sources_of(flags)
    if rows.state and "host_bytes" not in sources:
        # Two states per turn, at the end of its prompt and of its answer, and state 0, which is the sink.
        defaults["host_states"] = 2 * workload.num_turns
        defaults["host_bytes"] = host_bytes + (2 * workload.num_turns + 1) * rows.state
    if workload.geometry.window_layers:
        # The windows of two requests, and the chunk that is computed.
        windows = 2 * (_pages(workload.geometry.window, page) + 1)
        chunk = _pages(min(workload.chunk_tokens, workload.max_len), page)
        defaults["window_tokens"] = max(device_tokens, (windows + chunk) * page)
    if temporary and (_has_disk_settings(flags) or basis.has_host):
        defaults["disk"] = {"path": str(Path(temporary) / "store")}
    return defaults


def _announce(workload: Workload, config: EngineConfig, host_tokens: int, say: Say) -> None:
    """Print the model and the sizes of the tiers."""
    loaded, rows = workload.loaded, row_bytes(workload.geometry, config.torch_dtype)
    kib = (rows.full + rows.window) / 1024
    disk = config.disk.path if config.disk is not None else "none"
    say(
        f"{loaded.name}, {loaded.num_weights / 1e6:.1f} million weights, {kib:g} KiB of KV a token, "
        f"on {_device_name(config.device)}\n"
        f"{len(workload.conversations)} conversations need {workload.working_set} tokens of KV: "
        f"device {config.device_tokens}, host {host_tokens}, disk {disk}\n"
    )


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


def _device_name(name: str) -> str:
    return torch.cuda.get_device_name(name) if name.startswith("cuda") else name
