# For GPU users: docker build -t idlm . && docker run --gpus all --ipc=host -it idlm
# (data workers and NCCL exchange tensors in shared memory, of which a container has 64 MB without --ipc=host).
# CUDA is the one that torch was built with, to the minor version: DeepSpeed refuses to compile with another one.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev build-essential git make \
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

WORKDIR /opt/idlm
COPY . .
RUN pip install --no-cache-dir -e '.[gpu,serve,eval,dev]'

# The image is good when the tests that need no GPU pass in it.
RUN HF_HUB_OFFLINE=1 python3 -m pytest -q -n 2

CMD ["bash"]
