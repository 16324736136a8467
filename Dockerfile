# `anybit serve` in an image: docs/serve.md, "In a container".
#
#   docker build -t anybit .
#   docker run --rm --stop-timeout 40 -p 127.0.0.1:8000:8000 -v "$PWD/out:/model:ro" anybit
#
# TORCH picks the PyTorch build. The default brings CUDA on Linux, which the engine does not need. For a smaller image:
# --build-arg TORCH="torch==2.13.0 --index-url <an index of wheels for CPUs>".

FROM debian:trixie-slim AS build
ARG TORCH="torch==2.13.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/anybit && /opt/anybit/bin/pip install --no-cache-dir ${TORCH}
COPY . /src
RUN /opt/anybit/bin/pip install --no-cache-dir "/src[serve]"

FROM debian:trixie-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home anybit
COPY --from=build /opt/anybit /opt/anybit
USER anybit
EXPOSE 8000
HEALTHCHECK --start-period=60s \
    CMD ["/opt/anybit/bin/python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["/opt/anybit/bin/anybit", "serve", "/model"]
CMD ["--host", "0.0.0.0"]
