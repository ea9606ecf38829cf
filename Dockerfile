# The server on CPUs, as a user without rights. It listens on loopback unless told: KVLINGO_HOST, with KVLINGO_KEYS.
#   docker build -t kvlingo .
#   docker run --network host -v kvlingo-cache:/cache kvlingo serve --model small=HuggingFaceTB/SmolLM2-135M-Instruct
# deploy/ has the same for Kubernetes.

FROM python:3.12-slim AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /app
# By itself, so that a change to the package does not fetch it again.
RUN /app/bin/pip install --no-cache-dir --disable-pip-version-check --index-url "$TORCH_INDEX" "torch==$TORCH"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvlingo ./kvlingo
RUN /app/bin/pip install --no-cache-dir --disable-pip-version-check '.[serve,gguf,hub,json,otel,route]'

FROM python:3.12-slim
RUN groupadd --gid 10001 kvlingo \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin kvlingo \
    && install --directory --owner 10001 --group 10001 --mode 0700 /cache
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface \
    KVLINGO_CACHE=/cache/kvlingo
WORKDIR /cache
USER 10001:10001
VOLUME ["/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/healthz' % (os.environ.get('KVLINGO_PORT') or 8000), timeout=4)"]
ENTRYPOINT ["kvlingo"]
CMD ["serve"]
