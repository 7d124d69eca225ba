# ConServe with vLLM.   docker build -t conserve .                             for NVIDIA GPUs
#                       docker build -t conserve --build-arg LOCK=cpu .        without a GPU
# The base is Python 3.11.16 of September 2026, for x86-64 and arm64; another one: --build-arg BASE=IMAGE@sha256:...
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG LOCK=cuda
LABEL org.opencontainers.image.title="ConServe" \
      org.opencontainers.image.description="Conversation-level orchestrator for agentic LLM serving on vLLM" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 conserve \
    && install --directory --owner=conserve --group=conserve --mode=0700 /var/lib/conserve
COPY requirements/${LOCK}.txt /wheels/lock.txt
# Torch's CPU build is in PyTorch's own index only.
RUN pip install --no-cache-dir --no-deps --require-hashes -r /wheels/lock.txt \
    $([ "$LOCK" != cpu ] || echo --extra-index-url https://download.pytorch.org/whl/cpu)
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/conserve_llm-*.whl
USER conserve
WORKDIR /home/conserve
ENV CONSERVE_HOME=/var/lib/conserve
EXPOSE 8000
# No entry point: KubeRay starts the container with `ray start`.
CMD ["conserve", "--help"]
