"""List what code may set in Python, in numpy and in matplotlib, for its thread or the process."""

from __future__ import annotations

import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpumagic.isolation.setting import Setting, attributes, mapping, pairs, sequence

_ROUNDING = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def of_signals() -> Iterator[Setting]:
    """What comes first: Ctrl-C is itself again before anything else is put back."""
    if threading.current_thread() is not threading.main_thread():
        return  # only there they can be set
    yield Setting("signal handlers", _signal_handlers, _set_signal_handlers)
    if hasattr(signal, "setitimer"):
        # One that was there before goes on; one that is left over would end the process.
        yield Setting(
            "signal.alarm",
            lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            lambda on: on or signal.setitimer(signal.ITIMER_REAL, 0),
        )
        yield Setting(
            "signal masks",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )


def of_python() -> Iterator[Setting]:
    """All of Python's own."""
    yield Setting("decimal's context", _decimal, _set_decimal)
    yield Setting("sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit, grows=True)
    yield from pairs(
        sys,
        ("getswitchinterval", "setswitchinterval"),
        ("get_int_max_str_digits", "set_int_max_str_digits"),
        ("gettrace", "settrace"),
        ("getprofile", "setprofile"),
    )
    yield from pairs(threading, ("gettrace", "settrace"), ("getprofile", "setprofile"))
    yield Setting("threading.stack_size", threading.stack_size, threading.stack_size)
    hooks = "displayhook excepthook unraisablehook breakpointhook"
    yield from attributes(sys, *hooks.split(), "dont_write_bytecode", "stdin", "stdout", "stderr")
    yield from attributes(threading, "excepthook")
    for name in ("path", "argv"):
        yield sequence(sys, name)
    for name in ("meta_path", "path_hooks"):
        yield sequence(sys, name)._replace(adopt=_adopt_finders)
    yield Setting("gc.enable", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    yield Setting("gc.set_threshold", gc.get_threshold, lambda now: gc.set_threshold(*now))
    yield from pairs(gc, ("get_debug", "set_debug"))
    yield sequence(gc, "callbacks")
    yield from attributes(warnings, "showwarning", "formatwarning")
    yield Setting(
        "warnings.filters", lambda: warnings.filters[:], _set_filters, True, _adopt_filters
    )
    yield from _of_logging()
    yield from _of_the_system()


def of_libraries() -> Iterator[Setting]:
    """Of numpy and matplotlib, where they are imported."""
    yield from of_numpy()
    plots: Any = sys.modules.get("matplotlib._pylab_helpers")
    if plots is not None:
        yield Setting("figures", lambda: set(plots.Gcf.figs), partial(_close_figures, plots.Gcf))
        yield mapping("matplotlib.rcParams", sys.modules["matplotlib"].rcParams)


def of_numpy() -> Iterator[Setting]:
    """How numpy treats and prints numbers, in this thread."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return
    yield Setting("numpy.seterr", numpy.geterr, lambda how: numpy.seterr(**how))
    yield from pairs(numpy, ("geterrcall", "seterrcall"), ("getbufsize", "setbufsize"))
    yield Setting(
        "numpy.set_printoptions",
        numpy.get_printoptions,
        lambda how: numpy.set_printoptions(**how),
    )


def _of_logging() -> Iterator[Setting]:
    yield from attributes(logging.root.manager, "disable")
    for name, new in (
        *(("handlers", []), ("filters", [])),
        *(("disabled", False), ("propagate", True), ("level", logging.NOTSET)),
    ):
        yield Setting(
            f"{name} of loggers",
            partial(_of_loggers, name, new),
            partial(_set_loggers, name, new),
            grows=isinstance(new, list),
            adopt=_adopt_loggers,
        )


def _of_the_system() -> Iterator[Setting]:
    yield mapping("os.environ", os.environ)
    if hasattr(time, "tzset"):  # after the environment, which it reads
        yield Setting("time zone", lambda: time.tzname, lambda zone: time.tzset())
    yield Setting("working folder", os.getcwd, os.chdir)
    yield Setting("umask", _umask, os.umask)
    yield Setting(
        "locale",
        partial(locale.setlocale, locale.LC_ALL),
        partial(locale.setlocale, locale.LC_ALL),
    )
    yield Setting("faulthandler", faulthandler.is_enabled, _set_faulthandler)
    yield from pairs(socket, ("getdefaulttimeout", "setdefaulttimeout"))
    yield Setting(
        "multiprocessing's start method",
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    )
    if hasattr(os, "sched_setaffinity"):
        yield Setting(
            "CPUs of the process",
            partial(os.sched_getaffinity, 0),
            partial(os.sched_setaffinity, 0),
        )


def _adopt_filters(before: Any, now: Any, libraries: set[str]) -> Any:
    # About a library's own warnings, or those that are raised in it.
    about = {one: f"{one[2].__module__}." + str(getattr(one[3], "pattern", "")) for one in now}
    own = [one for one in now if any(name in about[one] for name in libraries)]
    return [*own, *(one for one in before if one not in own)]


def _adopt_finders(before: Any, now: Any, libraries: set[str]) -> Any:
    held, finders = before
    modules = ((one, getattr(one, "__module__", None) or "") for one in now[1])
    made = [one for one, module in modules if module.partition(".")[0] in libraries]
    return held, [*finders, *made]


def _adopt_loggers(before: Any, now: Any, libraries: set[str]) -> Any:
    return {k: v for k, v in now.items() if k.name.partition(".")[0] in libraries} | before


def _signal_handlers() -> dict[signal.Signals, Any]:
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # None was set by no Python, and cannot be.
    return {number: handler for number, handler in found.items() if handler is not None}


def _set_signal_handlers(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _decimal() -> tuple[Any, ...]:
    context = decimal.getcontext()
    rounding = {name: getattr(context, name) for name in _ROUNDING}
    return context, rounding, dict(context.flags), dict(context.traps)


def _set_decimal(before: tuple[Any, ...]) -> None:
    context, rounding, flags, traps = before
    decimal.setcontext(context)
    for name, value in rounding.items():
        setattr(context, name, value)
    context.flags, context.traps = flags, traps


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # which has them looked at anew


def _of_loggers(name: str, new: Any) -> dict[logging.Logger, Any]:
    """Those that are not as a new one is."""
    every: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {logger: value for logger in every if (value := getattr(logger, name, new)) != new}
    return {k: v[:] for k, v in found.items()} if isinstance(new, list) else found


def _set_loggers(name: str, new: Any, before: dict[logging.Logger, Any]) -> None:
    now = _of_loggers(name, new)
    for logger in now.keys() | before.keys():
        value = before.get(logger, new)
        if name == "level":
            logger.setLevel(value)
        elif isinstance(value, list):
            getattr(logger, name)[:] = value
        else:
            setattr(logger, name, value)


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _set_faulthandler(on: bool) -> None:
    if on:
        faulthandler.enable(sys.__stderr__ or sys.stderr)
    else:
        faulthandler.disable()


def _close_figures(helpers: Any, before: set[int]) -> None:
    for number in set(helpers.figs) - before:
        helpers.destroy(number)
