# SGLang's Python sources, with what importing its cache controller needs and without its GPU kernels, which no CPU can
# load: tests/integrations/sglang/conftest.py stands in for these.
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet --no-deps "sglang==$release"
"$venv/bin/pip" install --quiet transformers==5.19.0 triton==3.9.0 numpy openai aiohttp apache-tvm-ffi==0.1.11 cloudpickle \
    compressed-tensors==0.18.0 dill einops fastapi IPython msgspec orjson packaging partial_json_parser pillow \
    prometheus_client psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle tqdm \
    uvicorn uvloop cryptography $test_tools
