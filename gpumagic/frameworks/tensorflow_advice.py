"""Advise, in TensorFlow's words, about copies, waits, and results that are elsewhere than asked."""

from gpumagic.ledger.advice import Advice, all_but_one
from gpumagic.ledger.entry import Entry
from gpumagic.ledger.kept_values import keep

_OFTEN = 16
_SMALL = 16 * 1024  # bytes: below, a copy takes as long as any
_SOFT = "soft placement; tf.config.set_soft_device_placement(False) makes it an error"


def advise(entry: Entry) -> Advice | None:
    """Advice for one entry; None where it is as it should be."""
    if entry.kind == "placement":
        return Advice(f"{fell(entry)}: {_SOFT}", 0, 0.0, "")
    if entry.via == "display" or entry.calls <= entry.sites:
        return None
    if entry.operator == "operand":
        return _all(entry, f"{_whose(entry)}: make it there, or put it there once, {_put(entry)}")
    if entry.operator == "tf.function":
        text = f"each call copies it: give the function what is on {entry.destination}"
        return _all(entry, f"{text}, and make its variables there")
    if entry.calls < _OFTEN:
        return None
    return _of_many(entry)


def _of_many(entry: Entry) -> Advice | None:
    if entry.operator == "batch":
        there = f"tf.data.experimental.prefetch_to_device('{own(entry.destination)}')"
        return Advice(f"ds = ds.apply({there}) copies ahead", 0, 1.0, "at most: all of it")
    if entry.via == "print":
        text = "print after the loop; x.shape and x.device print without waiting"
    elif entry.kind == "wait" or entry.destination == "cpu":
        text = keep(entry.code, entry.where.source if entry.where else "", "TensorFlow")
    elif entry.nbytes < entry.count * _SMALL:
        text = "many small copies: put them into one tensor and copy that"
    else:
        return None
    return all_but_one(entry, text)


def _all(entry: Entry, text: str) -> Advice:
    return Advice(text, entry.count, 1.0, "the time of all of them")


def fell(entry: Entry) -> str:
    """``"asked for GPU:7, is on the CPU"``."""
    where = "the CPU" if entry.destination == "cpu" else entry.destination
    return f"asked for {own(entry.source)[1:]}, is on {where}"


def _whose(entry: Entry) -> str:
    if entry.source == "cpu":
        return "an operand is NumPy's, or on the CPU"
    return f"an operand is on {entry.source}"


def _put(entry: Entry) -> str:
    return f"with tf.device('{own(entry.destination)}'): … = tf.identity(…)"


def own(device: str) -> str:
    """A device as TensorFlow's people write it: ``"/GPU:1"``."""
    kind, _, number = device.partition(":")
    return f"/GPU:{number}" if kind == "cuda" else "/CPU:0"
