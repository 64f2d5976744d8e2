"""Wrong input to any command gives status 2 and one line that names the flag, the setting or the file."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import xxhash

import hicache.storage
from cli_case import outcome, output, refused
from hicache.config import DiskConfig
from hicache.errors import ConfigError
from hicache.storage import PageFormat
from storage_pages import open_store, put_numbers

HUGE = "9999999999999999999999"
ESCAPES = "\x1b[2J\x1b]0;mine\x07 \x9b31m \u202e \r\n\ud800 end"


def record(identity: object = None, page_bytes: object = 4096, **settings: object) -> bytes:
    """The record of a store, with these changes."""
    formats = [{"page_bytes": page_bytes, "filter": {"kind": "none"}}]
    content = {"format": 1, "identity": identity or {"model": "m"}}
    content["settings"] = {"budget_bytes": 8 << 20, "durability": "relaxed", "level": 1, "formats": formats, **settings}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "xxh3_64": xxhash.xxh3_64_hexdigest(canonical)}).encode()


FILTER = {"kind": "byte_shuffle", "element_bytes": 10**30}
RECORDS = {
    "deep": b"[" * 100_000,
    "size.true": record(page_bytes=True),
    "model.true": record({"model": True}),
    "budget.int64": record(budget_bytes=10**30),
    "budget.less": record(budget_bytes=-1),
    "level.99": record(level=99),
    "filter.int64": record(formats=[{"page_bytes": 4096, "filter": FILTER}]),
    "durability": record(durability="\x1b[2J"),
}
FILES = {
    "file": b"no key",
    "other/store.json": b"something else" * 1000,
    **{f"{name}/store.json": content for name, content in RECORDS.items()},
    "broken.yaml": b"{a: [\n",
    "bytes.yaml": b"\xff\xfe\x00",
    "float.yaml": b"host_bytes: 1.5e+9\n",
    "order.yaml": b"host_eviction_policy: lruu\n",
    "saver.yaml": b"enable_memory_saver: true\n",
    "trace.jsonl": b'{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 3,
    "cut.jsonl": b'{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n{"timestamp": ',
    "no rates.json": b"[]",
    "model/config.json": b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}',
}
DEMO = "demo --model random --documents 1 --turns 1 --document-tokens 2400 --max-new-tokens 1"
PLAN = "plan --model {tmp}/model --gpu 1GiB --host-memory 2MiB --max-running 2 --max-context-len 256"

# The arguments of each case, and the text that the error line must have.
TABLES: dict[str, list[tuple[str, str]]] = {
    "": [("", "COMMAND"), ("polish", "choose one of 'demo'"), ("serv", "COMMAND 'serv' is unknown; serve is one;")],
    DEMO: [
        ("--flavour mild", "--flavour"),
        ("--docu 4", "--docu"),
        ("--turns many", "--turns"),
        (f"--device-tokens {HUGE}", "--device-tokens"),
        ("--model {tmp}/missing", "model"),
        ("--model {tmp}", "model"),
        ("--device-tokens 10", "--device-tokens 10"),
        ("--max-context-len 192", "max_context_len"),
        ("--document-tokens 400000", "--document-tokens"),
        ("--host-bytes 12Q", "12Q"),
        ("--host-bytes 64", "--host-bytes 64 means 64 bytes; add a unit, like 64GB"),
        ("--host-bytes 900TB", "--host-bytes 818.5 TiB does not fit: "),
        ("--host-bytes 0 --disk-path {tmp}/new", "--host-bytes"),
        ("--page-size 48", "--page-size 48"),
        ("--host-page-size 0", "--host-page-size"),
        ("--dtype float7", "dtype"),
        ("--device abacus", "device"),
        ("--config {tmp}/missing.yaml", "missing.yaml"),
        ("--config {tmp}/broken.yaml", "broken.yaml"),
        ("--config {tmp}/float.yaml", "host_bytes"),
        ("--disk-path {tmp}/new --disk-key-file {tmp}/\udcff", "--disk-key-file"),
    ],
    "serve": [("--disk-pth /nowhere", "--disk-pth (--disk-path is one)"), ("--disk-budget-bytes 10GB", "--disk-path")],
    "serve --model random --port 0": [
        ("--model ''", "model (empty)"),
        ("--model {tmp}", "cannot be loaded"),
        ("--port {port}", "--port"),
        ("--port 70000", "--port"),
        ("--host 192.0.2.1", "192.0.2.1"),
        ("--request-timeout-s 0", "--request-timeout-s"),
        ("--host-bytes 64", "--host-bytes 64 means 64 bytes; add a unit, like 64GB"),
        ("--host-bytes 64KB", "--host-bytes 62.5 KiB (64000 bytes) is too little for two host pages of 64 tokens"),
        ("--model {tmp} --host-bytes 900TB", "--host-bytes 818.5 TiB does not fit: "),
        ("--host-bytes 1GiB --disk-path {tmp}/new --disk-budget-bytes 500", "--disk-budget-bytes 500 means 500 bytes"),
        ("--api-key ' a'", "API key"),
        ("--served-model-name m\udcff", "--served-model-name"),
    ],
    "config": [
        ("", "--show"),
        ("--show --disk-readers 3", "--disk-readers"),
        ("--show --page-size 48", "--page-size 48"),
        ("--show --disk-level 3", "--disk-path"),
    ],
    "store": [
        ("", "COMMAND"),
        ("polish {tmp}/store", "polish"),
        ("stat", "DIR"),
        ("stat {tmp}/none", "{tmp}/none"),
        ("stat {long}", "{long}"),
        ("stat {tmp}/\udcff\x1b[2J", "{tmp}/"),
        ("verify {tmp}/empty", "{tmp}/empty"),
        ("verify {tmp}/other", "{tmp}/other"),
        ("verify {tmp}/store --key-file {tmp}/none", "key_file"),
        ("verify {tmp}/store --key-file {tmp}/file", "has no valid key"),
        ("ls {tmp}/file", "{tmp}/file"),
        ("ls {tmp}/store --limit 0", "--limit"),
        (f"ls {{tmp}}/store --limit {HUGE}", "--limit"),
        ("compact ''", "disk path"),
        ("evict {tmp}/store", "--to"),
        ("evict {tmp}/store --to -1", "--to"),
        ("evict {tmp}/store --to 999999999TB", "--to"),
        *((f"verify {{tmp}}/{name}", {"level.99": "level=99"}.get(name, name)) for name in RECORDS),
    ],
    "replay {tmp}/trace.jsonl": [
        ("--device-blocks 0", "--device-blocks"),
        ("--device-tokens 511", "--device-tokens"),
        ("--device-tokens 5120 --device-blocks 10", "--device-blocks"),
        ("--host-bytes 1GiB", "--bytes-per-token"),
        ("--host-bytes 4095 --bytes-per-token 8", "--host-bytes"),
        ("--host-bytes-per-token 8", "--bytes-per-token"),
        ("--warm-up 1.5", "--warm-up"),
        ("--disk-blocks 10", "host_blocks"),
        ("--policies lru,newest", "newest"),
        ("--hints session,last", "last"),
        ("--write-policy never", "--write-policy"),
        ("--json no/such/folder/out.json", "--json"),
        ("--load-bytes-per-s 5GB", "--prefill-tokens-per-s"),
        ("--load-bytes-per-s 5GB --prefill-tokens-per-s 9", "--bytes-per-token"),
        ("--calibration {tmp}/none.json", "none.json"),
        ("--calibration '{tmp}/no rates.json'", "no rates.json"),
    ],
    "replay": [("{tmp}/none.jsonl", "none.jsonl"), ("{tmp}/cut.jsonl --json {tmp}/file", "line 2")],
    "plan": [
        ("--gpu h100", "MODEL"),
        ("nowhere --gpu h100", "nowhere: no such file and no preset; give a transformers"),
        ("meta-llama/Llama-3.1-8B --gpu h200", "no preset (did you mean llama-3.1-8b?); give a "),
        ("{tmp} --gpu h100", "config.json"),
    ],
    PLAN: [
        ("--gpu h900", "--gpu"),
        ("--gpu 700MiB --weight-bytes 800MiB", "--gpus 2"),
        ("--host-memory=-5", "--host-memory"),
        ("--host-memory 64", "--host-memory 64 means 64 bytes; add a unit, like 64GB"),
        ("--host-memory 2KB", "--host-memory 2KB: too little for a page of "),
        ("--disk 500", "--disk 500 means 500 bytes; add a unit, like 500GB"),
        ("--gpus 0", "--gpus"),
        ("--compute-share 1.5", "--compute-share"),
        ("--dtype int3", "--dtype"),
        ("--trace nowhere.jsonl", "nowhere.jsonl"),
        ("--trace {tmp}/trace.jsonl --policy novel", "novel"),
    ],
    "top": [
        ("", "URL"),
        *((url, "hicache serve") for url in ("http://[::1", "ftp://127.0.0.1/", "file:///etc/passwd", "http://")),
        *((url, "hicache serve") for url in ("'http://a b:1'", "http://127.0.0.1:port", "\x1b[2J")),
        ("http://127.0.0.1:1 --interval 0", "--interval"),
    ],
}
# Settings that no engine can have, whatever its model. The error names the flag as the user wrote it.
UNUSABLE = [
    ("--kv-events udp://x", "--kv-events"),
    ("--kv-events file:{tmp}/none/events", "--kv-events"),
    ("--eviction-policy lruu", "--eviction-policy 'lruu'"),
    ("--config {tmp}/order.yaml", "host_eviction_policy='lruu'"),
    ("--write-policy never", "--write-policy 'never'"),
    ("--device cuda:77", "--device 'cuda:77'"),
    ("--config {tmp}/saver.yaml", "torch_memory_saver"),
    ("--disk-path {tmp}/file", "--disk-path {tmp}/file"),
    ("--disk-path {tmp}/new --disk-key-file {tmp}/none", "--disk-key-file {tmp}/none"),
    ("--disk-path {tmp}/new --disk-budget-bytes 1KB", "--disk-budget-bytes '1KB'"),
    ("--remote-url novel://host", "novel"),
]
ROWS = [(command, row, culprit) for command, rows in TABLES.items() for row, culprit in rows]


@pytest.fixture(scope="module", name="folder")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    store = open_store(folder / "store")
    put_numbers(store, range(3))
    store.close()
    return folder


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "row", "culprit"), ROWS, ids=[f"{c.split(' ')[0]} {r[:40]}" for c, r, _ in ROWS])
def test_wrong_input_is_one_line(
    command: str, row: str, culprit: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong input gives one line with the flag, setting or file, and no output. No file is created, removed or
    changed."""
    before = state(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"tmp": str(folder), "long": "a" * 5000, "port": taken.getsockname()[1]}
        assert culprit.format(**names) in refused(capsys, *shlex.split(f"{command} {row}".format(**names)))
    assert state(folder) == before and not (folder / "new" / "store.json").exists()


@pytest.mark.parametrize("command", ["serve --model random --port 0", DEMO])
def test_settings_are_refused_before_a_model_is_loaded(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model takes minutes, so settings are checked first. The line about a wrong setting names its flag, and
    no file is created or changed."""

    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("hicache.serving.server.command.choose_model", load)
    monkeypatch.setattr("hicache.serving.demo.choose_model", load)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    before = state(folder)
    for row, culprit in UNUSABLE:
        assert culprit.format(tmp=folder) in refused(capsys, *shlex.split(f"{command} {row}".format(tmp=folder)))
    assert state(folder) == before and not (folder / "new").exists()


def test_an_unknown_flag_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown flag names the help of its command, and the most similar flag, if there is one."""
    for command, flag, meant in (
        ("serve", "--max-body-byte=1", "--max-body-bytes"),
        ("store stat", "--jsn .", "--json"),
        ("config", "--sho --show", "--show"),
    ):
        line = refused(capsys, *command.split(), *flag.split())
        help_flag = "--help-all" if command == "serve" else "--help"
        assert flag.split()[0] in line
        assert meant in line
        assert f"'hicache {command} {help_flag}'" in line


def test_texts_of_a_store_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters, line breaks and lone surrogates in names and values of an identity are printed as escapes,
    and add no line."""
    for name, identity in (("plain", None), ("evil", {"model": "m", ESCAPES: ESCAPES})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store.json").write_bytes(record(identity))
        (tmp_path / name / "store.json").chmod(0o600)
    plain, evil = (output(capsys, "store", "stat", tmp_path / name) for name in ("plain", "evil"))
    assert len(evil.splitlines()) == len(plain.splitlines()) + 1 and evil.isascii()
    assert all(line.isprintable() for line in evil.splitlines()) and "\\x1b[2J" in evil and "\\ud800" in evil


def test_paths_as_users_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the home directory and a file URL lead to the same files in settings and commands. Text that is no path
    of this machine, or no UTF-8 in a setting, is refused with the name of its setting or flag. The URL of a store may
    have any bytes."""
    odd = tmp_path / "café 100%"
    odd.mkdir()
    monkeypatch.setenv("HOME", str(odd))
    quoted = quote(os.fsencode(odd))
    for path in (odd / "store", "~/store", f"file://{quoted}/store", f"FILE://localhost{quoted}/store"):
        config = DiskConfig(path=path, budget_bytes=8 << 20)  # type: ignore[arg-type]
        assert Path(config.path) == odd / "store"
        opened = hicache.storage.open_store(config.url, identity={"model": "m"}, formats=[PageFormat(4096)])
        opened.close()
        assert outcome(capsys, "store", "stat", path, "--json")[0] == 0
        assert outcome(capsys, "store", "stat", path)[0] == 0
    assert sorted(os.listdir(tmp_path)) == [odd.name] and os.listdir(odd) == ["store"]
    assert DiskConfig(path="unix:~/sock").url == f"unix:{odd}/sock"
    (odd / "settings.yaml").write_text("device_tokens: 4096")
    given = ("--config", "~/settings.yaml", "--disk-path", odd)
    assert outcome(capsys, "config", "--show", *given)[0] == 0
    for wrong in ("file://elsewhere/x", "file://", "https://host/x", "~nobody-of-that-name/x", "\udfff", "a\0b"):
        with pytest.raises(ConfigError, match="disk path="):
            DiskConfig(path=wrong)
        for flags in ("store stat {}", "store serve lmdb:///x --socket {}", "replay {}", "plan --model {}"):
            named = refused(capsys, *(part.format(wrong) for part in flags.split()))
            assert re.search("error: (DIR|path|--socket|TRACE|trace|--model|a store of https://) ", named), named
    for wrong, why in (("a\nb", "control"), (os.fsdecode(b"caf\xe9"), "UTF-8")):
        with pytest.raises(ConfigError, match=f"disk path=.*{why}"):
            DiskConfig(path=wrong)
    url = f"lmdb://{quote(os.fsencode(tmp_path) + b'/caf%s' % bytes([0xE9]))}?budget=8MiB"
    hicache.storage.open_store(url, identity={"model": "m"}, formats=[PageFormat(4096)]).close()
    assert b"caf\xe9" in os.listdir(os.fsencode(tmp_path))
