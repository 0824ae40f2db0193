"""Packaging of mindformers_adaptive."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "mindformers_adaptive" / "__init__.py").read_text())[1]

EXTRAS = {
    # The tested pairs that pip can install; MindFormers 2 requires hyper-parallel, which PyPI does not have. Leave this
    # extra out on Ascend: it would replace the MindSpore that fits the installed CANN.
    "mindformers": ["mindspore>=2.7,<2.11", "mindformers>=1.6,<1.10", "numpy<2"],
    "plot": ["matplotlib>=3.8"],
    "tensorboard": ["tensorboardX>=2.5"],
    # The site of scripts/site/build_site.py.
    "docs": ["Sphinx>=8.1", "myst-parser>=4", "furo>=2024.8", "sphinx-copybutton>=0.5", "ipython_pygments_lexers"],
}

setup(
    name="mindformers_adaptive",
    version=VERSION,
    description="Adaptive loss scaling for MindSpore and MindFormers, on Ascend and CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The maintainers of mindformers_adaptive",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["loss scaling", "mixed precision", "FP16", "MindSpore", "MindFormers", "Ascend", "deep learning"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Natural Language :: Chinese (Simplified)",
        "Natural Language :: English",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["mindformers_adaptive", "mindformers_adaptive.*"]),
    package_data={"": ["*.pyi"], "mindformers_adaptive": ["py.typed", "plots/page.html"]},
    # Neither MindSpore nor MindFormers: the lab and most of the program need none of them.
    # Before filelock 3.30 a forked process that ends would let the lock of its parent go.
    # msgspec reads a record of a month of steps in seconds, and its schema is the one definition of a record line.
    install_requires=["numpy>=1.21", "pyyaml>=6", "filelock>=3.30", "tqdm>=4.60", "msgspec>=0.18"],
    entry_points={"console_scripts": ["adaptive-loss-scale=mindformers_adaptive.__main__:main"]},
    extras_require={
        **EXTRAS,
        "dev": [
            *(requirement for extra in EXTRAS.values() for requirement in extra),
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6",
            "ml_dtypes>=0.5",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-PyYAML",
            "build",
            "twine",
            "pre-commit",
            # The handwritten digits and the intervals of scripts/studies/worth_it.py.
            "scikit-learn>=1.3",
        ],
    },
)
