"""Packaging of mindformers_adaptive."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "mindformers_adaptive" / "__init__.py").read_text())[1]

setup(
    name="mindformers_adaptive",
    version=VERSION,
    description="Adaptive loss scaling for MindSpore and MindFormers, on Ascend, GPU and CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mindformers_adaptive", "mindformers_adaptive.*"]),
    install_requires=[
        "mindspore>=2.7,<2.11",
        "mindformers>=1.6,<1.10",
        "numpy>=1.20,<2",
        "pyyaml>=6",
        "tensorboardX>=2.5",
        "tqdm>=4.60",
    ],
    entry_points={"console_scripts": ["adaptive-loss-scale=mindformers_adaptive.cli.program:main"]},
    extras_require={
        "plot": ["matplotlib>=3.8"],
        "dev": [
            "matplotlib>=3.8",
            "pytest>=8",
            "hypothesis>=6",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-PyYAML",
            "build",
        ],
    },
)
