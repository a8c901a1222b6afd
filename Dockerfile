# rlinf-vla in a container, on a CPU or on NVIDIA GPUs. docs/start/install.md says how to build and run it, and what is not tested.
FROM python:3.11-slim-bookworm AS base
# What SAPIEN, OpenCV, MuJoCo (EGL, OSMesa) and the RealSense library load.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make libx11-6 libgl1 libglib2.0-0 libegl1 libosmesa6 libusb-1.0-0 \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/rlinf-vla
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/opt/rlinf-vla/constraints.txt OMP_WAIT_POLICY=passive
WORKDIR /work
ENTRYPOINT ["rlinf-vla"]
CMD ["--help"]

FROM base AS cpu
ARG EXTRAS=maniskill,ray,serve
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install "/opt/rlinf-vla[${EXTRAS}]" \
    && rlinf-vla doctor --fix

FROM base AS cuda
ARG EXTRAS=maniskill,ray,serve,cuda
# What NVIDIA's container runtime shall give: computing, and Vulkan and EGL for the simulators.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
RUN apt-get update && apt-get install -y --no-install-recommends libvulkan1 && rm -rf /var/lib/apt/lists/* \
    && pip install "/opt/rlinf-vla[${EXTRAS}]"
