"""Print the path of the folder ``mindformers_adaptive/register_path``, which MindFormers needs to use this package.

Usage: ``run_mindformer.py --register_path "$(python -m mindformers_adaptive.register_path)"``.
"""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).resolve().parent)
