"""Pages of docs/ are short: words as `wc -w` counts them, tables included."""

from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LONGEST = 2000
# Pages that are longer still. The list only shrinks: a page that is short enough must leave it.
NOT_YET = {
    *("architecture.md", "evaluation.md", "published_checkpoints.md"),
    *("qserve.md", "serving.md", "turboquant.md", "weights.md"),
}
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
    if name(page) in NOT_YET:
        assert too_long(page), f"{name(page)} is short enough: take it out of NOT_YET"
    else:
        assert not too_long(page)


def test_pages_that_are_not_yet_short_exist():
    assert {name(page) for page in PAGES} >= NOT_YET


def test_bullets_are_found():
    text = "- a b\n  c\n\nd\n```\n- e\n```\n* f\n"
    assert bullets(text) == ["- a b   c", "* f"]
