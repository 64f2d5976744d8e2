from hicache.integrations.vllm.connector import HiCacheConnector as HiCacheConnector
from hicache.integrations.vllm.offloading_spec import HiCacheOffloadingSpec as HiCacheOffloadingSpec
from hicache.integrations.vllm.policy import ARCPolicy as ARCPolicy
from hicache.integrations.vllm.policy import FIFOPolicy as FIFOPolicy
from hicache.integrations.vllm.policy import LFUPolicy as LFUPolicy
from hicache.integrations.vllm.policy import LRUPolicy as LRUPolicy
from hicache.integrations.vllm.policy import SLRUPolicy as SLRUPolicy
from hicache.integrations.vllm.tier import HiCacheTier as HiCacheTier
