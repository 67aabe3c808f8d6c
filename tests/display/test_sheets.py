"""The looks of all views: every color has a fallback, and rules reach nothing outside."""

import re
from pathlib import Path

import pytest

from gpumagic.display import table

SHEETS = sorted(path.stem for path in Path(table.__file__).parent.glob("*.css"))


def test_every_color_has_a_fallback_and_accents_one_for_the_dark():
    light, dark = table.sheet("palette").split("@media (prefers-color-scheme: dark)")
    for accent in ("mine", "warn", "good", "bad"):
        (day,) = re.findall(rf"--gm-{accent}: var\(--jp-[\w-]+, (#\w+)\)", light)
        (night,) = re.findall(rf"--gm-{accent}: var\(--jp-[\w-]+, (#\w+)\)", dark)
        assert day != night


@pytest.mark.parametrize("name", SHEETS)
def test_rules_reach_nothing_outside(name):
    css = table.sheet(name)
    assert not re.findall(r"var\(--(?:jp|vscode)-[\w-]+\)", css)
    rules = re.sub(r"@media[^{]*{(.*?}\s*)}", r"\1", css, flags=re.DOTALL)
    selectors = [rule.partition("{")[0].strip() for rule in rules.split("}") if "{" in rule]
    assert selectors
    for selector in selectors:
        inside = re.sub(r":is\([^)]*\)", "", selector.replace("(n)", ""))
        assert all(part.strip().startswith((".gpumagic", ".gm-")) for part in inside.split(","))


def test_a_block_brings_the_sheets_that_it_names():
    assert table.sheet("table") in table.block("x")
    report = table.block("x", "report", css="gpumagic gm-report")
    assert table.sheet("report") in report
    assert table.sheet("palette") in report
    assert table.sheet("table") not in report


def test_a_bar_is_never_more_than_full():
    drawn = table.bar([("a", 0.75), ("b", 0.5), ("c", 0.1)], "<full>")
    assert re.findall(r"width:([\d.]+)%", drawn) == ["75.00", "25.00"]
    assert 'aria-label="&lt;full&gt;"' in drawn
