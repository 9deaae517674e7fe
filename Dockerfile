# For GPU users: docker build -t idlm . && docker run --gpus all -it idlm
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev build-essential git make \
    && rm -rf /var/lib/apt/lists/*

# The working directory must not shadow libraries: transformers imports a package called `kernels`.
ENV PYTHONSAFEPATH=1 \
    PYTHONPATH=/opt/idlm \
    PATH=/opt/venv/bin:$PATH \
    OMP_WAIT_POLICY=passive \
    TOKENIZERS_PARALLELISM=false

WORKDIR /opt/idlm
COPY . .
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -e '.[gpu,serve,eval,dev]'

# The image is good when the tests that need no GPU pass in it.
RUN python3 -m pytest -q -n 2

CMD ["bash"]
