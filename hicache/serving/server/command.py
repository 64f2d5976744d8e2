"""`hicache serve`: load a model, choose sizes, listen, and serve until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn

from hicache.build.factory import build_engine
from hicache.build.validation import device_named
from hicache.config import EngineConfig
from hicache.config.environment import api_keys
from hicache.config.flags import naming_flags
from hicache.config.settings import SOCKET
from hicache.console import announce
from hicache.engine import CacheEngine
from hicache.errors import ConfigError
from hicache.host.cores import usable_cores
from hicache.layout import ModelGeometry
from hicache.monitoring.figures import figures
from hicache.monitoring.kept import KeptReadings
from hicache.process import logs
from hicache.replay.recorder import TraceRecorder
from hicache.serving.models import (
    ByteTokenizer,
    LoadedModel,
    Tokenizer,
    load_local,
    local_tokenizer,
    random_model,
)
from hicache.serving.packaged_model import ModelChoice, choose_model
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from hicache.serving.server.app import AppSettings, create_app
from hicache.serving.server.connections import (
    MAX_BACKLOG,
    Connection,
    ConnectionLimits,
    bounds_by_descriptors,
    require_known_parser,
)
from hicache.serving.server.engine_thread import EngineThread, Event
from hicache.serving.server.frontend import Frontend, Limits, ServedModel
from hicache.serving.server.prompts import PromptEncoder, PromptLimits
from hicache.serving.server.sizes import engine_config, first_config, max_len, model_dtype
from hicache.serving.server.workers import PromptWorkers
from hicache.serving.support import check_supported
from hicache.serving.warm_up import warm_up
from hicache.store_command.smaller_budget import asks_on_terminal, confirm_smaller_budget

# maximum bytes of a body, and of a token in it (an id, or text with escapes).
_BODY_BYTES, _TOKEN_BYTES = 16 << 20, 16
_CLOSE_S = 5  # time at the end for clients that do not read their answer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """The parts of a server: the loaded model, its engine, the names of the model, the API keys of clients, the
    recorder of a trace if there is one, a function that loads the tokenizer, and the bound socket."""

    loaded: LoadedModel
    geometry: ModelGeometry
    engine: CacheEngine
    max_len: int
    names: tuple[str, ...]
    api_keys: tuple[str, ...]
    recorder: TraceRecorder | None
    load_tokenizer: Callable[[], Tokenizer]
    listener: socket.socket


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 1 if the engine failed or its final check found a fault, else 0."""
    with logs.server_lines(getattr(logging, flags.log_level.upper())), prepared(flags, log.info) as context:
        return asyncio.run(_until_signalled(flags, context))


@contextlib.contextmanager
def prepared(flags: argparse.Namespace, say: Callable[[str], object]) -> Iterator[ServerContext]:
    """Load the model and build the engine according to the flags. The engine is closed at the end of the `with` block.
    `say`: called with messages on the packaged model. Raises HiCacheError."""
    require_known_parser()
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    keys = _checked_keys(flags.api_key)
    if flags.record is not None and (flags.record.exists() or not flags.record.parent.is_dir()):
        raise ConfigError(f"--record {flags.record} cannot be made; give a new file in a folder that exists")
    basis = first_config(flags)
    if basis.disk is not None and not basis.disk.path.startswith(SOCKET) and not flags.yes:
        confirm_smaller_budget(basis.disk.path, basis.disk.budget_bytes, ask=asks_on_terminal())
    transformers.utils.logging.disable_progress_bar()
    with contextlib.closing(_bound_socket(flags.host, flags.port)) as listener:
        choice = choose_model(flags.model, say)
        names = _checked_names(flags.served_model_name or [choice.name])
        loaded = _loaded(flags, choice, basis)
        geometry = check_supported(loaded.model, flags.attention)
        config = engine_config(flags, loaded, geometry, basis)
        with naming_flags(EngineConfig.sources_of(flags)):
            engine = build_engine(config, geometry)
        length = max_len(config, loaded)
        load_tokenizer = ByteTokenizer if choice.path is None else partial(local_tokenizer, choice.path)
        with _recording(flags.record, engine) as recorder:
            yield ServerContext(loaded, geometry, engine, length, names, keys, recorder, load_tokenizer, listener)


@contextlib.contextmanager
def _recording(path: Path | None, engine: CacheEngine) -> Iterator[TraceRecorder | None]:
    if path is None:
        yield None
        return
    with TraceRecorder(path, engine.inspect.context.tree.page_size) as recorder:
        yield recorder
    log.info("recorded", extra={"fields": {"requests": recorder.num_written}})


def _checked_keys(given: str | None) -> tuple[str, ...]:
    """Return the API keys of the flag, or without the flag those of the environment. Raises ConfigError if a key cannot
    be sent in a header; the message does not contain the key."""
    keys = api_keys() if given is None else tuple(given.split(","))
    if given is not None and "" in keys:
        raise ConfigError("--api-key has an empty key; give keys with commas between them, or leave the flag out")
    if not all("!" <= character <= "~" for character in "".join(keys)):
        raise ConfigError(
            "the API key has characters that are not visible ASCII, which a header cannot carry as they are"
        )
    return keys


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names by which clients request the model. Raises ConfigError for a name that is not valid UTF-8, which
    JSON requires."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the model's name {name!a} is not UTF-8; give another --served-model-name") from None
    return tuple(dict.fromkeys(names))


def _loaded(flags: argparse.Namespace, choice: ModelChoice, basis: EngineConfig) -> LoadedModel:
    device, dtype = device_named(basis.device), model_dtype(basis)
    if choice.path is not None:
        return load_local(choice.path, dtype, device)
    return random_model(torch.float32 if dtype == "auto" else dtype, device)


async def _until_signalled(flags: argparse.Namespace, context: ServerContext) -> int:
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    return await serve(flags, context, signals, partial(_announce, ", ".join(context.names)))


def _announce(name: str, url: str) -> None:
    page = f"{url.removesuffix('/v1')}/dashboard"
    announce(f"hicache: serving {name} on {url}\nhicache: to look at it in a browser: {page}")


async def serve(
    flags: argparse.Namespace, context: ServerContext, signals: asyncio.Queue[int], on_listening: Callable[[str], None]
) -> int:
    """Serve until a signal arrives, and then wait until open requests have ended. A second signal ends them.
    `on_listening`: called with the URL when clients can connect. Returns the exit status."""
    loop = asyncio.get_running_loop()
    loaded, engine = context.loaded, context.engine
    model = ServedModel(
        names=context.names,
        tokenizer=loaded.tokenizer,
        vocab_size=int(loaded.model.config.get_text_config().vocab_size),
        max_len=context.max_len,
        eos_ids=loaded.eos_ids,
        sampling=loaded.sampling,
    )
    runner = ModelRunner(loaded.model, engine, context.geometry, attention=flags.attention, compiled=flags.compile)
    thread = EngineThread(engine, _scheduler(flags, engine, runner), lambda: _warm_up(engine, runner, flags))
    limits = Limits(flags.max_running + flags.max_queued, flags.request_timeout_s)
    frontend = Frontend(model, limits, thread, engine.describe(), context.recorder)
    encoder = PromptEncoder(model.tokenizer, PromptLimits(model.max_len, limits.max_open, model.vocab_size))
    workers = PromptWorkers(encoder, context.load_tokenizer)
    max_body_bytes = flags.max_body_bytes or min(
        _BODY_BYTES, (1 << 20) + _TOKEN_BYTES * model.max_len * limits.max_open
    )
    kept = KeptReadings(lambda: figures(frontend.metrics.registry.collect()))
    app = create_app(frontend, workers, AppSettings(context.api_keys, max_body_bytes), kept)
    max_connections, backlog = bounds_by_descriptors(flags.max_connections)
    connections = ConnectionLimits(max_connections, flags.request_timeout_s + _CLOSE_S, app.refused)
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(Connection, connections),  # type: ignore[arg-type]  # uvicorn calls it like the class
            backlog=backlog,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",  # uvicorn's warnings are about requests, which this server logs itself
            access_log=False,
            server_header=False,
            timeout_keep_alive=flags.keep_alive_s,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )
    thread.start(lambda events: _on_loop(loop, frontend, events))
    keeping = asyncio.create_task(kept.run())
    try:
        return await _until_stopped(server, context, frontend, thread, flags.grace_s, signals, on_listening)
    finally:
        keeping.cancel()
        workers.close()


def _scheduler(flags: argparse.Namespace, engine: CacheEngine, runner: ModelRunner) -> Scheduler:
    return Scheduler(
        engine,
        runner,
        chunk_tokens=flags.chunk_tokens,
        max_pass_s=flags.max_pass_s,
        max_running=flags.max_running,
        priority_level_s=flags.priority_level_s,
        max_overtake_s=flags.max_overtake_s,
    )


def _warm_up(engine: CacheEngine, runner: ModelRunner, flags: argparse.Namespace) -> None:
    """Compile kernels and capture graphs on CUDA. A CPU needs no warm-up, because nothing is compiled there."""
    if engine.pool.device.type != "cuda":
        return
    begin_s = time.perf_counter()
    warm_up(engine, runner, flags.chunk_tokens, flags.max_running)
    log.info("warm", extra={"fields": {"seconds": round(time.perf_counter() - begin_s, 3)}})


def _on_loop(loop: asyncio.AbstractEventLoop, frontend: Frontend, events: Sequence[Event]) -> None:
    loop.call_soon_threadsafe(frontend.deliver, events)


async def _until_stopped(
    server: _Server,
    context: ServerContext,
    frontend: Frontend,
    thread: EngineThread,
    grace_s: float,
    signals: asyncio.Queue[int],
    on_listening: Callable[[str], None],
) -> int:
    """Serve until a signal arrives. Then refuse new requests, wait for the open requests, and close the engine.

    A second signal, or the end of the grace period of `grace_s` seconds, ends the open requests. Returns the exit
    status.
    """
    listener = context.listener
    serving = asyncio.create_task(server.serve([listener]))
    await _any(serving, server.listening.wait())
    if not serving.done():
        url = _url(listener)
        if not context.api_keys and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            log.warning("other machines can send requests without an API key; set HICACHE_API_KEY")
        log.info("listening", extra={"fields": {"url": url, "model": ", ".join(context.names)}})
        for handler in logging.getLogger().handlers:  # earlier log lines precede the announcement
            handler.flush()
        on_listening(url)
        await _any(serving, signals.get())
    log.info("stopping", extra={"fields": {"grace_s": grace_s}})
    frontend.begin_stop()
    await _any(serving, signals.get(), frontend.wait_idle(), timeout_s=grace_s)
    thread.stop()
    await asyncio.get_running_loop().run_in_executor(None, thread.join)
    server.should_exit = True
    await serving
    log.info("stopped", extra={"fields": {"failed": thread.failed}})
    return 1 if thread.failed else 0


async def _any(serving: asyncio.Task[None], *events: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
    """Wait until the server ends, one of the events is set, or the timeout has passed."""
    tasks = [asyncio.create_task(event) for event in events]
    await asyncio.wait([serving, *tasks], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals. The command handles them, so that requests can finish before
    connections are closed. `listening`: set when clients can connect."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MAX_BACKLOG)  # the kernel's queue of connections that are not accepted yet
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is reported without waiting for the model.
    uvicorn listens on the socket later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from error
    return listener
