# ConServe with vLLM for NVIDIA GPUs.   docker build -t conserve .
# The base is Python 3.11.16 of September 2026, for x86-64 and arm64; another one: --build-arg BASE=IMAGE@sha256:...
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 conserve \
    && install --directory --owner=conserve --group=conserve --mode=0700 /var/lib/conserve
COPY requirements/cuda.txt /wheels/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /wheels/cuda.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/conserve-*.whl
USER conserve
WORKDIR /home/conserve
ENV CONSERVE_HOME=/var/lib/conserve
EXPOSE 8000
# No entry point: KubeRay starts the container with `ray start`.
CMD ["conserve", "--help"]
