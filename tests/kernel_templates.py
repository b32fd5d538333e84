"""What the text of a CUDA template says of its plan and of its arguments."""

import re

_SIZES = {"int64_t": 8, "uint32_t": 4, "int": 4}


def argument_fields(text: str) -> list[tuple[str, int]]:
    """(name, bytes) of each member of `struct Arguments`: pointers, or integers of a named size."""
    body = re.search(r"struct Arguments .*?{\n(.*?)};", text, re.DOTALL)[1]
    fields = re.findall(r"^ *([\w \*]+?)(\w+);", body, re.MULTILINE)
    return [(name, 8 if "*" in kind else _SIZES[kind.strip()]) for kind, name in fields]


def plan_fields(text: str) -> set[str]:
    """The fields of its plan that a template reads."""
    return set(re.findall(r"Plan::(\w+)", text))


def enumeration(name: str, text: str) -> list[str]:
    """The names of an enumeration."""
    found = re.search(rf"enum class {name} {{([^}}]*)}}", text)
    return [one.strip() for one in found[1].split(",")]
