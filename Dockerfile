# CPU image: `docker build -t asyncrl .`, then `docker run --rm asyncrl run configs/quickstart.toml`.
# For GPUs start from an image that has CUDA and torch, and build with --build-arg BASE=... --build-arg TORCH=
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH="torch==2.13.0"
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock pyproject.toml README.md ./
COPY asyncrl asyncrl
RUN if [ -n "$TORCH" ]; then pip install --no-cache-dir "$TORCH" -c requirements.lock; fi \
 && pip install --no-cache-dir '.[tasks,lowbit,sandbox]' -c requirements.lock
COPY configs configs
ENV OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["asyncrl"]
CMD ["--help"]
