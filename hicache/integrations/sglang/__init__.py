"""The plug-in for SGLang, which loads `HiCacheDisk` from `hicache.integrations.sglang.storage`."""
