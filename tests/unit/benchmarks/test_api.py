"""The API reference is read from docstrings."""

import pytest

import hf_vq
from benchmarks.tables import api


def documented(first, *, second=2, _private=3, **unknown):
    """Do a thing: at once.

    More of it.

    Args:
        first: a number (see there; or here), {key: value}; not shown.
        second: of `x`. Not shown
            either.

    Raises:
        ValueError: never.
    """


def test_a_signature_has_no_private_names():
    assert api.signature("documented", documented) == "documented(first, *, second=2)"


def test_arguments_are_cut_after_a_sentence():
    assert list(api.arguments(api._docstring(documented))) == [
        ("first", "a number (see there; or here), {key: value}"),
        ("second", "of `x`"),
    ]
    assert api.sentence("Do a thing: at once.\n\nMore of it.") == "Do a thing: at once"
    assert api.sentence("Do a thing:\n\n    x()") == "Do a thing"


@pytest.mark.parametrize("name", [name for name in hf_vq.__all__ if name != "__version__"])
def test_every_public_name_is_there(name):
    text = api.reference()
    assert f"\n## {name}\n" in f"\n{text}" or f"| `{name}` |" in text
