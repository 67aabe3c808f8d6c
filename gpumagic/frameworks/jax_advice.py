"""Advise, in JAX's words, what to do about a copy or a wait that is made again and again."""

from collections.abc import Sequence

from gpumagic.ledger.advice import Advice, all_but_one
from gpumagic.ledger.entry import Entry
from gpumagic.ledger.kept_values import keep

_SMALL = 16 * 1024  # bytes: below, a copy takes as long as any

_OFTEN = 16


def advise(entry: Entry) -> Advice | None:
    """Advice for one entry; None where it is as it should be."""
    if entry.via == "display" or entry.within or entry.calls <= entry.sites:
        return None
    if not entry.implicit and entry.calls < _OFTEN and not entry.repeats:
        return None  # one call may copy many arrays
    if entry.via == "print":
        text = "print after the loop; x.shape and x.sharding print without waiting"
    elif entry.operator == "block_until_ready":
        text = "wait once, after the loop: jax.block_until_ready(results)"
    elif entry.operator == "operand":
        return _of_operand(entry)
    elif entry.kind == "wait" or entry.destination == "cpu":
        text = keep(entry.code, entry.where.source if entry.where else "", "JAX")
    elif entry.repeats:
        return _the_same(entry)
    elif entry.nbytes < entry.count * _SMALL:
        text = "many small copies: put them into one array and copy that"
    else:
        return None
    return all_but_one(entry, text)


def _of_operand(entry: Entry) -> Advice:
    if entry.repeats:
        return _the_same(entry)
    is_, it = ("are", "them") if len(entry.names) > 1 else ("is", "it")
    place = f"on {entry.source}" if entry.source != "cpu" else "NumPy's, or on the CPU"
    text = f"{' and '.join(entry.names) or 'an operand'} {is_} {place}: put {it} there, and what is"
    text += f" the same each time once: {put(entry.destination, entry.names)}"
    return Advice(text, 0, 1.0, "at most: all of it, if the same array comes each time")


def _the_same(entry: Entry) -> Advice:
    text = f"the same array each time; once, before the loop: {put(entry.destination, entry.names)}"
    share = entry.repeats / entry.count
    return Advice(text, entry.repeats, share, "the time of all but the first")


def put(destination: str, names: Sequence[str] = ()) -> str:
    """How what has these names is brought to a device, as its user would write it."""
    every = ", ".join(names)
    what = f"({every})" if len(names) > 1 else every or "…"
    return f"{every and f'{every} = '}jax.device_put({what}, {own(destination)})"


def own(device: str) -> str:
    """A device as its user would write it: ``jax.devices("gpu")[1]``."""
    kind, _, number = device.partition(":")
    return f'jax.devices("gpu")[{number}]' if kind == "cuda" else 'jax.devices("cpu")[0]'
