"""The table of options: what it says is what is parsed, shown as help, and written in the docs."""

import inspect
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from gpumagic.magics.arguments import parse
from gpumagic.magics.options import MAGICS, OPTIONS, options

PAGE = Path(__file__).parents[2] / "docs" / "magics.md"
OF_EACH = [(magic, option) for option in OPTIONS for magic in option.magics.split()]


@pytest.mark.parametrize(
    ("magic", "option"), OF_EACH, ids=lambda value: getattr(value, "flag", value)
)
def test_every_example_is_parsed(magic, option):
    without = vars(parse(f"%{magic}", ""))
    for example in option.examples or [""]:
        found = vars(parse(f"%{magic}", f"{option.flag} {example}"))
        changed = [name for name, value in without.items() if found[name] != value]
        assert len(changed) == 1 or option.default in found.values()


@pytest.mark.parametrize(("magic", "option"), [(m, o) for m, o in OF_EACH if o.examples])
def test_an_option_with_two_values_is_refused(magic, option):
    typed = f"{option.flag} {option.examples[0]}"
    with pytest.raises(UsageError, match="there are two values; type -"):
        parse(f"%{magic}", f"{typed} {typed}")


@pytest.mark.parametrize("magic", MAGICS)
def test_help_has_every_option(shell, magic):
    method = shell.ip.find_line_magic(magic) or shell.ip.find_cell_magic(magic)
    lines = [line.split() for line in inspect.getdoc(method).splitlines()]
    for option in options(magic):
        assert [*shown(option).split(), *option.does.split()] in lines


def shown(option):
    return ", ".join([*option.flags[:-1], option.usage])


def test_the_page_has_the_table():
    rows = [
        f"| `{shown(option)}` | {', '.join(f'`%{name}`' for name in option.magics.split())} "
        f"| {option.does} |"
        for option in OPTIONS
        if option.does
    ]
    text = PAGE.read_text().replace("\\|", "|")
    start = text.index(rows[0])
    assert text[start:].splitlines()[: len(rows)] == rows
    assert not text[start:].splitlines()[len(rows)]
