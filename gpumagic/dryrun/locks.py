"""Stand-ins of locks and events: one that the code takes must be free for the next cell."""

import threading
from typing import Any, Protocol


class Doubles(Protocol):
    """What is asked of `doubles.Doubles`."""

    def of(self, value: Any) -> Any: ...
    def _keep(self, value: Any, double: Any) -> Any: ...
    def _instance(self, value: Any) -> Any: ...


def _lock(doubles: Doubles, value: Any) -> Any:
    make = threading.RLock if type(value) is type(threading.RLock()) else threading.Lock
    return doubles._keep(value, make())


def _condition(doubles: Doubles, value: Any) -> Any:
    return doubles._keep(value, threading.Condition(doubles.of(value._lock)))


def _plain(doubles: Doubles, value: Any) -> Any:
    return doubles._instance(value)


MAKERS: dict[type, Any] = {
    type(threading.Lock()): _lock,
    type(threading.RLock()): _lock,
    threading.Condition: _condition,
    **dict.fromkeys((threading.Event, threading.Semaphore, threading.BoundedSemaphore), _plain),
}
