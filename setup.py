"""Package metadata and extras only; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    # Read as text: importing the package at build time would need its dependencies.
    text = (HERE / "edgeds" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("edgeds/_version.py has no __version__")
    return match.group(1)


CPU = ["onnxruntime>=1.20,<1.34"]
# The headless wheel works on a bare server. JetPack's own OpenCV (with GStreamer) also answers to `import cv2`;
# on a Jetson leave this extra out. `opencv-python` (with windows) can take its place anywhere.
VISION = ["opencv-python-headless>=4.8,<6"]
# Signs and checks bundles. Ubuntu on a Jetson has it as python3-cryptography.
SIGN = ["cryptography>=42"]
# Training (edgeds recover) on a workstation. On a Jetson torch is JetPack's, which pip must not replace.
TORCH, NOT_A_JETSON = "torch>=2.4,<3", "platform_machine != 'aarch64'"
SAFETENSORS = "safetensors>=0.4"
WORKSHOP = ["onnx>=1.16,<2", "pycocotools>=2.0.8", *CPU, *VISION]

# Turns text into tokens for encoders and language models; on devices too.
TEXT = ["tokenizers>=0.19,<1"]

# Conversations by a model's own template, and guided decoding.
LLM = [*TEXT, "jinja2>=3.1.6,<4", "llguidance>=1.9,<2"]

# Reads language models in GGUF files, on a workstation.
GGUF = ["gguf>=0.10,<1"]

RTX_PLATFORM = "sys_platform == 'linux' and platform_machine == 'x86_64'"

EXTRAS = {
    "cpu": CPU,
    "vision": VISION,
    "jetson": ["pycuda>=2024.1"],
    "sign": SIGN,
    "text": TEXT,
    "llm": LLM,
    "gguf": GGUF,
    "workshop": WORKSHOP,
    "demo": WORKSHOP,
    "train": [*WORKSHOP, f"{TORCH}; {NOT_A_JETSON}", SAFETENSORS],
    # Builds engines for RTX GPUs on any Linux PC, with or without a GPU. The two wheels must be of one version.
    "rtx": [f"tensorrt_rtx_cu13_{part}==1.7.1.116; {RTX_PLATFORM}" for part in ("libs", "bindings")],
    # Filled by the issues that need them; named now so that install commands stay stable.
    "serve": [],
    "fleet": [],
    "dev": [
        *WORKSHOP,
        *SIGN,
        *LLM,
        *GGUF,
        # Other Pythons may get torch with gigabytes of CUDA; tests of training run on the one that CI uses.
        f"{TORCH}; {NOT_A_JETSON} and python_version == '3.11'",
        f"{SAFETENSORS}; python_version == '3.11'",
        "build>=1.2",
        "hypothesis>=6.100",
        "mypy>=1.11",
        "pillow>=10",
        "psutil>=5.9",
        "pytest>=8",
        "ruff>=0.6",
        # The test of the wheel's contents builds one without network access.
        "setuptools>=64",
        "wheel>=0.40",
    ],
}

setup(
    name="edgeds",
    version=read_version(),
    description="Prune, calibrate, pack and run models on embedded NVIDIA GPUs, inside a power budget",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["edgeds", "edgeds.*"]),
    package_data={"edgeds": ["py.typed", "boards/*.json"]},
    install_requires=["numpy>=1.24", "tqdm>=4.60"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["edgeds=edgeds.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
