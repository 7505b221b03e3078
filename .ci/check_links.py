"""Check links of Markdown files: targets and headings exist, and the text says where a link leads.

    python .ci/check_links.py FILE...

Print one line for each fault and exit with 1 if there is one. Web addresses are not checked.
"""

import re
import sys
from pathlib import Path

# Link texts that mean nothing without their sentence.
VAGUE = {"above", "below", "here", "how", "limits", "link", "page", "that", "there", "this", "why"}


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the headings of a page in the form of GitHub's anchors."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def faults(page: Path) -> list[str]:
    """Return one sentence for each faulty link of a page."""
    sentences = []
    for label, link in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(page)):
        if label.strip().lower() in VAGUE:
            sentences.append(f"{page}: the link text {label!r} does not say where it leads")
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            sentences.append(f"{page}: {link} does not exist")
        elif anchor and anchor not in anchors(target):
            sentences.append(f"{page}: {link} has no heading of that name")
    return sentences


if __name__ == "__main__":
    found = [sentence for name in sys.argv[1:] for sentence in faults(Path(name))]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
