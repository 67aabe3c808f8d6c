"""Read a `%%ongpu` or `%ongpu` line: where to run, with which options, and which do not combine."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from IPython.core.error import UsageError

from gpumagic.errors import meant
from gpumagic.magics.arguments import in_one_line, parse


@dataclass(frozen=True)
class Request:
    """A parsed `%%ongpu` line, or a standing `%ongpu`."""

    where: str = ""  # empty with `on`
    move: bool = True
    quiet: bool = False
    standing: bool = False
    dry_run: bool = False
    report: bool = False
    strict: bool = False
    check: str | None = None  # "" for indices and labels, "nan" for NaN too
    fix: bool = False
    back: bool = False
    on: str | None = None  # cards that are not here
    memory: bool = False
    save: str | None = None
    profile: str | bool = False  # or the file for its trace
    split: tuple[str, ...] = ()  # variables
    gather: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()  # a variable, and how: ("loss", "mean")
    chunk: int | None = None

    @cached_property
    def on_cluster(self) -> bool:
        """Whether it runs on engines: `@all`, `@0,1`, `@1`."""
        return self.where.startswith("@")

    @cached_property
    def on_several(self) -> bool:
        """Whether it runs on several devices of this process: `0,1`, `all`."""
        return not self.on_cluster and ("," in self.where or self.where.lower() == "all")

    @cached_property
    def handed_over(self) -> bool:
        """Whether something else than IPython runs the cell."""
        return self.dry_run or self.on_cluster or self.on_several


_WORDS = ("off", "home")
_TRACES = (".json", ".json.gz")


def _given(asked: Request, *names: str) -> list[str]:
    """Return which of these options are given: ``["--strict"]``."""
    given = (name for name in names if getattr(asked, name) not in (None, False, ()))
    return [f"--{name}" for name in given]


def _where_mistakes(asked: Request, magic: str) -> Iterator[str]:
    where, word, standing = asked.where, asked.where.lower(), magic == "%ongpu"
    if asked.on is not None:
        on_cards = f"type %%ongpu --dry-run --on '{asked.on}'"
        if standing or not asked.dry_run:
            yield f"--on is for the dry run of a cell; {on_cards}"
        if where or not asked.move:
            yield f"{where or '--no-move'} is about a device that is here; {on_cards}"
    elif not where:
        yield (
            f"which device? type one after it: {magic} 1, {magic} cuda:1, {magic} cpu, "
            f"{magic} free (%gpus shows what there is)"
        )
    if word in _WORDS:
        yield f"type %ongpu {word}, on a line of its own"
    elif standing and (question := meant(word, _WORDS)):
        yield f"{word} is no device; {question}type %ongpu off, or %ongpu 1"


def _dry_run_mistakes(asked: Request, magic: str) -> Iterator[str]:
    if magic == "%ongpu":
        yield f"--dry-run is for one cell; type %%ongpu {asked.where} --dry-run"
    if given := _given(
        asked, "report", "strict", "check", "fix", "back", "quiet", "memory", "profile"
    ):
        yield f"--dry-run runs nothing, so {given[0]} has no effect; leave out one of them"
    if asked.on_cluster:
        yield f"--dry-run is for one device, and {asked.where} is ranks; type {magic} 0 --dry-run"
    if asked.on_several:
        yield f"--dry-run is for one device; type one of {asked.where}"


def _several_mistakes(asked: Request, magic: str) -> Iterator[str]:
    where, several = asked.where, asked.on_cluster or asked.on_several
    of_one = _given(asked, "back", "report", "strict", "check", "fix", "memory", "profile")
    of_one += ["--no-move"] * (not asked.move)
    parts = _given(asked, "split", "gather", "reduce", "chunk")
    if several and magic == "%ongpu":
        yield f"{where} is for one cell; type %%ongpu {where} --split NAME"
    if several and of_one:
        yield f"{of_one[0]} is for one device; type %%ongpu {where} without it"
    if parts and not several:
        yield f"{parts[0]} is for several GPUs; type %%ongpu 0,1 --split NAME, or @all for {where}"
    if asked.on_several and not asked.split:
        yield (
            f"which items for each of {where}? type %%ongpu {where} --split NAME, a variable "
            "whose items they share, or one device"
        )
    if asked.chunk and not asked.split:
        yield f"--chunk is for --split; type --split NAME --chunk {asked.chunk}"
    if twice := {*asked.gather} & dict(asked.reduce).keys():
        yield f"{min(twice)} is in --gather and in --reduce; type it in one of them"


def _mistakes(asked: Request, magic: str) -> Iterator[str]:
    """Yield what does not combine in a request, the most basic first."""
    if isinstance(asked.profile, str) and not asked.profile.endswith(_TRACES):
        yield f"--profile {asked.profile}: no .json file; type {magic} {asked.profile} --profile"
    yield from _where_mistakes(asked, magic)
    if asked.dry_run:
        yield from _dry_run_mistakes(asked, magic)
    yield from _several_mistakes(asked, magic)
    if asked.save and not asked.memory:
        yield f"--save is for --memory; type --memory --save {asked.save}"
    if asked.memory and asked.profile:
        yield "--memory takes time, which --profile would show; leave out one of them"
    if asked.quiet and asked.report:
        yield "--report shows what --quiet hides; leave out one of them"
    if asked.back and not asked.move:
        yield "--no-move moves nothing that --back could move back; leave out one of them"


@lru_cache(maxsize=64)
def placing_request(line: str, magic: str = "%%ongpu") -> Request:
    """Return what a ``%%ongpu`` or ``%ongpu`` line asks for; raises UsageError."""
    given = vars(parse(magic, line)).items()
    asked = Request(**{name: value for name, value in given if value is not None})
    for mistake in _mistakes(asked, magic):
        raise UsageError(f"{magic}: {mistake}")
    if asked.on is not None:
        from gpumagic.device.cards import cards

        with in_one_line(magic):
            cards(asked.on)
    return asked
