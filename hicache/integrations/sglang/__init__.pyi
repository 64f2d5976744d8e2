from hicache.integrations.sglang.linker import HiCacheLinker as HiCacheLinker
