"""Read what a `%%ongpu` or `%ongpu` line asks for: where to run, and with which options."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from IPython.core.error import UsageError

from gpumagic.errors import meant
from gpumagic.magics.arguments import in_one_line, parse


@dataclass(frozen=True)
class Request:
    """What a `%%ongpu` line, or a standing `%ongpu`, asks for."""

    where: str = ""  # empty with `on`
    move: bool = True
    quiet: bool = False
    standing: bool = False
    dry_run: bool = False
    report: bool = False
    strict: bool = False
    fix: bool = False
    back: bool = False
    on: str | None = None  # cards that are not here, in the place of `where`
    memory: bool = False
    save: str | None = None
    split: tuple[str, ...] = ()  # variables whose items are shared out
    gather: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()  # a variable, and how: ("loss", "mean")
    chunk: int | None = None  # items at a time, for whoever is free

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
        """Whether something else runs the cell in IPython's place."""
        return self.dry_run or self.on_cluster or self.on_several


_WORDS = ("off", "home")
ALL = "@all"
"""All ranks of a cluster."""


def _check_dry_run(asked: Request, magic: str) -> None:
    options = ("report", "strict", "fix", "back", "quiet", "memory")
    about = [f"--{n}" for n in options if getattr(asked, n)]
    if asked.dry_run and about:
        raise UsageError(
            f"{magic}: --dry-run runs nothing that {about[0]} could be about; leave out one of them"
        )
    shared = asked.where != ALL or asked.split or asked.gather or asked.reduce
    if asked.dry_run and asked.on_cluster and shared:
        raise UsageError(
            f"{magic}: a dry run follows one of all ranks; type {magic} {ALL} --dry-run"
        )


def _check_parts(asked: Request, magic: str) -> None:
    """Refuse what cannot be, of a cell that runs on one device, on several, or on a cluster."""
    where, away = asked.where, asked.on_cluster or asked.on_several
    given = [n for n in ("split", "gather", "reduce", "chunk") if getattr(asked, n)]
    about = ("back", "report", "strict", "fix", "memory")
    single = [f"--{n}" for n in about if getattr(asked, n)] + ["--no-move"] * (not asked.move)
    twice = {*asked.gather} & dict(asked.reduce).keys()
    wrong = ""
    if away and magic == "%ongpu":
        wrong = f"{where} is for one cell; type %%ongpu {where} --split NAME"
    elif given and not away:
        wrong = (
            f"--{given[0]} is for several GPUs; type %%ongpu 0,1 --split NAME, or @all for {where}"
        )
    elif asked.on_several and asked.dry_run:
        wrong = f"--dry-run is of one device; type one of {where}"
    elif away and single:
        wrong = f"{single[0]} is about one device; type %%ongpu {where} without it"
    elif asked.on_several and not asked.split:
        wrong = (
            f"what is each of {where} to do? type %%ongpu {where} --split NAME, a variable whose "
            "items they share, or one device"
        )
    elif asked.chunk and not asked.split:
        wrong = f"--chunk cuts what --split names; type --split NAME --chunk {asked.chunk}"
    elif twice:
        wrong = f"{min(twice)} stands in --gather and in --reduce; type it in one of them"
    if wrong:
        raise UsageError(f"{magic}: {wrong}")


def _elsewhere(asked: Request, magic: str) -> Request:
    """A dry run for cards that are not here."""
    type_this = f"type %%ongpu --dry-run --on '{asked.on}'"
    if not asked.dry_run or magic == "%ongpu":
        raise UsageError(f"{magic}: --on is for the dry run of a cell; {type_this}")
    if asked.where not in ("", ALL) or not asked.move:
        also = asked.where or "--no-move"
        raise UsageError(f"{magic}: {also} is about a device that is here; {type_this}")
    _check_dry_run(asked, magic)
    from gpumagic.device.cards import cards, how_many

    with in_one_line(magic):
        count, names = how_many(asked.on or "")
        cards(names)
    if asked.where and not count:
        raise UsageError(f"{magic}: {ALL} of how many? type --dry-run --on '8 x {asked.on}'")
    return asked


@lru_cache(maxsize=64)
def placing_request(line: str, magic: str = "%%ongpu") -> Request:
    """What stands after ``%%ongpu`` or ``%ongpu``; raises UsageError."""
    given = vars(parse(magic, line)).items()
    asked = Request(**{name: value for name, value in given if value is not None})
    if asked.on is not None:
        return _elsewhere(asked, magic)
    if not asked.where:
        raise UsageError(
            f"{magic}: which device? type one after it: {magic} 1, {magic} cuda:1, {magic} cpu, "
            f"{magic} free (%gpus shows what there is)"
        )
    if (word := asked.where.lower()) in _WORDS:
        raise UsageError(f"{magic}: type %ongpu {word}, on a line of its own")
    if magic == "%ongpu" and (question := meant(word, _WORDS)):
        raise UsageError(f"{magic}: {word} is no device; {question}type %ongpu off, or %ongpu 1")
    if asked.dry_run and magic == "%ongpu":
        raise UsageError(f"%ongpu: --dry-run is for one cell: %%ongpu {asked.where} --dry-run")
    _check_dry_run(asked, magic)
    _check_parts(asked, magic)
    if asked.save and not asked.memory:
        raise UsageError(f"{magic}: --save goes with --memory: --memory --save {asked.save}")
    if asked.quiet and asked.report:
        raise UsageError(f"{magic}: --report shows what --quiet hides; leave out one of them")
    if asked.back and not asked.move:
        raise UsageError(f"{magic}: --no-move brings nothing that --back could bring home")
    return asked
