"""The plug-in for SGLang: SGLang loads `HiCacheDisk` from `hicache.integrations.sglang.storage`."""
