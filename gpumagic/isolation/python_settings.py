"""List the settings of Python, numpy, matplotlib and JAX that code may change."""

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
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One setting to restore."""

    name: str
    # Returns its value; a copy if the value is changed in place.
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # Repeated runs of a program may append to it.
    grows: bool = False
    # Gets the value before, the value now and the libraries imported meanwhile. Returns the value
    # to restore, with what those libraries have set for themselves.
    adopt: Callable[[Any, Any, set[str]], Any] | None = None


def pairs(owner: Any, *names: tuple[str, str]) -> list[Setting]:
    """Settings by functions to read and write, if this version of `owner` has them."""
    return [
        Setting(f"{owner.__name__}.{write}", getattr(owner, read), getattr(owner, write))
        for read, write in names
        if hasattr(owner, read) and hasattr(owner, write)
    ]


def accessors(owner: Any, *names: str) -> list[Setting]:
    """Settings by functions ``get…`` and ``set…``."""
    return pairs(owner, *((f"get{name}", f"set{name}") for name in names))


def attributes(owner: Any, *names: str) -> list[Setting]:
    """Settings that are attributes of a module."""
    called = getattr(owner, "__name__", type(owner).__name__)
    return [
        Setting(f"{called}.{name}", partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names
    ]


def sequence(owner: Any, name: str) -> Setting:
    """A setting that is a list, restored in place."""

    def write(before: tuple[list[Any], list[Any]]) -> None:
        kept, items = before
        kept[:] = items
        setattr(owner, name, kept)

    def read() -> tuple[list[Any], list[Any]]:
        now = getattr(owner, name)
        return now, list(now)

    return Setting(f"{owner.__name__}.{name}", read, write, grows=True)


def mapping(name: str, held: Any, *, grows: bool = False) -> Setting:
    """A setting that is a mapping, restored in place; only changed items are written."""

    def write(before: dict[Any, Any]) -> None:
        for key in held.keys() - before.keys():
            del held[key]
        for key, value in before.items():
            if key not in held or held[key] is not value:
                held[key] = value

    return Setting(name, held.copy, write, grows)


# A logger's level, handlers, filters, and whether it is disabled and propagates.
_Logger = tuple[int, list[Any], list[Any], bool, bool]
_NEW: _Logger = (logging.NOTSET, [], [], False, True)


def of_signals() -> list[Setting]:
    """Signals come first: Ctrl-C works again before anything else is restored."""
    if threading.current_thread() is not threading.main_thread():
        return []  # they can be set only there
    handlers = Setting("signal handlers", _signal_handlers, _set_signal_handlers)
    if not hasattr(signal, "setitimer"):
        return [handlers]
    return [
        handlers,
        # A timer from before goes on; a left-over one would end the process.
        Setting(
            "signal.alarm",
            lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            lambda on: on or signal.setitimer(signal.ITIMER_REAL, 0),
        ),
        Setting(
            "signal masks",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        ),
    ]


@cache
def of_python() -> list[Setting]:
    """Return all settings of Python."""
    hooks = "displayhook excepthook unraisablehook breakpointhook"
    return [
        Setting(
            "decimal's context",
            lambda: (decimal.getcontext(), decimal.getcontext().copy()),
            _set_decimal,
        ),
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, grows=True),
        *accessors(sys, "switchinterval", "_int_max_str_digits", "trace", "profile"),
        *accessors(threading, "trace", "profile"),
        Setting("threading.stack_size", threading.stack_size, threading.stack_size),
        *attributes(sys, *hooks.split(), "dont_write_bytecode", "stdin", "stdout", "stderr"),
        *attributes(threading, "excepthook"),
        *(sequence(sys, name) for name in ("path", "argv")),
        *(
            sequence(sys, name)._replace(adopt=_adopt_finders)
            for name in ("meta_path", "path_hooks")
        ),
        Setting("gc.enable", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("gc.set_threshold", gc.get_threshold, lambda now: gc.set_threshold(*now)),
        *accessors(gc, "_debug"),
        sequence(gc, "callbacks"),
        *attributes(warnings, "showwarning", "formatwarning"),
        Setting(
            "warnings.filters", lambda: warnings.filters[:], _set_filters, True, _adopt_filters
        ),
        *attributes(logging.root.manager, "disable"),
        Setting("loggers", _loggers, _set_loggers, True, _adopt_loggers),
        *_of_the_system(),
    ]


def of_libraries() -> list[Setting]:
    """Return the settings of numpy, matplotlib and JAX, if imported."""
    plots: Any = sys.modules.get("matplotlib._pylab_helpers")
    if plots is None:
        return [*of_numpy(), *_of_jax()]
    return [
        *of_numpy(),
        *_of_jax(),
        Setting("figures", lambda: set(plots.Gcf.figs), partial(_close_figures, plots.Gcf)),
        mapping("matplotlib.rcParams", sys.modules["matplotlib"].rcParams),
    ]


def of_numpy() -> list[Setting]:
    """Return numpy's settings for errors and printing, in this thread."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return []
    return [
        Setting("numpy.seterr", numpy.geterr, lambda how: numpy.seterr(**how)),
        *accessors(numpy, "errcall", "bufsize"),
        Setting(
            "numpy's print options",
            numpy.get_printoptions,
            lambda how: numpy.set_printoptions(**how),
        ),
    ]


def _of_jax() -> list[Setting]:
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    if config is None:
        return []
    return [Setting("jax.config", lambda: dict(config.values), partial(_set_config, config))]


def _of_the_system() -> list[Setting]:
    every = partial(locale.setlocale, locale.LC_ALL)
    start = partial(multiprocessing.get_start_method, allow_none=True)
    found = [
        mapping("os.environ", os.environ),
        Setting("working folder", os.getcwd, os.chdir),
        Setting("umask", _umask, os.umask),
        Setting("locale", every, every),
        Setting(
            "faulthandler",
            faulthandler.is_enabled,
            lambda on: (
                faulthandler.enable(sys.__stderr__ or sys.stderr) if on else faulthandler.disable()
            ),
        ),
        *accessors(socket, "defaulttimeout"),
        Setting("start method", start, partial(multiprocessing.set_start_method, force=True)),
    ]
    if hasattr(time, "tzset"):  # after the environment, which it reads
        found.append(Setting("time zone", lambda: time.tzname, lambda zone: time.tzset()))
    if hasattr(os, "sched_setaffinity"):
        read, write = os.sched_getaffinity, os.sched_setaffinity
        found.append(Setting("CPUs of the process", partial(read, 0), partial(write, 0)))
    return found


def _adopt_filters(before: Any, now: Any, libraries: set[str]) -> Any:
    # Filters for a library's own warnings, or those raised in it.
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
    # None means set by C code, and cannot be restored.
    return {number: handler for number, handler in found.items() if handler is not None}


def _set_signal_handlers(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_decimal(before: tuple[decimal.Context, decimal.Context]) -> None:
    context, kept = before
    decimal.setcontext(context)
    for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps"):
        setattr(context, name, getattr(kept, name))


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # so that they are read again


def _loggers() -> dict[logging.Logger, _Logger]:
    """Return the loggers that differ from a new one."""
    every = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {
        one: (one.level, one.handlers[:], one.filters[:], one.disabled, one.propagate)
        for one in every
        if isinstance(one, logging.Logger)
    }
    return {logger: state for logger, state in found.items() if state != _NEW}


def _set_loggers(before: dict[logging.Logger, _Logger]) -> None:
    for logger in before.keys() | _loggers().keys():
        level, handlers, filters, logger.disabled, logger.propagate = before.get(logger, _NEW)
        logger.handlers[:], logger.filters[:] = handlers, filters
        if logger.level != level:
            logger.setLevel(level)


def _set_config(config: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if config.values[name] != value:
            config.update(name, value)


def _umask() -> int:
    # Python reads it by setting it, which would affect a thread that creates a file meanwhile.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _close_figures(helpers: Any, before: set[int]) -> None:
    for number in set(helpers.figs) - before:
        helpers.destroy(number)
