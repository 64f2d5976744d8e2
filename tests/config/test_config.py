"""Configuration: the accepted values, their sources, and the one line of error that names a wrong setting."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hicache import AdvancedConfig, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.config import SECTIONS
from hicache.config.engine import Switch
from hicache.config.environment import debug_checks, kernel_choice
from hicache.config.settings import (
    Address,
    Choice,
    FilePath,
    Integer,
    Number,
    Packing,
    Setting,
    Share,
    Size,
    Text,
    Tokens,
    Url,
    settings_of,
)
from hicache.console import parse_bytes
from hicache.errors import ConfigError, IdentityError
from hicache.flow.write_policy import POLICIES
from hicache.layout import BufferSpec, PoolLayout
from hicache.pages.order import RANK_POLICIES
from hicache.stores.page_format import identity_of, namespace_digest

LAYOUT = PoolLayout((BufferSpec("k", torch.uint8, (2, 8), "token", (0, 1)),), 4)


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    EngineConfig.add_flags(parser)
    return parser.parse_args(given)


def flag_of(section: str, name: str) -> str:
    return f"--{section}-{name}".replace("_", "-") if section else f"--{name}".replace("_", "-")


def test_python_yaml_and_flags_agree(tmp_path: Path) -> None:
    """The same settings make equal configurations from every source. Flags win over the file."""
    disk, advanced = DiskConfig(path="/pages", budget_bytes=2 << 30, level=3), AdvancedConfig(disk_reader_threads=3)
    python = EngineConfig(
        device_tokens=4096, host_bytes=1 << 30, model_id="m", prefetch_timeout_s=0.5, disk=disk, advanced=advanced
    )
    file = tmp_path / "engine.yaml"
    file.write_text(
        "device_tokens: 1\nhost_bytes: 1GiB\nmodel_id: m\nprefetch_timeout_s: 0.5\n"
        "disk:\n  path: /pages\n  budget_bytes: 2GiB\n  level: 3\n"
        "advanced:\n  disk_reader_threads: 3\n"
    )
    given = flags("--config", str(file), "--device-tokens", "4096")
    assert EngineConfig.from_flags(given) == python
    text = "--disk-path /pages --disk-budget-bytes 2147483648 --disk-level 3"
    settings = {"device_tokens": 4096, "host_bytes": "1GiB", "model_id": "m", "prefetch_timeout_s": "0.5"}
    plain: dict[str, Any] = {**settings, "advanced": {"disk_reader_threads": "3"}}
    assert EngineConfig.from_flags(flags(*text.split()), **plain) == python
    assert EngineConfig.from_dict({**plain, "disk": dataclasses.asdict(disk)}) == python


# A fault, and the settings that the message must name.
WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 48}, "host_page_size=64"),
    ({"device_tokens": 15, "host_bytes": 0}, "device_tokens=15"),
    ({"device_tokens": 63}, "device_tokens=63"),
    ({"device_token": 1}, "device_token"),
    ({"mamba_track_interval": 96}, "mamba_track_interval=96"),
    ({"transfer_chunk_tokens": 64}, "transfer_chunk_tokens"),  # a setting of the section `advanced`
    ({"disk": {"path": "/x"}, "host_bytes": 0, "model_id": "m"}, "host_bytes"),
    ({"disk": {"path": "/x"}}, "model_id"),
    ({"disk": {}, "model_id": "m"}, "path"),
    ({"disk": {"path": "/x", "level": 23}, "model_id": "m"}, "disk level=23"),
    ({"advanced": {"staging": 1}}, "staging"),
    ({"advanced": {"transfer_chunk_tokens": 63}}, "transfer_chunk_tokens=63"),
    ({"advanced": {"disk_reader_threads": 0}}, "advanced disk_reader_threads=0"),
    ({"advanced": {"disk_reopen_backoff_s": 9.0, "disk_max_reopen_backoff_s": 8.0}}, "disk_max_reopen_backoff_s=8.0"),
    ({"kv_events": "tcp://"}, "kv_events='tcp://'"),
    ({"kv_events_replay": "tcp://*:5558"}, "kv_events"),
    ({"kv_events": "file:/tmp/x", "kv_events_replay": "tcp://*:5558"}, "kv_events_replay"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG_SETTINGS, ids=[str(changes) for changes, _ in WRONG_SETTINGS])
def test_wrong_settings_are_named(changes: dict[str, Any], named: str) -> None:
    """Every wrong value, unknown name and contradiction raises ConfigError with the setting."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict({"device_tokens": 1024, **changes})
    assert named in str(caught.value)


def test_a_section_is_of_its_class() -> None:
    """A configuration that is built in Python takes sections only as instances of their classes, and requires a
    size."""
    for changes in ({"disk": {"path": "/x"}, "model_id": "m"}, {"advanced": {"staging_bytes": 1 << 20}}):
        with pytest.raises(ConfigError):
            EngineConfig(device_tokens=1024, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict({})
    assert "device_tokens" in str(caught.value)


def test_a_later_source_wins(tmp_path: Path) -> None:
    """The file wins over a command's defaults, and a flag wins over both."""
    (tmp_path / "engine.yaml").write_text("host_bytes: 1MiB\n")
    of_file, defaults = ("--config", str(tmp_path / "engine.yaml")), {"device_tokens": 4096, "host_bytes": 1 << 30}
    assert EngineConfig.from_flags(flags(*of_file), **defaults).host_bytes == 1 << 20
    assert EngineConfig.from_flags(flags(*of_file, "--host-bytes", "auto"), **defaults).host_bytes == "auto"


def test_a_section_of_the_file_can_be_left_empty(tmp_path: Path) -> None:
    """`disk: null` in the file removes the disk of a command's defaults. Flags of the section add a disk again."""
    (tmp_path / "engine.yaml").write_text("disk: null\nadvanced: null\n")
    defaults = {"device_tokens": 4096, "model_id": "m", "disk": {"path": "/default"}}
    config = EngineConfig.from_flags(flags("--config", str(tmp_path / "engine.yaml")), **defaults)
    assert config.disk is None and config.advanced == AdvancedConfig()
    given = flags("--config", str(tmp_path / "engine.yaml"), "--disk-path", "/flag")
    assert EngineConfig.from_flags(given, **defaults).disk == DiskConfig(path="/flag")
    given = flags("--disk-level", "3")
    assert EngineConfig.from_flags(given, **defaults).disk == DiskConfig(path="/default", level=3)


def test_auto_is_a_word_and_zero() -> None:
    """The word auto is accepted if the engine computes the value. host_bytes, dtype and prefill_tokens_per_s keep the
    word, because their 0 has a meaning: no host tier, and a speed of 0. Sizes for which 0 makes no sense become 0.
    Settings of other numbers refuse "auto"."""
    kept = ("host_bytes", "dtype", "prefill_tokens_per_s")
    words = dict.fromkeys((*kept, "window_tokens", "mamba_size", "host_states"), "auto")
    config = EngineConfig.from_dict({"device_tokens": 64, **words})
    assert config == EngineConfig(device_tokens=64) and (config.host_bytes, config.window_tokens) == ("auto", 0)
    assert config.has_host and config.cache_page_size == config.host_page_size
    free = EngineConfig(device_tokens=64, host_bytes="free")
    assert free.has_host and settings_of(EngineConfig)["host_bytes"].text(free.host_bytes) == "free"
    none = EngineConfig(device_tokens=64, host_bytes=0)
    assert not none.has_host and none.cache_page_size == none.page_size
    for name, setting in settings_of(EngineConfig).items():
        if name not in words and isinstance(setting, Integer | Number):
            with pytest.raises(ConfigError):
                EngineConfig(**{"device_tokens": 64, name: "auto"})  # type: ignore[arg-type]


def test_the_dtype_of_a_model_is_not_known_early() -> None:
    """The configured dtype is one of torch's. "auto" is refused with the choices, because only an engine resolves
    it."""
    assert EngineConfig(device_tokens=64, dtype="float8_e5m2").torch_dtype is torch.float8_e5m2
    with pytest.raises(ConfigError):
        _ = EngineConfig(device_tokens=64).torch_dtype


# Values that no setting of an integer, a size or a number accepts.
NO_NUMBER = [None, True, "", "x", "nan", "inf", [1], {}, b"1", float("nan"), float("inf"), -float("inf"), 1j]
NO_INTEGER = [*NO_NUMBER, 64.0, 64.9, "64.9", -1, 1 << 63, 10**30, "9" * 30, "9" * 5000, 10**5000]
WRONG: dict[type[Setting], list[object]] = {
    Integer: NO_INTEGER,
    Tokens: NO_INTEGER,
    Size: [*NO_NUMBER, 64.0, 64.9, "64.9", "64.9B", "1KX", "iB", -1, "-1GB", 1 << 63, "999999999TB", "9" * 5000],
    Number: [*NO_NUMBER, -1.0, 1e300, 10**400, "1e400"],
    Share: [*NO_NUMBER, -0.1, 1.01, "2"],
    Text: [None, 1, b"m", ["m"], "\ud800"],
    Url: [None, 1, b"m", ["m"], "\ud800"],
    Address: [None, 1, b"tcp://*:1", ["tcp://*:1"], "\ud800", "x", "udp://x:1", "tcp:", "tcp://", " tcp://*:1"],
    Choice: [None, 1, "", "sometimes", ["relaxed"], "\ud800"],
    Switch: [None, 1, 0, "", "yes", "True", ["true"], "\ud800"],
    Packing: [None, 1, True, 4.0, "", "sometimes", ["off"], "\ud800"],
    FilePath: [None, 1, b"/x", ["/x"], "a\0b", "\ud800"],
}
DECLARED = [(at, name, setting) for at, cls in SECTIONS.items() for name, setting in settings_of(cls).items()]
RIGHT = {"device_tokens": 4096, "host_bytes": 1 << 20, "model_id": "m", "disk": {"path": "/x"}, "remote": {"url": "u"}}


def plain(section: str, name: str, value: object) -> dict[str, object]:
    """Plain values of a complete configuration, in which only one setting may be wrong."""
    if not section:
        return {**RIGHT, name: value}
    needed = {"disk": {"path": "/x"}, "remote": {"url": "u"}}.get(section, {})
    return {**RIGHT, section: {**needed, name: value}}


@pytest.mark.parametrize(("section", "name", "setting"), DECLARED, ids=[f"{at}.{name}" for at, name, _ in DECLARED])
def test_every_setting_refuses_every_wrong_kind(section: str, name: str, setting: Setting, tmp_path: Path) -> None:
    """A wrong value raises a ConfigError of one short line. If the value was given directly, in a mapping or in YAML,
    the line names the setting; if a flag gave it, it names the flag. No value is cut, rounded or taken for a number."""
    cls: type = SECTIONS[section]
    is_first = setting is next(other for _, _, other in DECLARED if type(other) is type(setting))
    required: dict[str, object] = {
        "": {"device_tokens": 4096},
        "disk": {"path": "/x"},
        "remote": {"url": "u"},
        "advanced": {},
    }[section]
    for value in WRONG[type(setting)]:
        doors: list[tuple[str, Callable[[], object]]] = [
            (f"{name}=", lambda value=value: cls(**{**required, name: value})),
            (f"{name}=", lambda value=value: EngineConfig.from_dict(plain(section, name, value))),
        ]
        if isinstance(value, str) and "\0" not in value and setting.has_flag and section != "advanced":
            flag = flag_of(section, name)
            given = flags(f"{flag}={value}")
            doors.append((f"{flag} ", lambda given=given: EngineConfig.from_flags(given, **RIGHT)))
        # A file is read into a mapping, so testing one setting of each kind is enough.
        if is_first and isinstance(value, None | bool | int | float | list) and value not in (10**5000,):
            file = tmp_path / "engine.yaml"
            file.write_text(yaml.safe_dump(plain(section, name, value)))
            doors.append((f"{name}=", lambda file=file: EngineConfig.from_flags(flags("--config", str(file)))))
        for named, door in doors:
            with pytest.raises(ConfigError) as caught:
                door()
            line = str(caught.value)
            assert named in line and len(line) < 400 and "\n" not in line, line


BROKEN_FILES = [
    b"device_tokens: 4096\ndisk: 5\n",
    b"device_tokens: 4096\ndisk: [path]\n",
    b"1: 2\n",
    b"1: 2\na: 3\n",
    b"\xff\xfe\x00",
    b"device_tokens: 4096\nmodel_id: caf\xe9\n",
    b"[" * 400 + b"]" * 400,
    b"device_tokens: " + b"9" * 5000 + b"\n",
    b"{a: [\n",
    b"device_tokens: !!bool maybe\n",
    b"device_tokens: !!timestamp x\n",
    b"device_tokens: 2020-01-01\n",
    b"? [a]\n: 1\n",
    b"",
    b"text\n",
]


@pytest.mark.parametrize("content", BROKEN_FILES, ids=lambda content: repr(content[:24]))
def test_a_broken_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    """A configuration file with any content is read, or refused with one line, also if flags are given."""
    file = tmp_path / "engine.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flags(flags("--config", str(file)))
    assert "\n" not in str(caught.value)
    given = flags("--config", str(file), "--disk-path", "/x")
    with pytest.raises(ConfigError):
        EngineConfig.from_flags(given)


def test_sizes_in_bytes() -> None:
    """Decimal and binary units are exact to the byte at any size."""
    sizes = {
        "512MiB": 512 << 20,
        "2GB": 2 * 10**9,
        "1.5k": 1536,
        "100": 100,
        "3 TB": 3 * 10**12,
        f"{2**53 + 1}": 2**53 + 1,
    }
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in sizes:
        with pytest.raises(ConfigError):
            parse_bytes(f"{text}x")


def test_kernels_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If HICACHE_KERNELS is set, in any case, it chooses the kernels; otherwise the device does. An invalid value
    raises."""
    for device, default in (("cpu", "torch"), ("cuda", "triton")):
        monkeypatch.delenv("HICACHE_KERNELS", raising=False)
        assert kernel_choice(torch.device(device)) == default
        for forced in ("triton", "torch"):
            for text in (forced, forced.upper()):
                monkeypatch.setenv("HICACHE_KERNELS", text)
                assert kernel_choice(torch.device(device)) == forced
    monkeypatch.setenv("HICACHE_KERNELS", "fast")
    with pytest.raises(ConfigError):
        kernel_choice(torch.device("cpu"))


def test_the_variable_of_hicache_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """If HICACHE_DEBUG is set, it decides. SGLang's variable counts only if hicache's is not set."""
    for ours, theirs, on in (("", "", False), ("1", "", True), ("", "1", True), ("0", "1", False), ("", "0", False)):
        monkeypatch.setenv("HICACHE_DEBUG", ours)
        monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", theirs)
        assert debug_checks() is on


@pytest.mark.parametrize(
    ("setting", "names"),
    [("write_policy", POLICIES), ("eviction_policy", RANK_POLICIES)],
    ids=["write", "eviction"],
)
def test_policies_are_named_when_an_engine_is_built(setting: str, names: Mapping[str, object]) -> None:
    """The help of a policy lists every name. Another name is refused when the engine is built, with or without a host
    tier, because a configuration may name a custom policy."""
    assert all(re.search(rf"\b{name}\b", settings_of(EngineConfig)[setting].help) for name in names)
    for host_bytes in (0, 1 << 20):
        config = EngineConfig(device_tokens=64, host_bytes=host_bytes, **{setting: "sometimes"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=setting):
            build_engine(config, ModelGeometry(1, 1, 4))


def test_identity_is_closed() -> None:
    """Each field that decides the meaning of bytes changes the identity. The salt only changes page keys. No field may
    be unknown."""
    base = {"device_tokens": 1024, "host_bytes": 1 << 20, "model_id": "m", "dtype": "bfloat16"}
    first = EngineConfig(**base)  # type: ignore[arg-type]
    other_layout = PoolLayout((BufferSpec("k", torch.uint8, (2, 9), "token", (0, 1)),), 4)
    identities = [identity_of(first, {"full": LAYOUT}), identity_of(first, {"full": other_layout})]
    # Both fp8 formats are stored as uint8, so the layout alone would not distinguish them.
    for change in ({"model_id": "n"}, {"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}, {"host_page_size": 32}):
        identities.append(identity_of(EngineConfig(**{**base, **change}), {"full": LAYOUT}))  # type: ignore[arg-type]
    assert len({tuple(identity.items()) for identity in identities}) == len(identities)
    salted = EngineConfig(**base, salt="tenant")  # type: ignore[arg-type]
    assert identity_of(salted, {"full": LAYOUT}) == identities[0]
    assert namespace_digest(salted, {"full": LAYOUT}) != namespace_digest(first, {"full": LAYOUT})
    with pytest.raises(IdentityError):
        identity_of(EngineConfig(device_tokens=1024), {"full": LAYOUT})


def test_devices_that_are_not_there() -> None:
    """A device that torch cannot see or does not know is refused before anything is allocated."""
    for device in ("cuda:99", "abacus", "meta"):
        with pytest.raises(ConfigError, match="device"):
            build_engine(EngineConfig(device_tokens=64, device=device), ModelGeometry(1, 1, 8))
