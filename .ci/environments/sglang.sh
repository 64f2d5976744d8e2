# SGLang's Python sources, with what importing its cache controller needs and without its GPU kernels, which no CPU can
# load: tests/integrations/sglang/conftest.py stands in for these.
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet --no-deps "sglang==$release"
# The transformers that it names: others have model types of the same names.
transformers=$("$venv/bin/python" -c 'from importlib.metadata import requires
print(next(name for name in requires("sglang") if name.startswith("transformers==")))')
"$venv/bin/pip" install --quiet "$transformers" triton==3.9.0 numpy openai aiohttp apache-tvm-ffi==0.1.11 cloudpickle \
    compressed-tensors==0.18.0 dill einops fastapi IPython msgspec orjson packaging partial_json_parser pillow \
    prometheus_client psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle tqdm \
    uvicorn uvloop cryptography $test_tools
