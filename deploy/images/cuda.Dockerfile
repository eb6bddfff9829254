# The image for NVIDIA GPUs. At the root of the repository:
#   docker build --file deploy/images/cuda.Dockerfile --tag charonia:cuda .
# The build stages of both images run the same lines: a test runs them in a fresh environment. See docs/deploying.md.
# CUDA's libraries come with torch, the driver's are those of the host: the base image is no other than the CPU's.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
ARG TORCH="torch>=2.11"
ARG EXTRAS=llm,media,gpu,ray,s3,otel
# The versions with which the tests ran; /dev/null holds none.
ARG CONSTRAINTS=constraints.txt
ARG PACKAGES=onnxruntime-gpu
ENV VENV=/opt/charonia PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
RUN python -m venv --without-pip "$VENV"
# What charonia needs is a layer of its own: it changes with these two files alone, not with every line of the source.
COPY pyproject.toml deploy/images/constraints.txt /dependencies/
WORKDIR /dependencies
RUN pip --python "$VENV/bin/python" install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} --constraint "$CONSTRAINTS" "$TORCH"
RUN python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *(r for e in sys.argv[1].split(",") if e for r in p["optional-dependencies"][e] if not r.startswith("charonia[")), sep="\n")' "$EXTRAS" > wanted.txt
RUN pip --python "$VENV/bin/python" install --constraint "$CONSTRAINTS" --requirement wanted.txt $PACKAGES
COPY . /source
WORKDIR /source
RUN pip --python "$VENV/bin/python" install --no-deps .

FROM ${PYTHON_IMAGE}
ARG REVISION
LABEL org.opencontainers.image.title="Charonia" \
    org.opencontainers.image.description="A streaming, LLM-centric inference server" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="$REVISION"
# tini is process 1: it hands signals on from the first moment, and reaps what a lost engine core leaves behind.
# Triton compiles the starters of its kernels when they are first used, which takes gcc.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 tini \
    && rm -rf /var/lib/apt/lists/* && useradd --uid 10001 --user-group --create-home charonia \
    && echo 'PATH=/opt/charonia/bin:$PATH' > /etc/profile.d/charonia.sh
COPY --from=build /opt/charonia /opt/charonia
# The server writes its URL there, and its health is asked for at that: whatever its port is, encrypted or not.
ENV PATH=/opt/charonia/bin:$PATH CHARONIA_URL_FILE=/tmp/charonia.url
USER 10001:10001
WORKDIR /home/charonia
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-m", "charonia.cli.health"]
ENTRYPOINT ["tini", "-s", "--", "charonia"]
CMD ["serve", "--model-repository", "/models"]
