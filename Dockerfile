# ConServe with vLLM for NVIDIA GPUs.   docker build -t conserve .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 conserve \
    && install --directory --owner=conserve --group=conserve --mode=0700 /var/lib/conserve
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/conserve-*.whl)[cuda]"
USER conserve
WORKDIR /home/conserve
ENV CONSERVE_HOME=/var/lib/conserve
EXPOSE 8000
# No entry point: KubeRay starts the container with `ray start`.
CMD ["conserve", "--help"]
