# LMCache's wheel with what its storage manager, its L2 adapters and `lmcache bench l2` import; without the engine side
# (transformers), CUDA and the clients of remote stores.
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet --no-deps "lmcache==$release"
"$venv/bin/pip" install --quiet "numpy<=2.2.6" numba aiofiles aiohttp blake3 cachetools httpx msgspec psutil \
    py-cpuinfo pyyaml pyzmq requests sortedcontainers "prometheus_client<=0.24.1" "opentelemetry-api<=1.40.0" \
    "opentelemetry-sdk<=1.40.0" cryptography rich $test_tools
