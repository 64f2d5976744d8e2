"""Configuration: what is accepted, and the one line that names the knob when it is not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hicache import DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.config import kernel_choice
from hicache.disk import identity_of, namespace_digest
from hicache.errors import ConfigError, IdentityError
from hicache.layout import BufferSpec, PoolLayout
from hicache.settings import (
    Choice,
    FilePath,
    Number,
    Setting,
    Size,
    Text,
    Whole,
    parse_bytes,
    settings_of,
)

LAYOUT = PoolLayout((BufferSpec("k", torch.uint8, (2, 8), "token", (0, 1)),), 4)


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    EngineConfig.add_flags(parser)
    return parser.parse_args(given)


def test_python_yaml_and_flags_agree(tmp_path: Path) -> None:
    """The same settings make equal configurations, whichever way they come; flags go before the file."""
    disk = DiskConfig(path="/pages", budget_bytes=2 << 30, readers=3)
    python = EngineConfig(device_tokens=4096, host_bytes=1 << 30, model_id="m", prefetch_timeout_s=0.5, disk=disk)
    file = tmp_path / "engine.yaml"
    file.write_text(
        "device_tokens: 1\nhost_bytes: 1GiB\nmodel_id: m\ndisk:\n  path: /pages\n  budget_bytes: 2GiB\n  readers: 3\n"
    )
    given = flags("--config", str(file), "--device-tokens", "4096", "--prefetch-timeout-s", "0.5")
    assert EngineConfig.from_flags(given) == python
    given = flags("--disk-path", "/pages", "--disk-budget-bytes", "2147483648", "--disk-readers", "3")
    settings = {"device_tokens": 4096, "host_bytes": "1GiB", "model_id": "m", "prefetch_timeout_s": "0.5"}
    assert EngineConfig.from_flags(given, **settings) == python


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"page_size": 0}, "page_size=0 is below 1"),
        ({"page_size": 48}, "page_size=48 does not divide host_page_size=64"),
        ({"device_tokens": 15}, "device_tokens=15 is below 16"),
        ({"device_tokens": 63, "host_bytes": 1 << 20}, "device_tokens=63 is below 64"),
        ({"dtype": "int3"}, "dtype='int3': choose one of float32"),
        ({"write_policy": "sometimes"}, "choose one of write_through, write_through_selective, write_back"),
        ({"prefetch_mode": "never"}, "choose one of best_effort"),
        ({"host_bytes": -1}, "host_bytes=-1 is below 0"),
        ({"disk": DiskConfig(path="/x")}, "set host_bytes or host_ratio above 0"),
        ({"disk": DiskConfig(path="/x"), "host_bytes": 1 << 20}, "needs model_id"),
    ],
)
def test_wrong_settings_name_the_knob(changes: dict[str, object], line: str) -> None:
    """Every wrong value raises ConfigError with the knob and what would do."""
    with pytest.raises(ConfigError, match=line):
        EngineConfig(**{"device_tokens": 1024, **changes})  # type: ignore[arg-type]


def test_wrong_files_and_names(tmp_path: Path) -> None:
    """Unknown names, missing files, text for numbers and missing settings are one clear line each."""
    with pytest.raises(ConfigError, match="unknown setting device_token; known are device_tokens"):
        EngineConfig.from_dict({"device_token": 1})
    with pytest.raises(ConfigError, match="missing setting device_tokens"):
        EngineConfig.from_dict({})
    with pytest.raises(ConfigError, match="device_tokens='many'"):
        EngineConfig.from_dict({"device_tokens": "many"})
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        EngineConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        EngineConfig.from_flags(flags("--config", str(tmp_path / "none.yaml")))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="no mapping"):
        EngineConfig.from_yaml(tmp_path / "list.yaml")
    with pytest.raises(ConfigError, match="durability='never'"):
        DiskConfig(path="/x", durability="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"filter": "best"}, "disk filter='best': choose one of auto, none, planes, channel_planes"),
        ({"hang_s": 0.0}, "hang_s=0.0"),
        ({"retry_s": 0.0}, "retry_s=0.0"),
        ({"retry_s": 9.0, "max_retry_s": 8.0}, "retry_s at most max_retry_s"),
        ({"readers": 0}, "disk readers=0 is below 1"),
        ({"level": 23}, "1 to 22 are zstd levels"),
    ],
)
def test_wrong_settings_of_the_disk_name_the_knob(changes: dict[str, object], line: str) -> None:
    """Every wrong value of the disk tier raises ConfigError with the knob and what would do."""
    with pytest.raises(ConfigError, match=line):
        DiskConfig(path="/x", **changes)  # type: ignore[arg-type]


# What no whole number, no size and no number takes.
NO_NUMBER = [None, True, "", "x", "nan", "inf", [1], {}, b"1", float("nan"), float("inf"), -float("inf"), 1j]
WRONG: dict[type[Setting], list[object]] = {
    Whole: [*NO_NUMBER, 64.0, 64.9, "64.9", -1, 1 << 63, 10**30, "9" * 30, "9" * 5000, 10**5000],
    Size: [*NO_NUMBER, 64.0, 64.9, "64.9", "64.9B", "1KX", "iB", -1, "-1GB", 1 << 63, "999999999TB", "9" * 5000],
    Number: [*NO_NUMBER, -1.0, 1e300, 10**400, "1e400"],
    Text: [None, 1, b"m", ["m"], "\ud800"],
    Choice: [None, 1, "", "sometimes", ["relaxed"], "\ud800"],
    FilePath: [None, 1, b"/x", ["/x"], "a\0b", "\ud800"],
}
DECLARED = [(cls, name, setting) for cls in (EngineConfig, DiskConfig) for name, setting in settings_of(cls).items()]


RIGHT = {"device_tokens": 4096, "host_bytes": 1 << 20, "model_id": "m", "disk": {"path": "/x"}}


def plain(cls: type, name: str, value: object) -> dict[str, object]:
    """Plain values of a whole configuration, right but for the one setting of `cls`."""
    return {**RIGHT, name: value} if cls is EngineConfig else {**RIGHT, "disk": {"path": "/x", name: value}}


@pytest.mark.parametrize(("cls", "name", "setting"), DECLARED, ids=[f"{c.__name__}.{n}" for c, n, _ in DECLARED])
def test_every_setting_refuses_every_wrong_kind(cls: type, name: str, setting: Setting, tmp_path: Path) -> None:
    """What a setting does not take is a ConfigError of one short line with its name, through every door alike: built
    directly, from a mapping, from YAML, from a flag. Nothing is cut, rounded or taken for a number."""
    required = {"device_tokens": 4096} if cls is EngineConfig else {"path": "/x"}
    for value in WRONG[type(setting)]:
        doors: list[Callable[[], object]] = [
            lambda value=value: cls(**{**required, name: value}),
            lambda value=value: EngineConfig.from_dict(plain(cls, name, value)),
        ]
        if isinstance(value, str) and "\0" not in value:
            flag = f"--{'disk-' * (cls is DiskConfig)}{name}={value}".replace("_", "-")
            doors.append(lambda given=flag: EngineConfig.from_flags(flags(given), **RIGHT))
        if isinstance(value, None | bool | int | float | list) and value not in (10**5000,):
            file = tmp_path / "engine.yaml"
            file.write_text(yaml.safe_dump(plain(cls, name, value)))
            doors.append(lambda file=file: EngineConfig.from_yaml(file))
        for door in doors:
            with pytest.raises(ConfigError) as caught:
                door()
            line = str(caught.value)
            assert f"{name}=" in line and len(line) < 400 and "\n" not in line, line


def test_numbers_of_other_libraries_are_taken_as_pythons() -> None:
    """Whole numbers of numpy become Python's, text is read, and a configuration holds values of the declared kinds."""
    config = EngineConfig(device_tokens=np.int64(4096), host_bytes="1GiB", host_ratio=0)  # type: ignore[arg-type]
    assert config == EngineConfig(device_tokens=4096, host_bytes=1 << 30)
    assert type(config.device_tokens) is int and type(config.host_ratio) is float


BROKEN_FILES = [
    b"device_tokens: 4096\ndisk: 5\n",
    b"device_tokens: 4096\ndisk: [path]\n",
    b"1: 2\n",
    b"1: 2\na: 3\n",
    b"\xff\xfe\x00",
    b"device_tokens: 4096\nmodel_id: caf\xe9\n",
    b"[" * 3000 + b"]" * 3000,
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
    """Whatever stands in the file of a configuration, it is read or refused in one line, with the flag as without."""
    file = tmp_path / "engine.yaml"
    file.write_bytes(content)
    for read in (EngineConfig.from_yaml, lambda path: EngineConfig.from_flags(flags("--config", str(path)))):
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert "\n" not in str(caught.value)
    given = flags("--config", str(file), "--disk-path", "/x")
    with pytest.raises(ConfigError):
        EngineConfig.from_flags(given)


def test_the_settings_of_the_disk_have_flags() -> None:
    """Order of bytes, key file and times can be given on the command line."""
    given = flags("--disk-path", "/p", "--disk-filter", "planes", "--disk-key-file", "/k", "--disk-hang-s", "2.5")
    config = EngineConfig.from_flags(given, device_tokens=64, host_bytes=1 << 20, model_id="m")
    assert config.disk == DiskConfig(path="/p", filter="planes", key_file="/k", hang_s=2.5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5k", 1536),
        ("100", 100),
        ("3 TB", 3 * 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_in_bytes(text: str, size: int) -> None:
    """Decimal and binary units mean what they say, to the byte at any size."""
    assert parse_bytes(text) == size
    with pytest.raises(ConfigError, match="no size in bytes"):
        parse_bytes(f"{text}x")


def test_kernels_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """HICACHE_KERNELS decides when set, the device otherwise, and nonsense raises."""
    for device, default in (("cpu", "torch"), ("cuda", "triton")):
        monkeypatch.delenv("HICACHE_KERNELS", raising=False)
        assert kernel_choice(torch.device(device)) == default
        for forced in ("triton", "torch"):
            monkeypatch.setenv("HICACHE_KERNELS", forced)
            assert kernel_choice(torch.device(device)) == forced
    monkeypatch.setenv("HICACHE_KERNELS", "fast")
    with pytest.raises(ConfigError, match="'triton' or 'torch'"):
        kernel_choice(torch.device("cpu"))


def test_devices_that_are_not_there() -> None:
    """A device that torch cannot see or does not know is refused before anything is allocated."""
    for device, line in (
        ("cuda:99", "CUDA devices"),
        ("abacus", "write cpu, cuda or cuda:1"),
        ("meta", "cpu and cuda"),
    ):
        with pytest.raises(ConfigError, match=line):
            build_engine(EngineConfig(device_tokens=64, device=device), ModelGeometry(1, 1, 8))


def test_identity_is_closed() -> None:
    """Each field that decides what bytes mean changes the identity; the salt changes page keys alone; none may be
    open."""
    base = {"device_tokens": 1024, "host_bytes": 1 << 20, "model_id": "m"}
    first = EngineConfig(**base)  # type: ignore[arg-type]
    other_layout = PoolLayout((BufferSpec("k", torch.uint8, (2, 9), "token", (0, 1)),), 4)
    identities = [identity_of(first, LAYOUT), identity_of(first, other_layout)]
    # Both fp8 formats are kept as uint8, so the layout alone would not tell them apart.
    for change in ({"model_id": "n"}, {"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}, {"host_page_size": 32}):
        identities.append(identity_of(EngineConfig(**{**base, **change}), LAYOUT))  # type: ignore[arg-type]
    assert len({tuple(identity.items()) for identity in identities}) == len(identities)
    salted = EngineConfig(**base, salt="tenant")  # type: ignore[arg-type]
    assert identity_of(salted, LAYOUT) == identities[0]
    assert namespace_digest(salted, LAYOUT) != namespace_digest(first, LAYOUT)
    with pytest.raises(IdentityError, match="model_id is empty"):
        identity_of(EngineConfig(device_tokens=1024), LAYOUT)
