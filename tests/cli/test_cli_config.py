"""`hicache config --show` as a user meets it: every setting, its value and where it came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_case import output, refused, stats
from hicache.config import SECTIONS, RemoteConfig
from hicache.config.environment import VARIABLES
from hicache.config.settings import settings_of
from hicache.errors import ConfigError

KEY = "5ec2e7" * 10


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        for name in variable.names:
            monkeypatch.delenv(name, raising=False)


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return output(capsys, "config", "--show", *arguments)


def shown_settings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return stats(capsys, "config", "--show", *arguments)


def test_each_value_has_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A value comes from the field's default, the file or a flag, and the output says which. A flag wins over the
    file."""
    file = tmp_path / "engine.yaml"
    file.write_text(
        "device_tokens: 4096\nhost_bytes: 1GiB\nmodel_id: m\ndisk: {path: /pages, level: 3}\n"
        "advanced: {disk_queue_jobs: 7}\n"
    )
    given = ["--config", str(file), "--host-bytes", "2GiB"]
    settings = shown_settings(capsys, *given)["settings"]
    assert settings["device_tokens"] == {"value": 4096, "unit": "tokens", "source": f"file {file}"}
    assert settings["host_bytes"] == {"value": 2 << 30, "unit": "bytes", "source": "flag --host-bytes"}
    assert settings["disk.level"] == {"value": 3, "source": f"file {file}"}
    assert settings["disk.durability"] == {"value": "relaxed", "source": "default"}
    assert settings["advanced.disk_queue_jobs"] == {
        "value": 7,
        "unit": "jobs",
        "source": f"file {file}",
    }
    lines = {line.split()[0]: line for line in show(capsys, *given).splitlines() if line}
    assert "2.0 GiB (2147483648 bytes)" in lines["host_bytes"] and "flag --host-bytes" in lines["host_bytes"]
    assert lines["disk.level"].endswith(f"file {file}") and lines["page_size"].split() == [
        "page_size",
        "16",
        "tokens",
        "default",
    ]


def test_every_setting_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Every setting and every variable has a line, in text and in JSON. Without a disk its section has one line. No
    setting is required; a missing required setting is shown as such."""
    names = [f"{at}.{name}" if at else name for at, cls in SECTIONS.items() for name in settings_of(cls)]
    with_disk = shown_settings(capsys, "--disk-path", "/x", "--remote-url", "own-store://x")
    assert list(with_disk["settings"]) == names
    assert list(with_disk["environment"]) == [variable.names[0] for variable in VARIABLES]
    bare = shown_settings(capsys)["settings"]
    assert bare["disk"] == {"value": None, "source": "default"}
    assert bare["remote"] == {"value": None, "source": "default"}
    advanced = [name for name in names if "advanced" in name]
    assert list(bare) == [*(name for name in names if "." not in name), "disk", "remote", *advanced]
    assert bare["device_tokens"] == {"value": None, "unit": "tokens", "source": "required"}
    assert bare["model_id"] == {"value": None, "source": "default; a server computes it from the weights"}
    text = show(capsys)
    assert [line.split()[0] for line in text.splitlines() if line] == [
        "setting",
        *bare,
        "environment",
        *with_disk["environment"],
    ]


def test_the_environment_is_shown_and_the_key_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable is shown with its value and the name under which it was found, or with its default. For the key,
    only whether it is set is shown."""
    environment = shown_settings(capsys)["environment"]
    assert environment["HICACHE_KERNELS"] == {"value": None, "source": "default: triton on CUDA, torch elsewhere"}
    assert environment["HICACHE_DISK_KEY"]["value"] is None
    monkeypatch.setenv("HICACHE_KERNELS", "torch")
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    monkeypatch.setenv("HICACHE_DISK_KEY", KEY)
    environment = shown_settings(capsys)["environment"]
    assert environment["HICACHE_KERNELS"] == {"value": "torch", "source": "environment variable HICACHE_KERNELS"}
    assert environment["HICACHE_DEBUG"] == {"value": "1", "source": "environment variable SGLANG_DEBUG_MEMORY_POOL"}
    assert environment["HICACHE_DISK_KEY"] == {"value": "set", "source": "environment variable HICACHE_DISK_KEY"}
    assert KEY not in show(capsys, "--json") and KEY not in show(capsys)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("own://kv:{}@127.0.0.1:6389/0?ttl=9", "own://***@127.0.0.1:6389/0?ttl=9"),
        ("OWN+TLS://kv:x@{}@b", "OWN+TLS://***@b"),
        ("own://kv:x/{}@a", "own://***@a"),  # without the escapes that this password needs
        ("kv:{}@a:6379", "***@a:6379"),
        ("mooncake://host:50051", "mooncake://host:50051"),
    ],
)
def test_a_password_in_a_url_is_not_shown(capsys: pytest.CaptureFixture[str], url: str, shown: str) -> None:
    """The password is shown neither in the table, nor in the JSON, nor in the error about the URL. Address and options
    are shown."""
    given = ["--remote-url", url.replace("{}", KEY)]
    assert shown_settings(capsys, *given)["settings"]["remote.url"] == {"value": shown, "source": "flag --remote-url"}
    text = show(capsys, *given)
    assert shown in text and KEY not in text
    for wrong in (given[1] + "\udc80", [given[1]]):
        with pytest.raises(ConfigError) as caught:
            RemoteConfig(url=wrong)  # type: ignore[arg-type]
        assert KEY not in str(caught.value)


def test_a_wrong_variable_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with an invalid value is refused, and the error lists valid values."""
    monkeypatch.setenv("HICACHE_MAMBA_SSM_DTYPE", "int8")
    assert "HICACHE_MAMBA_SSM_DTYPE='int8'" in refused(capsys, "config", "--show")


def test_text_of_the_file_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Control characters in a value or in the file name are printed as escapes, and add no line."""
    (tmp_path / "a.yaml").write_text('model_id: "m\\e[2J\\nx"\n')
    out = show(capsys, "--config", str(tmp_path / "a.yaml"))
    assert "m\\x1b[2J\\nx" in out and len(out.splitlines()) == len(show(capsys).splitlines())


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """The command works if torch cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'lmdb', 'transformers', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from hicache.cli import main\n"
        "sys.exit(main(['config', '--show', '--device-tokens', '64']))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not run.stderr and "64 tokens" in run.stdout
