# syntax=docker/dockerfile:1
# Two images. The default one has SGLang and this package; `--target registry` has the registry alone:
#   docker build -t sglang-mooncake .
#   docker build -t sglang-mooncake-registry --target registry .
ARG SGLANG=v0.5.23
ARG PYTHON=3.12

# The Python that the wheel is for must be the one of the image that gets it.
FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY te te
COPY bootstrap_server bootstrap_server
COPY kvstore kvstore
COPY sglang_mooncake sglang_mooncake
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS registry
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
USER nobody
EXPOSE 8998
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8998/health', timeout=4)"]
# The registry listens on a public address only with a secret (docs/security.md): mount a file, and
# give --secret-file, or --insecure on a network of your own.
ENTRYPOINT ["python", "-m", "bootstrap_server", "--host", "0.0.0.0"]

FROM lmsysorg/sglang:${SGLANG}
COPY --from=build /wheels /wheels
# te opens libibverbs and librdmacm of rdma-core at run time. Without them transfers use TCP. RDMA
# needs `docker run --ulimit memlock=-1 --device /dev/infiniband`.
RUN apt-get update && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir --no-deps /wheels/*.whl && rm -r /wheels
