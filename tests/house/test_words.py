"""The project uses the words of its field: private ones that were replaced do not return."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.fixtures import ROOT

FOLDERS = ("benchmarks", "hf_vq", "kernels", "plugins", "scripts", "tests")
FILES = (".ci/run", "Makefile", "CMakeLists.txt")  # besides *.py of the checkout's root
C_SUFFIXES = {".cpp", ".h", ".cuh", ".cu"}
HASH_COMMENTS = {".ci/run", "Makefile", "CMakeLists.txt"}

# Folders with old texts, to be emptied: nothing may be added.
NOT_YET = (
    "tests",
    *(f"hf_vq/{name}" for name in ("backends", "cache", "fit", "nn", "ops", "serving")),
)

# The first word of a docstring that begins no sentence with a subject or an imperative.
OPENING = re.compile(r"(What|Whatever|Whether|Of|As|That|Those|How)\b")
OPENING_CURE = 'begin with a verb or a noun ("True if ..." for a test)'

_END = r"(?=[.,;:)]|$)"  # of a clause

# Phrases in docstrings, comments and texts that users read -> what to write.
PHRASES = {
    re.compile(pattern, re.IGNORECASE): cure
    for pattern, cure in {
        r"\blikewise\b": "repeat what is meant",
        r"\bbeside\b": '"next to" or "in addition to"',
        r"\bas (they|it) (are|is|was|were)" + _END: '"unchanged"',
        r"\bat a time\b": '"per step", "in batches of" or "one by one"',
        r"\bof (its|their) own\b": '"separate" or "its own ..."',
        r"\bone after (the other|another)\b": '"consecutive" or "in order"',
        r"\bwhat (is|was|are|were) (asked|told|held|kept)\b": "the noun",
        r"\bleft alone\b": '"not changed" or "skipped"',
        r"\b(is|are|was|were) parted\b": '"split" or "de-interleaved"',
        r"\byardsticks?\b": '"baseline"',
    }.items()
}

ANY_PHRASE = re.compile(
    "|".join(pattern.pattern.removesuffix(_END) for pattern in PHRASES), re.IGNORECASE
)

# Words of names: of functions, classes, arguments, variables and attributes -> the field's word.
NAMES = {
    "alone": "mha, single",
    "asked": "requested",
    "beside": "what it lies next to",
    "contestant": "candidate",
    "feedbacks": "ldlq_groups",
    "folds": "equivalent_transforms",
    "held": "num_cached, or the noun",
    "lend": "acquire",
    "lent": "acquired",
    "parted": "split",
    "served": "offloaded_layer",
    "sure": "order_is_stable",
    "tape": "buffer",
    "team": "process_group",
    "told": "published, given",
    "turned": "rotated, transposed",
    "turns": "swizzle",
    "yardstick": "baseline",
}

# Public names: they change with a warning, not with this list.
PUBLIC = {"hf_vq/hf/config.py": {"asked_of"}}


def sources() -> list[str]:
    """Files to read, by their path in the checkout."""
    found = [*ROOT.glob("*.py"), *(ROOT / name for name in FILES)]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", *C_SUFFIXES}]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    # This file has to spell the words.
    return [name for name in names if name != "tests/house/test_words.py"]


def is_done(name: str) -> bool:
    return not any(name.startswith(f"{folder}/") for folder in NOT_YET)


def comments_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of a file; in Python also of docstrings and messages."""
    if name.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value
    elif name in HASH_COMMENTS:
        for number, line in enumerate(source.splitlines(), 1):
            if match := re.search(r"(?:^|\s)#(.*)", line):
                yield number, match[1]
    else:
        for match in re.finditer(r"//[^\n]*|/\*.*?\*/", source, re.DOTALL):
            yield source.count("\n", 0, match.start()) + 1, match[0]


def openings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, docstring) of the module, its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file defines: not of what it calls."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _joined(text: str) -> str:
    """The text on one line, without marks of comments at the start of lines."""
    return " ".join(re.sub(r"\n\s*(//|#|\*)?", " ", text).split())


def complaints(name: str, source: str) -> Iterator[str]:
    """Words that a file should not use: file, line, word and cure."""
    mentions = ANY_PHRASE.search(_joined(source)) is not None  # tokenizing is slow
    for line, text in comments_of(name, source) if mentions else ():
        joined = _joined(text)
        for pattern, cure in PHRASES.items():
            if match := pattern.search(joined):
                yield f'{name}:{line}: "{match[0]}": write {cure}'
    if not name.endswith(".py"):
        return
    tree = ast.parse(source)
    for line, text in openings_of(tree):
        if match := OPENING.match(text):
            yield f'{name}:{line}: a docstring begins with "{match[0]}": {OPENING_CURE}'
    for line, defined in names_of(tree):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", defined)}
        if defined in PUBLIC.get(name, ()):
            continue
        for word in sorted(words & NAMES.keys()):
            yield f"{name}:{line}: {defined}: name it {NAMES[word]}"


def test_words_are_those_of_the_field():
    found = [
        complaint
        for name in sources()
        if is_done(name)
        for complaint in complaints(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not found, f"{len(found)} private words:\n" + "\n".join(found)


def test_folders_that_are_done_are_not_listed():
    """NOT_YET shrinks: a folder without a complaint is taken off it."""
    clean = [
        folder
        for folder in NOT_YET
        if not any(
            complaint
            for name in sources()
            if name.startswith(f"{folder}/")
            for complaint in complaints(name, (ROOT / name).read_text(encoding="utf-8"))
        )
    ]
    assert not clean, f"take {clean} off NOT_YET"


def test_private_words_are_found():
    bad = '''"""Whether it is so."""
def asked(tape): # beside it
    """Rows, as they are."""
    self.toldThem = "values likewise"
'''
    found = sorted(complaints("a.py", bad))
    assert [line.split(": ")[0] for line in found] == [f"a.py:{n}" for n in (1, 2, 2, 2, 3, 4, 4)]
    cuda = "int x;  // lanes of their own\n/* one row\n   at a time */ int alone;"
    assert [line.split(": ")[0] for line in complaints("a.cu", cuda)] == ["a.cu:1", "a.cu:2"]
    assert list(complaints("Makefile", "all: # one at a time")) != []


def test_ordinary_english_is_not():
    good = '''"""Hash a file, whether or not it is new."""
def keep(asks, kept, part):  # It turns out as it is written: besides, one time in ten.
    """Rows of the model's own layers, told apart by name, which nobody asked for alone."""
    return asked(kept.held)
'''
    assert list(complaints("a.py", good)) == []
