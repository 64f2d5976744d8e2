# An image of `hicache serve`, see docs/deploying.md: `docker build -t hicache .`, or podman or buildah.
# BASE: Debian or Ubuntu with Python 3.11 or newer; where it has a torch from 2.11 to 2.15, that one is used.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
# What pip is told. For machines without a GPU: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu".
ARG TORCH="torch>=2.11,<2.16"
# Apart from the code, so that a change of it does not install torch again.
RUN python3 -m venv --system-site-packages /opt/hicache && /opt/hicache/bin/python -m pip install --no-cache-dir ${TORCH}
COPY . /src
RUN /opt/hicache/bin/python -m pip install --no-cache-dir "/src[serve,encrypt]"

FROM ${BASE}
# Triton compiles with it what launches its kernels.
RUN command -v cc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/hicache /opt/hicache
RUN mkdir -m 700 /data && chown 1000:1000 /data
USER 1000:1000
VOLUME /data
# Compiled kernels and unpacked models are kept with the pages: otherwise every start is a first one.
ENV PATH=/opt/hicache/bin:$PATH HOME=/data XDG_CACHE_HOME=/data/cache HF_HOME=/data/hub TRITON_CACHE_DIR=/data/triton
EXPOSE 8000
# Docker and podman alone look at it; an orchestrator probes by itself. A large model takes minutes to load.
HEALTHCHECK --start-period=15m --interval=10s --timeout=10s CMD ["python3", "-c", "import http.client as http; \
connection = http.HTTPConnection('127.0.0.1', 8000, timeout=8); connection.request('GET', '/health'); \
raise SystemExit(connection.getresponse().status != 200)"]
ENTRYPOINT ["hicache"]
CMD ["serve", "--host", "0.0.0.0", "--disk-path", "/data/pages"]
