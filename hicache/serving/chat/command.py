"""`hicache chat`: ask about files in a terminal or through a pipe. Imports no torch if the server runs elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator

import openai
from rich.console import Console
from rich.text import Text

from hicache.config import EngineConfig
from hicache.config.environment import api_key
from hicache.console import new_console, printable
from hicache.errors import ConfigError
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.loopback import is_loopback
from hicache.serving.chat.conversation import Conversation, documents_of

_TIMEOUT_S = 600.0  # until the next part of an answer, because a long prompt takes long to compute


def run(flags: argparse.Namespace) -> int:
    """Chat until the end of the input. Returns 0. Answers are written to stdout, notes to stderr. Raises
    HiCacheError."""
    documents, notes = documents_of(flags.files), new_console(sys.stderr)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if interactive or sys.stdin is None else sys.stdin.read().strip()
    if not interactive and not piped:
        raise ConfigError("there is no question; write one on the standard input, or chat in a terminal")
    with _server(flags, notes) as server:
        conversation = Conversation(
            _client(server, flags.api_key or api_key() or "none"), server, flags.max_tokens, documents
        )
        for question in _typed(notes) if interactive else [piped]:
            _answer(conversation, question, notes)
    return 0


def _client(server: str, key: str) -> openai.OpenAI:
    """The client of a server. Raises ConfigError if the environment names an unusable proxy."""
    try:
        through = openai.DefaultHttpxClient(trust_env=False) if is_loopback(server) else None
        return openai.OpenAI(
            base_url=f"{server}/v1", api_key=key, max_retries=0, timeout=_TIMEOUT_S, http_client=through
        )
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"a proxy of the environment cannot be used: {error}; correct http_proxy, https_proxy or all_proxy, or "
            "name the server in no_proxy"
        ) from error


@contextlib.contextmanager
def _server(flags: argparse.Namespace, notes: Console) -> Iterator[str]:
    """The address of the server given by --url, or of a server started here."""
    if flags.url is None:
        server = importlib.import_module("hicache.serving.server.embedded")
        with server.embedded(flags, lambda line: _note(notes, line)) as url:
            yield url.removesuffix("/v1")
    elif flags.model is not None or EngineConfig.sources_of(flags):
        raise ConfigError("the server at --url has a model and settings of its own; leave --url or the others out")
    else:
        client = MetricsClient(flags.url)
        client.read()  # raises unless it is a hicache server
        yield client.server


def _typed(notes: Console) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # with it, input() has a history
    _note(notes, "Ctrl-D ends the chat")
    with contextlib.suppress(EOFError):
        while True:
            if question := input("> ").strip():
                yield question
    print()


def _answer(conversation: Conversation, question: str, notes: Console) -> None:
    """Print the answer while it is generated, and a line about its prompt."""
    out, shown = new_console(), False

    def show(part: str) -> None:
        nonlocal shown
        if part:
            waiting.stop()
            lines, shown = map(printable, part.expandtabs(4).split("\n")), True
            out.print("\n".join(lines), end="", markup=False, highlight=False, soft_wrap=True)

    try:
        with notes.status("computing the prompt") as waiting:
            line = conversation.ask(question, show)
    finally:
        if shown:
            out.print()
    _note(notes, line)


def _note(notes: Console, line: str) -> None:
    notes.print(Text(line, style="dim"), soft_wrap=True)
