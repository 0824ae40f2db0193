"""Draw the badges of the first page: what they say is read from the project.

python -m scripts.site.draw_badges
"""

import re

from mindformers_adaptive import __version__
from mindformers_adaptive.text.files import atomic_write
from scripts.studies.reporting import ROOT

IMAGES = ROOT / "docs" / "images"
# Wide enough for the letters of the fonts that browsers have.
CHARACTER, PADDING = 7, 10


def badges():
    """Return what each badge says: its name and its value."""
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^(\w+)==(.+)$", requirements, re.MULTILINE))
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text(encoding="utf-8"))
    [licence] = re.findall(r"(Apache) License\s+Version (2\.0)", (ROOT / "LICENSE").read_text(encoding="utf-8"))
    return {
        "version": ("version", __version__),
        "python": ("Python", ", ".join(pythons)),
        "mindspore": ("MindSpore", pinned["mindspore"]),
        "mindformers": ("MindFormers", pinned["mindformers"]),
        "device": ("run on", "CPU"),
        "license": ("license", " ".join(licence)),
    }


def picture(name, value):
    """Return a badge as SVG."""
    left, right = (len(text) * CHARACTER + PADDING for text in (name, value))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">
<title>{name}: {value}</title>
<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{right}" height="20" fill="#0072b2"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2}" y="14">{name}</text><text x="{left + right / 2}" y="14">{value}</text>
</g></svg>
"""


def main():
    for file, text in badges().items():
        with atomic_write(IMAGES / f"badge_{file}.svg") as svg:
            svg.write(picture(*text))


if __name__ == "__main__":
    main()
