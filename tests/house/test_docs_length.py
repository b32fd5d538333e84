"""Pages of docs/ are short, and so is their sum: words as `wc -w` counts them, tables included."""

from pathlib import Path

import pytest

from tests.fixtures import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LONGEST = 2000
MOST = 26000  # of all pages together
BULLET = 60


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def bullets(text: str) -> list[str]:
    """List items with the lines that continue them; no item of a fenced block."""
    found: list[str] = []
    fenced = inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced, inside = not fenced, False
        elif fenced:
            continue
        elif line.lstrip().startswith(("- ", "* ")):
            found.append(line)
            inside = True
        elif inside and line.strip():
            found[-1] += " " + line
        else:
            inside = False
    return found


def too_long(page: Path) -> list[str]:
    """The bullets and the page that have too many words, each with their number."""
    text = page.read_text(encoding="utf-8")
    found = [(each[:60], len(each.split())) for each in bullets(text)]
    long = [f"{start}: {words} words" for start, words in found if words > BULLET]
    total = len(text.split())
    return [*long, f"the page: {total} words"] if total > LONGEST else long


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_and_its_bullets_are_short(page):
    assert not too_long(page)


def test_all_pages_together_are_short():
    words = {name(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= MOST, sorted(words.items(), key=lambda item: -item[1])


def test_bullets_are_found():
    text = "- a b\n  c\n\nd\n```\n- e\n```\n* f\n"
    assert bullets(text) == ["- a b   c", "* f"]
