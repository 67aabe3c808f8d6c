"""Say what one rank of many would need and send: the first is followed, and the last.

Shards and parts of the data may be uneven, and ranks may do different things: of two that are
unlike, the report says what each needs.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel

from gpumagic.device import here as devices_here
from gpumagic.device.cards import how_many
from gpumagic.dryrun.elsewhere import stand_in, target_of
from gpumagic.dryrun.fake_group import GPUS_OF_A_HOST, Rank, can_join
from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.dryrun.result import DryRun
from gpumagic.errors import GpuError
from gpumagic.placement.torch_devices import find

ALL = "@all"
"""What stands for a rank on each GPU that is here."""


def many(on: object) -> tuple[int | None, object]:
    """How many ranks `on` asks for, and where one of them is; None where it is about one device.

    ``"8 x H100 80GB"`` is 8 of that card, ``"@all"`` one on each GPU here, ``"8 x cuda:0"`` 8 of
    which each sees a GPU such as this one, and no other.
    """
    if on != ALL:
        return how_many(on) if isinstance(on, str) else (None, on)
    count = sum(device.kind == "cuda" for device in devices_here(memory=False))
    if not count:
        raise GpuError("@all: no GPU is here; type the cards, as '8 x H100 80GB'")
    return count, "cuda:0"


def dry_run_on(
    on: object, subject: Subject, waiting: Callable[[float], object] | None = None
) -> DryRun:
    """Follow the code of `subject` where `on` says, in one rank or two of many; or `GpuError`."""
    world, one = many(on)
    device, cards = target_of(one)
    subject = replace(subject, device=device, cards=cards)
    if world is None:
        return dry(subject, waiting)
    here = on != ALL and not cards
    if here and str(device) != "cuda:0":
        raise GpuError(f"{on}: each rank sees its GPU as cuda:0; type {world} x cuda:0, or a card")
    can_join()
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, value in subject.reads:
        if isinstance(value, (DistributedDataParallel, sharded)):
            raise GpuError(f"{name} was wrapped for another group; wrap it in the code to follow")
    of_a_host = 1 if here else world if on == ALL else GPUS_OF_A_HOST
    ranks = [Rank(number, world, of_a_host) for number in sorted({0, world - 1})]
    return _together([dry(_placed(subject, rank), waiting) for rank in ranks], world)


def _placed(subject: Subject, rank: Rank) -> Subject:
    """The same on the GPU of a rank."""
    card, n = next(iter(subject.cards), None), rank.local
    device = find(f"cuda:{n}") if card is None else stand_in(card, n)
    return replace(subject, device=device, rank=rank, reads=[*subject.reads])


def _together(runs: list[DryRun], world: int) -> DryRun:
    shown = next((run for run in runs if not run.complete), runs[0])
    cards = zip(*(run.cards for run in runs), strict=False)
    return replace(
        shown,
        cards=tuple(max(each, key=lambda on: on.needed) for each in cards),
        ranks=tuple(on for run in runs for on in run.ranks),
        world=world,
        seconds=sum(run.seconds for run in runs),
    )
