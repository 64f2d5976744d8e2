from hicache.integrations.sglang.linker import HicacheLinker as HicacheLinker
