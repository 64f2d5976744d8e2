"""The settings of an engine: frozen dataclasses that are validated when built.

Each setting is declared once, at its field: help, unit, choices, range, and the inputs of a computed default. YAML
keys, command-line flags, checks and `hicache config --show` follow from the declaration.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from hicache.config.environment import dtype_named
from hicache.config.flags import Layer, add_section, combine, flag_of, given_flags, naming_flags
from hicache.config.settings import (
    Address,
    Choice,
    Integer,
    Number,
    Packing,
    Share,
    Size,
    Text,
    Tokens,
    as_mapping,
    from_mapping,
    read_yaml,
    settle,
    short_repr,
)
from hicache.config.stores import MAX_S, Auto, DiskConfig, RemoteConfig
from hicache.console import path_flag
from hicache.errors import ConfigError

if TYPE_CHECKING:
    # for type checking only: importing torch takes a second, and some commands do not use torch
    import torch

PrefetchMode = Literal["auto", "best_effort", "wait_complete", "timeout"]
KvPacking = Literal["off", "auto", "3", "4"]
Free = Literal["free"]

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MAX_SLOTS = 1 << 30
_MAX_PAGE_TOKENS = 1 << 20
EVENTS = ("file:", "tcp://", "ipc://", "connect:tcp://", "connect:ipc://")  # accepted prefixes of the address kv_events


@dataclass(frozen=True)
class Switch(Choice):
    """A `Choice` of true and false in the spelling of Python or YAML."""

    words: tuple[str, ...] = ("true", "false")

    def text(self, value: object) -> str:
        return str(value).lower()

    def _value(self, given: object) -> bool:
        return given if isinstance(given, bool) else super()._value(given) == "true"


@dataclass(frozen=True, kw_only=True)
class AdvancedConfig:
    """Internal settings, which have no flags. The defaults suit the machines in `bench/results/`; change them only for
    measurements."""

    transfer_chunk_tokens: Annotated[int, Tokens("maximum number of tokens of one copy from device to host")] = 8192
    staging_bytes: Annotated[
        int, Size("device memory that buffers copied pages between copy engine and kernels", 1 << 16)
    ] = 256 << 20
    disk_reader_threads: Annotated[int, Integer("threads that read from the disk", 1, 256, unit="threads")] = 4
    disk_queue_jobs: Annotated[
        int, Integer("maximum number of queued read jobs, and of queued write jobs", 1, unit="jobs")
    ] = 1024
    disk_io_timeout_s: Annotated[
        float,
        Number(
            "maximum duration of a disk operation; after this time the disk counts as stalled",
            1e-3,
            MAX_S,
            unit="seconds",
        ),
    ] = 10.0
    disk_reopen_backoff_s: Annotated[
        float,
        Number(
            "delay before hicache retries a failed disk; the delay doubles after each failure",
            1e-3,
            MAX_S,
            unit="seconds",
        ),
    ] = 1.0
    disk_max_reopen_backoff_s: Annotated[
        float, Number("maximum delay before hicache retries a failed disk", 1e-3, MAX_S, unit="seconds")
    ] = 300.0
    kv_events_queue_blocks: Annotated[
        int,
        Integer(
            "maximum number of blocks in queued KV events; further events are dropped and counted", 1, unit="blocks"
        ),
    ] = 65536

    def __post_init__(self) -> None:
        settle(self, "advanced ")
        if self.disk_reopen_backoff_s > self.disk_max_reopen_backoff_s:
            raise ConfigError(
                f"advanced disk_reopen_backoff_s={self.disk_reopen_backoff_s} is above disk_max_reopen_backoff_s="
                f"{self.disk_max_reopen_backoff_s}; lower the first or raise the second"
            )


def default_write_policy(*, has_stores: bool) -> str:
    """Return the write policy of an engine for which no policy is given.

    Without stores, the policy is `exclusive`: device and host hold different pages. With stores, the policy is
    `write_through`, so that the stores, which other engines may share, soon have the pages that a request computed.
    """
    return "write_through" if has_stores else "exclusive"


def host_order(eviction_policy: str, write_policy: str) -> str:
    """Return the eviction policy of the host if no policy is given: the policy of the device, except for `auto` under
    `exclusive`. Under `exclusive`, the host mainly has pages that the device evicted. The policy `auto` of the device
    has already ranked these pages by their uses, so the host's policy is `lru`."""
    return "lru" if (write_policy, eviction_policy) == ("exclusive", "auto") else eviction_policy


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    `hicache.build.sizing` computes sizes that are "auto", or 0 if 0 means auto, when an engine is built. The device
    page `page_size` divides `host_page_size`, the unit of matching, backup and disk. `window_tokens` applies to models
    with sliding windows, `mamba_*` and `host_states` to models with recurrent layers.
    """

    device_tokens: Annotated[int, Tokens("slots of the device tier")]
    host_bytes: Annotated[
        int | Auto | Free,
        Size(
            "CPU memory of the host tier, like 8GiB; free: seven eighths of the free memory; 0: no host tier",
            keyword="free",
            is_tier=True,
            computed_from="the smallest of twice the device tier, half of the available memory and, on CUDA, 32 GiB",
        ),
    ] = "auto"
    page_size: Annotated[int, Tokens("tokens per device page; must divide host_page_size", 1, _MAX_PAGE_TOKENS)] = 16
    host_page_size: Annotated[
        int,
        Tokens(
            "tokens per host page, the unit in which prefixes are matched, backed up and stored", 1, _MAX_PAGE_TOKENS
        ),
    ] = 64
    max_requests: Annotated[
        int,
        Integer("maximum number of requests that run at the same time", 1, 1 << 20, unit="requests", has_flag=False),
    ] = 64
    max_context_len: Annotated[int, Tokens("maximum length of a sequence: prompt and answer together")] = 131072
    prefill_chunk_tokens: Annotated[
        int, Tokens("maximum number of prompt tokens of one forward pass", has_flag=False)
    ] = 8192
    device: Annotated[str, Text("cpu, cuda or cuda:1")] = "cpu"
    dtype: Annotated[str, Choice("dtype of keys and values", ("auto", *_DTYPES), computed_from="the model's dtype")] = (
        "auto"
    )
    enable_memory_saver: Annotated[
        bool,
        Switch(
            "allocate pools and request table in the region kv_cache of torch_memory_saver, so that a program can "
            "pause this memory",
            has_flag=False,
        ),
    ] = False
    kv_packing: Annotated[
        KvPacking,
        Packing(
            "lossless packing of bfloat16 host pages, which saves a quarter of their bytes; 3 or 4: bits per "
            "exponent; auto: 4 on CUDA if the pages can be packed, otherwise off",
            get_args(KvPacking),
        ),
    ] = "auto"
    write_policy: Annotated[
        str,
        Text(
            "when pages are copied to the host: write_through, write_back, exclusive",
            computed_from="the tiers: exclusive if the host has no store below it, else write_through",
        ),
    ] = "auto"
    prefetch_mode: Annotated[
        PrefetchMode,
        Choice(
            "whether a request waits for reads from stores; auto: it waits if the wait costs all requests less time "
            "than computing; a request that delays no other request is computed while its pages are read",
            get_args(PrefetchMode),
        ),
    ] = "auto"
    prefetch_timeout_s: Annotated[
        float,
        Number(
            "maximum time that a request waits for reads if prefetch_mode is timeout",
            0,
            MAX_S,
            unit="seconds",
            has_flag=False,
        ),
    ] = 1.0
    prefetch_host_share: Annotated[
        float,
        Share(
            "maximum share of the host's pages that prefetches may claim for requests that are not admitted yet",
            has_flag=False,
        ),
    ] = 0.5
    prefill_tokens_per_s: Annotated[
        float | Auto,
        Number(
            "prefill speed in tokens per second, with which loading is compared with computing; 0: always load",
            unit="tokens/second",
            computed_from="the measured time of passes while serving",
        ),
    ] = "auto"
    eviction_policy: Annotated[
        str, Text("eviction order of the device: auto, lru, lfu, fifo, mru, filo, priority, slru")
    ] = "auto"
    host_eviction_policy: Annotated[
        str,
        Text(
            "eviction order of the host; empty: the value of eviction_policy, but lru if that value is auto and "
            "write_policy is exclusive",
            has_flag=False,
        ),
    ] = ""
    window_tokens: Annotated[
        int,
        Tokens(
            "slots of sliding-window layers; 0: auto",
            0,
            computed_from="the model's window, max_requests, prefill_chunk_tokens, device_tokens",
            auto=0,
            has_flag=False,
        ),
    ] = 0
    mamba_size: Annotated[
        int,
        Integer(
            "maximum number of recurrent states on the device; 0: auto",
            0,
            MAX_SLOTS,
            unit="states",
            computed_from="max_requests, device_tokens, the bytes of a state, the bytes of keys and values per token",
            auto=0,
            has_flag=False,
        ),
    ] = 0
    mamba_chunk_tokens: Annotated[
        int, Tokens("recurrent states within a prompt are stored only at multiples of this length", has_flag=False)
    ] = 64
    mamba_prefill_interval: Annotated[
        int,
        Tokens(
            "recurrent states are stored at 1, 2, 4, ... times this number of prompt tokens; 0: at none of these "
            "positions",
            0,
            has_flag=False,
        ),
    ] = 256
    mamba_track_interval: Annotated[
        int, Tokens("number of decoded tokens between two stored recurrent states", has_flag=False)
    ] = 256
    host_states: Annotated[
        int,
        Integer(
            "maximum number of recurrent states on the host; their memory is part of host_bytes; 0: auto",
            0,
            MAX_SLOTS,
            unit="states",
            computed_from="host_bytes, the bytes of a state, the bytes of a host page",
            auto=0,
            has_flag=False,
        ),
    ] = 0
    model_id: Annotated[str, Text("name or digest of the weights, which is part of every page key", has_flag=False)] = (
        ""
    )
    model_name: Annotated[str, Text("name of the model, which `hicache store stat` shows", has_flag=False)] = ""
    salt: Annotated[str, Text("text that is part of every page key: only engines with the same salt share pages")] = ""
    kv_events: Annotated[
        str,
        Address(
            "address to which KV events are sent: file:PATH, tcp://*:5557, connect:tcp://router:5557; empty: no events",
            EVENTS,
        ),
    ] = ""
    kv_events_topic: Annotated[str, Text("ZeroMQ topic of KV events")] = ""
    kv_events_replay: Annotated[
        str, Address("address where subscribers request missed KV events, like tcp://*:5558", ("tcp://", "ipc://"))
    ] = ""
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    advanced: AdvancedConfig = AdvancedConfig()

    def __post_init__(self) -> None:
        settle(self)
        if self.host_page_size % self.page_size:
            raise ConfigError(
                f"page_size={self.page_size} does not divide host_page_size={self.host_page_size}; "
                f"choose one of 1, 2, 4, ... {self.host_page_size}"
            )
        _at_least("device_tokens", self.device_tokens, self.cache_page_size)
        _at_least("max_context_len", self.max_context_len, self.cache_page_size)
        if self.mamba_track_interval % self.cache_page_size:
            raise ConfigError(
                f"mamba_track_interval={self.mamba_track_interval} is not a multiple of the cache page, at whose end "
                f"states are kept; give a multiple of {self.cache_page_size} tokens"
            )
        if not isinstance(self.disk, DiskConfig | None):
            raise ConfigError(f"disk={short_repr(self.disk)} is not a DiskConfig")
        if not isinstance(self.remote, RemoteConfig | None):
            raise ConfigError(f"remote={short_repr(self.remote)} is not a RemoteConfig")
        if not isinstance(self.advanced, AdvancedConfig):
            raise ConfigError(f"advanced={short_repr(self.advanced)} is not an AdvancedConfig")
        _at_least("advanced transfer_chunk_tokens", self.advanced.transfer_chunk_tokens, self.host_page_size)
        if self.kv_events_replay and (not self.kv_events or self.kv_events.startswith("file:")):
            raise ConfigError(
                f"kv_events_replay={self.kv_events_replay} needs KV events over ZeroMQ; set kv_events to an address "
                f"like tcp://*:5557"
            )
        for store, name in ((self.disk, "disk"), (self.remote, "remote")):
            if store is not None:
                self.require_store_tier(name)

    @property
    def cache_page_size(self) -> int:
        """The number of tokens of a page of the tree: `host_page_size` if there is a host tier, else `page_size`."""
        return self.host_page_size if self.has_host else self.page_size

    @property
    def has_host(self) -> bool:
        """Return whether the engine has a host tier. With "auto", the result is True, but a built engine has no host
        tier if memory is too small."""
        return self.host_bytes != 0

    @property
    def host_order(self) -> str:
        """The eviction policy of the host."""
        return self.host_eviction_policy or host_order(self.eviction_policy, self.write_policy)

    def require_store_tier(self, name: str = "disk") -> None:
        """Raise `ConfigError` if an engine of this configuration cannot have a tier below the host."""
        if not self.has_host:
            raise ConfigError(f"the {name} tier needs host pages; set host_bytes to auto or a size")
        if not self.model_id:
            raise ConfigError(f"the {name} tier needs model_id (a name or digest of the weights) to tell models apart")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch dtype of `dtype`. Raises `ConfigError` if `dtype` is "auto"; a built engine has no such
        configuration."""
        if self.dtype == "auto":
            raise ConfigError(f"dtype=auto follows the model; set dtype to one of {', '.join(_DTYPES)}")
        return dtype_named(self.dtype)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build a configuration from plain values; `disk`, `remote` and `advanced` are mappings. Raises `ConfigError`,
        which names the wrong setting."""
        return cls._of(as_mapping(values, "the configuration"))

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser, title: str = "settings") -> None:
        """Add the flag `--config FILE`, and the flags of all settings that have a flag, like `--device-tokens` and
        `--disk-path`.

        A setting whose flag is not given has the value of the file, or the default.
        """
        for section, cls in _SECTIONS_WITH_FLAGS.items():
            group = parser.add_argument_group(section or title)
            if not section:
                group.add_argument("--config", type=path_flag, metavar="FILE", help="YAML file with any setting")
            add_section(group, section, cls)

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, **defaults: Any) -> EngineConfig:
        """Combine `defaults`, the file of `--config` and the given flags. Flags override the file, and the file
        overrides the defaults."""
        values, sources = _combined(flags, defaults)
        with naming_flags(sources):
            return cls._of(values)

    @staticmethod
    def sources_of(flags: argparse.Namespace, **defaults: Any) -> Mapping[str, str]:
        """Return the source of each value that `from_flags` did not take from a field's default, by `name` or
        `section.name`."""
        return _combined(flags, defaults)[1]

    @classmethod
    def _of(cls, values: Mapping[Any, Any]) -> EngineConfig:
        plain = {key: value for key, value in values.items() if key not in _NESTED or value is not None}
        for section in _NESTED.keys() & plain.keys():
            plain[section] = from_mapping(
                _NESTED[section], as_mapping(plain[section], section), section, partial(flag_of, section)
            )
        config: EngineConfig = from_mapping(cls, plain, "the configuration", partial(flag_of, ""))
        return config


_Nested: TypeAlias = type[DiskConfig | RemoteConfig | AdvancedConfig]
_NESTED: Mapping[str, _Nested] = {"disk": DiskConfig, "remote": RemoteConfig, "advanced": AdvancedConfig}
# The class of the settings of each section. The names of a section's settings begin with the section's name.
SECTIONS: Mapping[str, type[EngineConfig] | _Nested] = {"": EngineConfig, **_NESTED}
_SECTIONS_WITH_FLAGS = {section: cls for section, cls in SECTIONS.items() if cls is not AdvancedConfig}


def _combined(flags: argparse.Namespace, defaults: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    layers = [Layer(defaults, "default")]
    if flags.config is not None:
        layers.append(Layer(read_yaml(flags.config), f"file {flags.config}"))
    layers.append(given_flags(flags, _SECTIONS_WITH_FLAGS))
    return combine(layers, _NESTED.keys())


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name}={value} is below the minimum of {minimum}; give at least {minimum}")
