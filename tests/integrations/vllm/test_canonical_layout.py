"""Pages that servers with different tensor-parallel sizes exchange. Configurations, mappings, managers and CPU tiers
are vLLM's."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")

from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.gpu_worker import _canonical_block_sizes
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.integrations.vllm.identity import identity_of
from hicache.integrations.vllm.unreported_settings import ModelFiles
from vllm_tier_case import CONFIG, ROW_BYTES, key, place, scheduler

HEADS, TOKENS, WIDTH, LAYERS, BLOCKS = 2, 32, 32, ("a", "b"), 8
CHUNKS = [key(number) for number in range(4)]
Values = dict[str, torch.Tensor]  # by layer: bfloat16 [block, head, token, keys and values of a head]


class RowCopies:
    """The copies of a vLLM worker with its mappings, which vLLM runs only on a GPU."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._blocks, [self._refs], self._region = caches.tensors, caches.group_data_refs, region
        sizes = _canonical_block_sizes(caches.group_data_refs, len(caches.tensors))
        self._rows = [region.create_next_canonical_view(size) for size in sizes]

    def copy(self, block: int, row: int, is_store: bool) -> None:
        for ref in self._refs:
            on_device, on_host = self._blocks[ref.tensor_idx].tensor[block], self._rows[ref.tensor_idx][row]
            runs = ref.mapping.runs if not is_store or ref.mapping.is_writer(row) else ()
            for run in runs:
                for i in range(run.num_fragments):
                    local = on_device[run.local_offset + i * run.local_stride :][: run.fragment_size]
                    canonical = on_host[run.canonical_offset + i * run.canonical_stride :][: run.fragment_size]
                    target, source = (canonical, local) if is_store else (local, canonical)
                    target.copy_(source)

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CopyingSpec(TieringOffloadingSpec):
    """A spec for CPUs, which vLLM's own refuses. This spec makes the same checks of the mappings as vLLM's."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> RowCopies:
        self._validate_canonical_refs(kv_caches)
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        parts = self.num_chunks, rank, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        return RowCopies(kv_caches, SharedOffloadRegion(self.config.engine_id, *parts))


def cache_of(layout: str, tp: int) -> KVCacheConfig:
    """The cache of one of `tp` workers. `layout`: one of vLLM's, or MLA."""
    common = {"block_size": TOKENS, "dtype": torch.bfloat16}
    heads = FullAttentionSpec(num_kv_heads=HEADS // tp, head_size=WIDTH // 2, **common)
    spec = MLAAttentionSpec(num_kv_heads=1, head_size=HEADS * WIDTH, **common) if layout == "MLA" else heads
    page = spec.page_size_bytes
    tensor = KVCacheTensor(len(LAYERS) * BLOCKS * page, list(LAYERS), BLOCKS * page, page)
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(list(LAYERS), spec)])


def part_of(values: Values, layout: str, rank: int, tp: int) -> Values:
    """The heads of one worker, in the order of its memory."""
    parts = values if layout == "MLA" else {name: layer.chunk(tp, 1)[rank] for name, layer in values.items()}
    if layout == "LBNHC":
        return {name: part.transpose(1, 2).contiguous().transpose(1, 2) for name, part in parts.items()}
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, VllmConfig]:
    """By tensor-parallel size: a configuration of vLLM."""
    folder = tmp_path_factory.mktemp("model")
    of_model = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": HEADS, "num_hidden_layers": 2}
    LlamaConfig(**of_model, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    given = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": TOKENS,
        "distributed_executor_backend": "mp",
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    # vLLM starts programs with `-m`, which would find kernels/ of a checkout, and changes the environment.
    with contextlib.chdir(folder), mock.patch.dict(os.environ):
        return {
            tp: EngineArgs(**given, kv_transfer_config=transfer, tensor_parallel_size=tp).create_engine_config()
            for tp in (1, 2)
        }


def serve(config: VllmConfig, layout: str, path: Path, values: Values, is_store: bool) -> list[Values]:
    """Run a server whose cache holds `values`. The server stores its first blocks as `CHUNKS`, or loads the chunks that
    it finds into its last blocks. Returns the caches of its workers."""
    tp = config.parallel_config.tensor_parallel_size
    cache, caches = cache_of(layout, tp), [part_of(values, layout, rank, tp) for rank in range(tp)]
    settings = vars(build_offloading_config(config, cache)).items()
    workers: list[OffloadingConnectorWorker] = []

    def start_workers(of_scheduler: OffloadingConfig) -> None:
        engine = {"engine_id": of_scheduler.engine_id, "extra_config": of_scheduler.extra_config}
        for config.parallel_config.rank, tensors in enumerate(caches):
            spec = CopyingSpec(replace(build_offloading_config(config, cache), **engine))
            workers.append(OffloadingConnectorWorker(spec, config, cache))
            workers[-1].register_kv_caches(tensors)

    same = {name: x for name, x in settings if name not in ("engine_id", "extra_config")}
    with scheduler(path, before=start_workers, **same) as opened:

        def copy(first_block: int, rows: list[int]) -> None:
            for worker in workers:
                for i, row in enumerate(rows):
                    worker.worker.copy(first_block + i, row, is_store)

        with opened.request() as context:
            if is_store:
                place(CHUNKS, context)
                output = opened.manager.prepare_store(CHUNKS, context)
                copy(0, output.store_spec.chunk_ids.tolist())
                opened.manager.complete_store(output.keys_to_store, context)
            elif all(opened.lookup(CHUNKS, context)):
                copy(BLOCKS - len(CHUNKS), opened.manager.prepare_load(CHUNKS, context).chunk_ids.tolist())
                opened.manager.complete_load(CHUNKS, context)
        opened.until(lambda: not opened.manager.has_pending_work())
        for worker in workers:
            worker.shutdown()
    return caches


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "MLA"])
@pytest.mark.parametrize(("of_writer", "of_reader"), [(2, 1), (1, 2)])
def test_canonical_rows_are_read_with_another_tensor_parallel_size(
    configs: dict[int, VllmConfig], tmp_path: Path, layout: str, of_writer: int, of_reader: int
) -> None:
    """Each worker gets its heads from the pages of all workers of the other server. Rows that are not canonical are
    only found by servers of the same size."""
    shape = (BLOCKS, 1, TOKENS, HEADS * WIDTH) if layout == "MLA" else (BLOCKS, HEADS, TOKENS, WIDTH)
    values = {name: torch.randn(shape).bfloat16() for name in LAYERS}
    nothing = {name: torch.zeros(shape).bfloat16() for name in LAYERS}
    loaded = {name: torch.cat([nothing[name][:4], values[name][:4]]) for name in LAYERS}

    for is_canonical, expected in ((True, loaded), (False, nothing)):
        path = tmp_path / f"{is_canonical}"
        for config in configs.values():
            config.kv_transfer_config.kv_connector_extra_config["canonical_layout"] = is_canonical
            # The kernel block size that the attention backend resolves.
            config.cache_config.kv_cache_layout = "LBHNC" if layout == "MLA" else layout
        serve(configs[of_writer], layout, path, values, is_store=True)
        for tp, held in ((of_reader, expected), (of_writer, loaded)):
            for rank, cache in enumerate(serve(configs[tp], layout, path, nothing, is_store=False)):
                requested = part_of(held, layout, rank, tp)
                assert all(torch.equal(cache[name], requested[name]) for name in LAYERS)


@pytest.mark.smoke
@pytest.mark.parametrize("is_canonical", [False, True])
@pytest.mark.parametrize("is_certified", [False, True])
def test_the_size_is_left_out_of_an_identity_where_both_hold(is_canonical: bool, is_certified: bool) -> None:
    """The size is not in the identity only if the rows are canonical and vLLM knows the layout of each layer. Otherwise
    vLLM writes canonical rows whose parts depend on the size."""

    def identity(tp: int) -> dict[str, str | int]:
        parallel = replace(CONFIG.parallel, world_size=tp, tp_size=tp, is_parallelism_agnostic=is_certified)
        of_rows = {"canonical_layout": is_canonical, "worker_kv_bytes_per_block": ROW_BYTES // tp}
        return identity_of(replace(CONFIG, parallel=parallel, **of_rows), "0.33", ROW_BYTES)

    assert (identity(1) == identity(2)) is (is_canonical and is_certified)


@pytest.mark.smoke
@pytest.mark.parametrize("place", ["folder", "branch", "draft"])
def test_an_identity_has_every_byte_of_the_weights(tmp_path: Path, place: str) -> None:
    """The identity includes every byte of the weights of a model folder, of the snapshot that `--revision` names in
    `--download-dir`, and of a draft model: if one byte changes, the pages are those of another model."""
    folder, field = tmp_path, "draft_weights" if place == "draft" else "weights"
    models = {"folder": (), "draft": (ModelFiles("target"), ModelFiles(str(tmp_path)))}
    if place == "branch":
        models[place] = (ModelFiles("some/model", "branch", str(tmp_path)),)
        hub = tmp_path / "models--some--model"
        folder = hub / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (hub / "refs").mkdir()
        (hub / "refs" / "branch").write_text("abc")
        (folder / "config.json").write_text("{}")

    def identity() -> dict[str, str | int]:
        model = replace(CONFIG.model, name=str(tmp_path) if place == "folder" else "some/model")
        return identity_of(replace(CONFIG, model=model), "0.33", ROW_BYTES, models=models[place])

    weights = bytearray(1 << 21)
    (folder / "model.safetensors").write_bytes(weights)
    before = identity()
    weights[100_000] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert len(str(before[field])) == 32 and "download_dir" not in before
    assert before == {**identity(), field: before[field]} != identity()


@pytest.mark.smoke
def test_the_download_directory_stands_for_weights_that_are_not_here(tmp_path: Path) -> None:
    """If no file of a model is on this machine, servers with other download directories share no chunks."""

    def identity(folder: str) -> dict[str, str | int]:
        return identity_of(CONFIG, "0.33", ROW_BYTES, models=(ModelFiles("no/model", None, str(tmp_path / folder)),))

    assert identity("a")["weights"] == "" and identity("a") == identity("a") != identity("b")
