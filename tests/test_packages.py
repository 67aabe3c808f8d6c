"""What packagers take says the same as pyproject.toml and the pages."""

import re
import sys

import pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE = (pages.ROOT / "conda" / "recipe.yaml").read_text()


def named(lines):
    """Names with their bounds; conda-forge and PyPI spell some names otherwise."""
    return {
        re.sub(r"[\s\"']", "", line).replace("_", "-").replace("pytorch", "torch") for line in lines
    }


def of_recipe(section):
    part = re.search(rf"^  {section}:\n((?:    - .*\n)+)", RECIPE, re.M)[1]
    return named(re.findall(r"- (.*)", part))


def test_the_recipe_needs_what_the_wheel_needs():
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    python = f"python{project['requires-python']}"
    assert f'python_min: "{python.removeprefix("python>=")}"' in RECIPE
    wanted = named(line.partition(";")[0] for line in project["dependencies"])
    assert of_recipe("run") - {"python>=${{python-min}}"} == wanted
    extras = named(one for lines in project["optional-dependencies"].values() for one in lines)
    assert of_recipe("run_constraints") <= extras


def test_the_dockerfile_is_the_page_s():
    blocks = pages.blocks(pages.ROOT / "docs" / "containers.md")
    assert (pages.ROOT / "Dockerfile").read_text() in [block.code for block in blocks]
