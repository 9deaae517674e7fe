# docker build -t idlm .
#   serve (compose.yaml does the same):
#     docker run --gpus all -p 127.0.0.1:8000:8000 -v /path/of/model:/model:ro -e IDLM_API_KEY idlm
#   train: docker run --gpus all --ipc=host --no-healthcheck -it idlm idlm-train recipe=tiny
# (data workers and NCCL exchange tensors in shared memory, of which a container has 64 MB without --ipc=host).
# CUDA is the one that torch was built with, to the minor version: DeepSpeed refuses to compile with another one.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# pdsh and ssh: recipes/launch/hosts.sh. tini: the first process, which hands signals on.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential git make openssh-client pdsh python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# The working directory must not shadow libraries: transformers imports a package called `kernels`.
ENV PYTHONSAFEPATH=1 \
    PYTHONPATH=/opt/idlm \
    PATH=/opt/venv/bin:$PATH \
    OMP_WAIT_POLICY=passive \
    TOKENIZERS_PARALLELISM=false

# The torch that our figures were measured with.
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cu130 'torch==2.11.*'

# Dependencies before sources: with an empty package in their place, only a change of pyproject.toml installs anew.
WORKDIR /opt/idlm
COPY pyproject.toml .
RUN mkdir -p src/idlm \
    && touch README.md LICENSE src/idlm/__init__.py \
    && pip install --no-cache-dir -e '.[gpu,flash-attn,serve]' \
    && rm -r README.md LICENSE src

# Runs write below the working directory.
RUN useradd --create-home idlm && chown idlm:idlm /opt/idlm
COPY --chown=idlm:idlm . .
USER idlm

# The key comes from the environment: without IDLM_API_KEY the server listens on its own machine only.
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "-g", "--"]
CMD ["idlm-serve", "model=/model", "host=0.0.0.0", "port=8000"]
