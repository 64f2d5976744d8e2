"""`hicache chat` in terminals and pipes, with a running server and with a server that it starts itself."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pty
import re
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

import hicache.serving.chat.command
from cli_case import refused
from hicache.console import new_console
from hicache.errors import ConfigError
from hicache.serving.chat.command import Conversation, _answer
from programs import PIPE, Program, command
from server_case import KEY, SECRET, TINY, Server
from waiting import BOUND_S, eventually

LINE = re.compile(r"([\d,]+) prompt tokens: (?:([\d,]+) from (\w+), )?([\d,]+) computed; first token [\d.]+ s(.*)")


def document(path: Path, name: str) -> Path:
    """Write a file whose pages no prompt of another test has."""
    path.write_text(f"{name} {SECRET} " * 60)
    return path


def chat(server: Server, *arguments: object, **settings: object) -> Program:
    """Start a chat. The environment has a proxy that does not answer; the chat must not use it for a server on this
    machine."""
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **proxy, "HICACHE_API_KEY": KEY, "TERM": "dumb", "COLUMNS": "200"}
    return command("chat", "--url", server.root, "--max-tokens", 8, *arguments, env=environment, **settings)


def piped(program: Program, question: str) -> tuple[str, tuple[str, ...]]:
    """Ask a question in a chat that must succeed. Returns the answer, and the groups of `LINE` in the line about it."""
    with program:
        assert program.stdin is not None
        program.stdin.write(question)
        answer, notes = program.communicate()
    assert program.returncode == 0, notes
    found = LINE.fullmatch(notes.splitlines()[-1])
    assert found is not None, notes
    return answer, found.groups()


def test_a_proxy_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the environment has an invalid proxy, a chat with a remote server fails with an error that names the
    variable."""
    monkeypatch.setenv("all_proxy", "nonsense://somewhere")
    with pytest.raises(ConfigError, match="all_proxy"):
        hicache.serving.chat.command._client("http://server.invalid:8000", "none")


def test_a_question_through_a_pipe(server: Server, tmp_path: Path) -> None:
    """Standard output only has the answer. The line on standard error has the tokens of the prompt, which is a chat of
    the file and the question. If the question is asked again, all complete pages come from the device."""
    file = document(tmp_path / "a.txt", "pipe")
    prompt = (
        len(f"user\na.txt:\n{file.read_text().strip()}\n\nQuestion: Which? assistant\n") + 3
    )  # and four special tokens
    answer, (total, *hit, computed, saved) = piped(chat(server, file, stdin=PIPE), "Which?\n")
    assert answer.endswith("\n") and len(answer) > 1 and hit == [None, None] and saved == ""
    assert int(total.replace(",", "")) == int(computed.replace(",", "")) == prompt
    _, (again, cached, tier, computed, _) = piped(chat(server, file, stdin=PIPE), "Which?\n")
    assert (again, tier, int(cached)) == (total, "device", (prompt - 1) // 64 * 64)
    assert int(computed) == prompt - int(cached)


@contextlib.contextmanager
def terminal(server: Server | None, *arguments: object) -> Iterator[tuple[Program, int]]:
    """A chat in its own terminal, and our end of this terminal. Without `server` the chat starts its own."""
    ours, theirs = pty.openpty()
    dumb = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    start = functools.partial(command, "chat", env=dumb) if server is None else functools.partial(chat, server)
    program = start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    with program:
        yield program, ours
    os.close(ours)


def shown_until(ours: int, pattern: str) -> str:
    """Read the output of the terminal up to a required pattern; with an empty pattern, up to its end."""
    shown = ""
    with contextlib.suppress(OSError):  # the other end is closed
        while not (pattern and re.search(pattern, shown)):
            assert select.select([ours], [], [], BOUND_S)[0], shown
            shown += os.read(ours, 4096).decode(errors="replace")
        return shown
    assert not pattern, shown
    return shown


def test_a_conversation_in_a_terminal(server: Server, tmp_path: Path) -> None:
    """The second prompt begins with the first prompt and its answer, so it has their pages from the device. The line
    says how long computing the complete prompt would have taken. Ctrl-D ends the chat with status 0."""
    with terminal(server, document(tmp_path / "a.txt", "terminal")) as (program, ours):
        shown_until(ours, "> ")
        os.write(ours, b"First?\n")
        shown = shown_until(ours, r"first token [^>]+> ")
        first = LINE.search(shown)
        os.write(ours, b"\n Second? \n")
        shown = shown_until(ours, r"first token [^>]+> ")
        second = LINE.search(shown)
        assert first and second, shown
        assert first[2] is None and "without" not in first[5]
        assert int(second[1].replace(",", "")) > int(first[1].replace(",", "")) and second[3] == "device"
        assert int(second[2].replace(",", "")) >= (int(first[1].replace(",", "")) - 1) // 64 * 64
        assert re.match(r", without the cache about [\d.]+ s", second[5])
        os.write(ours, b"\x04")
        shown_until(ours, "")
        assert program.wait(BOUND_S) == 0


@pytest.mark.parametrize("answering", [False, True])
def test_an_interrupt_ends_the_chat(answering: bool, server: Server) -> None:
    """Ctrl-C, at the prompt or in the middle of an answer, ends the chat with status 130 and one line. The server
    continues."""
    with terminal(server, "--max-tokens", 60_000) as (program, ours):
        shown_until(ours, "> ")
        if answering:
            os.write(ours, b"Endless?\n")
            server.wait_for("hicache_requests_running", 1)
        else:  # the prompt shows before the program waits; a signal between these is only handled at the next key
            eventually(lambda: Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
        program.send_signal(signal.SIGINT)
        assert shown_until(ours, "").splitlines()[-1] == "hicache: interrupted"
        assert program.wait(BOUND_S) == 130
    server.wait_idle()


def test_an_interrupt_ends_the_answer_of_its_own_server() -> None:
    """Ctrl-C in the middle of an answer ends the chat's own server too, which does not complete the answer first."""
    flags = ("--model", "random", *TINY, "--device-tokens", 65_536, "--max-tokens", 60_000, "--grace-s", 86_400)
    with terminal(None, *flags) as (program, ours):
        shown_until(ours, "> ")
        os.write(ours, b"Endless?\n")
        shown_until(ours, r"Endless\?\s+\S")
        program.send_signal(signal.SIGINT)
        shown = shown_until(ours, "")
        assert shown.splitlines()[-1] == "hicache: interrupted", shown
        assert program.wait(BOUND_S) == 130


def test_an_interrupt_is_raised_whatever_the_client_library_does() -> None:
    """If Ctrl-C arrives while the client library runs code that replaces exceptions, the chat still ends with
    KeyboardInterrupt, and not with the library's error."""
    ended = threading.Event()

    class Replacing(Conversation):
        def ask(self, question: str, on_text: Callable[[str], object]) -> str:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                while not ended.wait(0.01):
                    on_text("")
            except BaseException as error:
                raise RuntimeError("a schema cannot be built") from error
            return ""

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            _answer(Replacing(openai.OpenAI(api_key="none"), "", 8), "Which?", new_console(io.StringIO()))
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)


def test_a_server_of_its_own_keeps_pages_on_disk(tmp_path: Path) -> None:
    """A chat that starts its own server stores its prompt on the disk. The next chat finds all complete pages of it
    there."""
    file = document(tmp_path / "a.txt", "own")
    flags = ("--model", "random", "--max-tokens", 4, *TINY, "--device-tokens", 8192, "--disk-path", tmp_path / "disk")
    first, second = (
        piped(command("chat", file, *flags, "--host-bytes", "8MiB", stdin=PIPE), "Which?")[1] for _ in range(2)
    )
    assert first[1] is None and second[2] == "disk" and first[0] == second[0]
    assert int(second[1].replace(",", "")) == (int(first[0].replace(",", "")) - 1) // 16 * 16


BAD = {
    "no file": ("{tmp}/missing {url}", "Hi", "missing"),
    "a folder": ("{tmp} {url}", "Hi", "cannot read"),
    "an empty file": ("{tmp}/empty {url}", "Hi", "empty"),
    "no text": ("{tmp}/bytes {url}", "Hi", "UTF-8"),
    "no question": ("{url}", " \n", "standard input"),
    "too long a file": ("{tmp}/long {url}", "Hi", "fewer or shorter files"),
    "too long a file, in the server's words": ("{tmp}/long {url}", "Hi", "error: this model's maximum context"),
    "a wrong key": ("{url} --api-key wrong", "Hi", "--api-key"),
    "a model for another's server": ("{url} --model random", "Hi", "--url"),
    "a setting for another's server": ("{url} --host-bytes 1GiB", "Hi", "--url"),
    "no server": ("--url 127.0.0.1:{closed}", "Hi", "hicache serve"),
    "no model": ("--model {tmp}/missing", "Hi", "missing"),
    "no tokens": ("{url} --max-tokens 0", "Hi", "--max-tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_asked_is_one_line(
    case: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat that cannot begin ends with status 2, an empty standard output, and one line that names the cause or the
    remedy."""
    arguments, question, culprit = BAD[case]
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("x" * 200_000)
    (tmp_path / "question").write_text(question)
    monkeypatch.setenv("HICACHE_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    with (tmp_path / "question").open() as typed:
        monkeypatch.setattr("sys.stdin", typed)
        words = arguments.format(tmp=tmp_path, url=f"--url {server.url}", closed=closed).split()
        assert culprit in refused(capsys, "chat", *words)
