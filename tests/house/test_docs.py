"""Docs cannot rot: their Python runs, the paths they name exist, generated tables are current."""

import re
import subprocess
import sys
from os import environ
from pathlib import Path

import pytest
import yaml

import hf_vq
from hf_vq import env
from hf_vq.backends import refusals
from hf_vq.cli import build_parser
from hf_vq.serving import continuous_batching as paged
from tests.fixtures import ROOT

FOLDERS = (
    *("benchmarks", "docs", "hf_vq", "kernels", "model_cards"),
    *("notebooks", "plugins", "scripts", "tests"),
)
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
RUNNABLE = [page for page in PAGES if page.parent == ROOT or ROOT / "docs" in page.parents]
FENCE = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
PATH_SUFFIX = re.compile(r"\.(py|md|toml|txt|json|jsonl|cpp|h|cu|cuh|ipynb|yml|yaml|safetensors)$")
SOURCE_SUFFIX = re.compile(r"\.(py|md|toml|cpp|h|cu|cuh|ipynb)$")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[tuple[str, str, int]]:
    """(info string, body, line of the body) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [(m[2].strip(), m[3], text.count("\n", 0, m.start()) + 2) for m in found]


def python_of(page: Path) -> list[tuple[str, int]]:
    return [(body, line) for info, body, line in fences(page) if info == "python"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in RUNNABLE if python_of(p)], ids=name)
def test_python_blocks_run(page, tmp_path):
    """In order, in one process per page, in an empty folder that sees the checkout's tests/."""
    if page.name == "serving.md" and (reason := paged.objection()):
        pytest.skip(reason)
    # Padded so that a traceback names the line in the page.
    lines: list[str] = []
    for body, line in python_of(page):
        lines += [""] * (line - 1 - len(lines)) + body.splitlines()
    (tmp_path / page.name).with_suffix(".py").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, page.with_suffix(".py").name],
        cwd=tmp_path,
        env={**environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{name(page)}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_python_and_runs_all_of_it():
    infos = [info for info, _, _ in fences(ROOT / "README.md")]
    assert "python" in infos
    assert not [info for info in infos if info.startswith("py") and info != "python"]


def prose(page: Path) -> str:
    """The page without its fenced blocks and web addresses."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"https?://\S+", "", text)


def linked(page: Path) -> set[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return {link.split("#")[0] for link in links if ":" not in link} - {""}


def spelled(page: Path) -> set[str]:
    """Inline code that is a path: it has a folder and ends like a file, or starts at the root."""
    found = set()
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        if not re.fullmatch(r"[\w.@-]+(/[\w.@-]+)*/?", code):
            continue
        first, slash, _ = code.partition("/")
        if slash and (PATH_SUFFIX.search(code) or code.endswith("/") or (ROOT / first).is_dir()):
            found.add(code)
    return found


def mentioned(page: Path) -> set[str]:
    """Inline code that is the bare name of a source file."""
    codes = re.findall(r"(?<!`)`([\w.-]+)`(?!`)", prose(page))
    return {code for code in codes if SOURCE_SUFFIX.search(code)}


def drawn(page: Path) -> set[str]:
    """Every entry of the annotated trees: fenced blocks that say `tree`, two spaces a level."""
    found = set()
    for info, body, _ in fences(page):
        above: list[str] = []
        for line in body.splitlines() if info == "tree" else []:
            names = re.split(r"\s{2,}", line.strip())[0].split()
            depth = (len(line) - len(line.lstrip())) // 2
            if line.strip():
                above = above[:depth]
                found |= {"/".join([*above, entry.rstrip("/")]) for entry in names}
                above.append(names[0].rstrip("/"))
    return found


# Where a folder of the checkout lies in a wheel.
PACKAGED = {"hf_vq/kernels": "kernels"}


def exists(path: str, page: Path) -> bool:
    path = PACKAGED.get(path, path)
    return any((base / path).exists() for base in (ROOT, page.parent, ROOT / "hf_vq"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_exists(page):
    missing = [
        path for path in linked(page) | spelled(page) | drawn(page) if not exists(path, page)
    ]
    assert not missing, f"{name(page)} names what is not there: {sorted(missing)}"


# Files that the library writes for its users; none of them is in the repository.
WRITTEN_FOR_USERS = {"README.md", "config.json"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_source_file_mentioned_exists(page):
    known = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    known |= {path.name for path in ROOT.iterdir()} | WRITTEN_FOR_USERS
    # kernels/ must not have one: the pages say so by name.
    assert not mentioned(page) - known - {"__init__.py"}, name(page)


def test_paths_are_really_collected():
    contributing, kernels = ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md"
    assert {"hf_vq/env.py", "hf_vq/formats", "kernels/cpu", "tests/house/test_layers.py"} <= drawn(
        contributing
    )
    assert "kernels/cpu/api.h" in spelled(kernels)
    assert not exists("kernels/cpu/nothing.h", kernels)
    assert linked(contributing)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_table_lost_its_rows(page):
    """A record that is made anew without some rows leaves a sentence where a table was."""
    assert "Not measured: `python" not in page.read_text(encoding="utf-8")


def test_a_page_has_the_table_of_variables():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert env.table() in text, "run `python -m benchmarks tables`"


def test_the_readme_is_short_and_names_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 110
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", text, re.MULTILINE))


def test_the_index_names_every_page():
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"index.md"}
    assert linked(docs / "index.md") == pages


# Messages of Transformers, and of Python.
OTHERS = {
    "Unknown quantization type",
    "Unknown quantization backend",
    "unexpected keyword argument 'quantization_config'",
    "fine-tuning on purely quantized models",
}


def test_troubleshooting_quotes_what_the_package_says():
    """Of every symptom in inline code, the words between `..`."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(symptoms) > 15
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "hf_vq").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", sources) + str(refusals.dtype("float32", refusals.HALVES))
    for symptom in symptoms:
        for quoted in re.findall(r"`` (.+?) ``|`([^`]+)`", symptom):
            for words in "".join(quoted).split(".."):
                words = words.strip(" ,:`")
                assert words in said or words in OTHERS or " " not in words, words


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_every_anchor_exists(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if ":" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert not anchor or anchor in anchors(target), f"{name(page)}: {link}"


def test_the_citation_is_of_this_version_and_has_the_papers_of_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["version"]) == ("hf_vq", hf_vq.__version__)
    papers = [each["url"] for each in citation["references"]]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert papers == re.findall(r"https://arxiv\.org/abs/[\d.]+", readme)
    for each in citation["references"]:
        assert each["title"] in readme, each["title"]
        assert f"{each['authors'][0]['family-names']} et al." in readme, each["title"]


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_issue_forms_ask_for_what_a_reader_needs(form):
    path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml"
    page = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert page["name"] and page["description"]
    ids = [field["id"] for field in page["body"]]
    assert len(set(ids)) == len(ids) and "versions" in ids
    asked = path.read_text(encoding="utf-8")
    verbs = set(re.findall(r"`hf-vq (\w+) MODEL`", asked))
    assert verbs == {"info", "explain"} and "hf_vq.explain" in asked
    for verb in verbs:
        assert build_parser().parse_args([verb, "MODEL"]).model == "MODEL"
