"""The main job on one command: long conversations over a device far too small for them, checked token by token.

    plan sizes -> serve every turn through device, host and disk -> serve the same prompts without any cache -> compare

Owns the flags of `hicache demo`. May import everything below serving.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import tempfile
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console

from hicache.config import EngineConfig
from hicache.errors import ConfigError, PromptTooLong
from hicache.factory import build_engine
from hicache.layout import ModelGeometry
from hicache.serving.drive import Job, ask_transformers, serve_cached, serve_without_cache
from hicache.serving.models import LoadedModel, load_local, random_model
from hicache.serving.report import Report
from hicache.serving.request import Sampling
from hicache.serving.support import check_supported
from hicache.serving.view import View
from hicache.serving.workload import Conversation, Shape, own_documents, recorded_session, standard_library
from hicache.settings import Number, Whole, as_flag

AUDIT_FILE = "kv-audit.jsonl"
_DEFAULT_TURNS = 3
_COUNT = as_flag(Whole("a count", 1, 1 << 16))
_TOKENS = as_flag(Whole("a number of tokens", 1, 1 << 30))
_WHOLE = as_flag(Whole("a whole number"))
_NUMBER = as_flag(Number("a number"))


class _Console(Console):
    """Leaves a closed pipe to the command line, where rich would end the process with the status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `hicache demo`; those of the engine stand in a group of their own."""
    what = parser.add_argument_group("what is served")
    what.add_argument("--model", metavar="PATH", help="a local transformers model with its tokenizer (default: random)")
    what.add_argument("--input", nargs="+", metavar="FILE", help="own documents, one conversation each")
    what.add_argument("--session", nargs="+", metavar="FILE", help="recorded sessions, JSON lines with an 'input' each")
    what.add_argument("--documents", type=_COUNT, default=6, help="modules of the standard library (default 6)")
    what.add_argument("--turns", type=_COUNT, help="questions to each document (default 3; sessions: all)")
    what.add_argument("--document-tokens", type=_TOKENS, default=12288, help="tokens of the longest (default 12288)")
    what.add_argument("--max-prompt-tokens", type=_TOKENS, default=16384, help="leave longer prompts of sessions out")
    what.add_argument("--max-new-tokens", type=_TOKENS, default=16, help="tokens generated a turn (default 16)")
    what.add_argument("--seed", type=_WHOLE, default=0, help="of the random weights and of sampling (default 0)")
    what.add_argument("--sample", action="store_true", help="sample answers (temperature 1 unless given)")
    what.add_argument("--temperature", type=_NUMBER, help="sample with this temperature; 0 is greedy")
    what.add_argument("--top-k", type=_WHOLE, default=0, help="sample among the k most likely (default 0: all)")
    what.add_argument(
        "--top-p", type=_NUMBER, default=1.0, help="sample among the most likely of this share (default 1)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--disk", dest="disk_path", metavar="DIR", help="keep the store here; a later run finds its pages")
    how.add_argument("--json", metavar="FILE", help="write the figures")
    how.add_argument("--concurrency", type=_COUNT, default=1, help="requests at a time (default 1)")
    how.add_argument("--chunk", type=_TOKENS, default=8192, help="prompt tokens a step (default 8192)")
    how.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True, help="compare with a run without any cache"
    )
    how.add_argument(
        "--check-against", choices=["transformers"], help="compare with the library's own generate too (greedy answers)"
    )
    engine = parser.add_argument_group("the engine (sizes follow from the conversations unless given)")
    EngineConfig.add_flags(engine)


def run(flags: argparse.Namespace) -> int:
    """Run the demo. Returns 0, or 1 where the outcome differs from the run without a cache."""
    start_s = time.perf_counter()
    console = _Console()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if flags.json is not None:
        _check_writable(Path(flags.json))
    job = _prepare(flags, console)
    with contextlib.ExitStack() as stack:
        temporary = ""
        if flags.disk_path is None:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-demo-"))
        config = _configure(flags, job, temporary)
        sidecar = None
        if config.disk is not None and not (temporary and config.disk.path.startswith(temporary)):
            sidecar = Path(config.disk.path) / AUDIT_FILE
        with build_engine(config, job.geometry) as engine:
            host_tokens = int(engine.stats().get("host.free_pages", 0)) * config.host_page_size
            _announce(job, config, host_tokens, console)
            view = stack.enter_context(View(console))
            served = serve_cached(job, engine, config.dtype, sidecar, lambda turn: view.show(turn.row()))
        if flags.baseline:
            view.heading("the same prompts without a cache:")
            serve_without_cache(job, config, served.turns, lambda turn: view.show(turn.row()))
        if flags.check_against:
            ask_transformers(job, served.turns)
    report = Report(
        turns=served.turns,
        audit=served.audit,
        stats=served.stats,
        sizes={
            "working_set_tokens": job.working_set,
            "device_tokens": config.device_tokens,
            "host_tokens": host_tokens,
        },
        model=job.loaded.name,
        device=_device_name(config.device),
        seconds=time.perf_counter() - start_s,
        compared=flags.baseline,
        compared_generate=flags.check_against is not None,
    )
    console.print("\n" + report.summary(), highlight=False, markup=False, soft_wrap=True)
    if flags.json is not None:
        Path(flags.json).write_text(json.dumps(report.to_json(), indent=1) + "\n")
    return 0 if report.identical else 1


def _prepare(flags: argparse.Namespace, console: Console) -> Job:
    """Load the model, read the conversations, check the limits."""
    shape = Shape(flags.documents, flags.turns if flags.turns is not None else _DEFAULT_TURNS, flags.document_tokens)
    temperature = flags.temperature if flags.temperature is not None else float(flags.sample)
    sampling = Sampling(temperature, flags.top_k, flags.top_p, flags.seed)
    if flags.check_against and temperature:
        raise ConfigError("--check-against transformers compares greedy answers; leave --sample and --temperature out")
    basis = _basis(flags)
    device, dtype = _device(basis.device), basis.torch_dtype
    if dtype.itemsize == 1:
        dtype = torch.bfloat16  # of the model; the pool alone stores 8 bits
    loaded = load_local(flags.model, dtype, device) if flags.model else random_model(flags.seed, dtype, device)
    geometry = check_supported(loaded.model)
    job = Job(
        loaded=loaded,
        geometry=geometry,
        talks=_conversations(flags, shape, loaded, console),
        max_new_tokens=flags.max_new_tokens,
        concurrency=flags.concurrency,
        chunk_tokens=flags.chunk,
        sampling=sampling,
    )
    if job.longest > loaded.max_context_len:
        raise ConfigError(
            f"the longest conversation has {job.longest} tokens, the model takes {loaded.max_context_len}; lower "
            "--document-tokens, --max-prompt-tokens, --turns or --max-new-tokens"
        )
    return job


def _conversations(
    flags: argparse.Namespace, shape: Shape, loaded: LoadedModel, console: Console
) -> list[Conversation]:
    talks: list[Conversation] = []
    for path in flags.session or ():
        talk, skipped = recorded_session(path, flags.turns, flags.max_prompt_tokens, loaded.tokenizer, loaded.bos)
        talks.append(talk)
        if skipped:
            console.print(f"{path}: {skipped} turns left out (--turns, --max-prompt-tokens, or empty)", highlight=False)
    if flags.input:
        talks.extend(own_documents(flags.input, shape, loaded.tokenizer, loaded.bos))
    return talks or list(standard_library(shape, loaded.tokenizer, loaded.bos))


def _configure(flags: argparse.Namespace, job: Job, temporary: str) -> EngineConfig:
    """A quarter of the working set on the device, half on the host, the rest on disk, unless flags say otherwise."""
    basis = _basis(flags)
    page = basis.host_page_size
    # Two pages at the least, and beside them the one that the host keeps as a sink.
    host_pages = max(2, _pages(job.working_set // 2, page)) + 1
    host_bytes = host_pages * page * _token_bytes(job.geometry, basis)
    if job.geometry.state is not None:
        # Of the host's bytes states get a quarter: two for each turn, where its prompt and where its answer ended.
        host_bytes = max(host_bytes * 4 // 3, 8 * job.num_turns * _state_bytes(job.geometry))
    config = EngineConfig.from_flags(flags, **_defaults(job, temporary, page, host_bytes=host_bytes))
    if _keeps_no_disk(job.geometry):
        config = dataclasses.replace(config, disk=None)  # that of --disk, or of the file of --config
    most = config.device_tokens // config.page_size * config.page_size
    if job.longest > most:
        raise PromptTooLong(job.longest, most, "device_tokens")
    if job.longest > config.max_context_len:
        raise PromptTooLong(job.longest, config.max_context_len, "max_context_len")
    return config


def _basis(flags: argparse.Namespace) -> EngineConfig:
    """The settings before anything is known of model and conversations: wrong ones show early."""
    return EngineConfig.from_flags(
        flags, device_tokens=1 << 20, host_bytes=1 << 30, dtype="float32", device="cpu", model_id="not loaded yet"
    )


def _defaults(job: Job, temporary: str, page: int, host_bytes: int) -> dict[str, object]:
    # The longest conversation must fit, with one page to spare for the end of its answer.
    device_tokens = max(_pages(job.working_set // 4, page), _pages(job.longest, page) + 1) * page
    defaults: dict[str, object] = {
        "device_tokens": device_tokens,
        "host_bytes": host_bytes,
        "dtype": "float32",
        "device": "cpu",
        "max_requests": job.concurrency,
        "max_context_len": _pages(job.longest, page) * page,
        "prefetch_mode": "wait_complete",
        "model_id": job.loaded.model_id,
    }
    if job.geometry.window_layers:
        # The windows of two requests and a chunk that is computed, whose slots the window leaves as it moves on.
        windows, chunk = 2 * (_pages(job.geometry.window, page) + 1), _pages(min(job.chunk_tokens, job.longest), page)
        defaults["window_tokens"] = max(device_tokens, (windows + chunk) * page)
    if temporary and not _keeps_no_disk(job.geometry):
        defaults["disk"] = {"path": str(Path(temporary) / "store")}
    return defaults


def _announce(job: Job, config: EngineConfig, host_tokens: int, console: Console) -> None:
    kib = _token_bytes(job.geometry, config) / 1024
    disk = config.disk.path if config.disk is not None else "none"
    if _keeps_no_disk(job.geometry):
        disk = "none (it keeps pages of full attention alone, and this model has windows or recurrent layers)"
    console.print(
        f"{job.loaded.name}, {job.loaded.num_weights / 1e6:.1f} million weights, {kib:g} KiB of KV a token, "
        f"on {_device_name(config.device)}\n"
        f"{len(job.talks)} conversations need {job.working_set} tokens of KV: device {config.device_tokens}, "
        f"host {host_tokens}, disk {disk}\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _token_bytes(geometry: ModelGeometry, config: EngineConfig) -> int:
    """Bytes of keys and values of one token over all attention layers."""
    dims = geometry.head_dim + (geometry.v_head_dim or geometry.head_dim)
    num_layers = len(geometry.full_layers) + len(geometry.window_layers)
    return num_layers * geometry.head_num * dims * config.torch_dtype.itemsize


def _state_bytes(geometry: ModelGeometry) -> int:
    """Bytes of a recurrent state over all layers."""
    state = geometry.state
    if state is None:
        return 0
    conv_numel = sum(math.prod(shape) for shape in state.conv)
    temporal_numel = math.prod(state.temporal)
    per_layer = conv_numel * state.conv_dtype.itemsize + temporal_numel * state.temporal_dtype.itemsize
    return len(geometry.recurrent_layers) * per_layer


def _keeps_no_disk(geometry: ModelGeometry) -> bool:
    """Whether the disk tier lacks what this model needs of a page."""
    return bool(geometry.window_layers or geometry.recurrent_layers)


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: write cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device={name!r}: torch sees {count} CUDA devices; use one of them, or --device cpu")
    return device


def _device_name(name: str) -> str:
    return torch.cuda.get_device_name(name) if name.startswith("cuda") else name


def _check_writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write --json {path}: {error.strerror}") from error
