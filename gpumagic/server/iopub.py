"""Receive from one kernel's iopub channel only what begins and ends a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zmq
from jupyter_client.session import Session

# By beginning only can ZeroMQ choose, and ipykernel calls them "kernel.<some id>.status". What
# makes many messages, output and widgets, begins otherwise.
_TOPICS = (b"kernel", b"status", b"execute_input")


class Iopub:
    """Hands each message that is signed rightly to a listener, until closed. On the event loop."""

    def __init__(self, manager: Any, listener: Callable[[Mapping[str, Any]], None]) -> None:
        self._listener = listener
        self._address = _address(manager)
        # Its own: a session refuses a message that it has seen before.
        self._session = Session(config=manager.session.config, key=manager.session.key)
        self._stream = manager.connect_iopub()
        self._stream.setsockopt(zmq.LINGER, 0)
        for topic in _TOPICS:
            self._stream.setsockopt(zmq.SUBSCRIBE, topic)
        self._stream.setsockopt(zmq.UNSUBSCRIBE, b"")
        self._stream.on_recv(self._receive)

    def is_of(self, manager: Any) -> bool:
        """Whether this is the channel of that manager's kernel, be it one that started anew."""
        return self._address == _address(manager)

    def close(self) -> None:
        """Listen no more."""
        if not self._stream.closed():
            self._stream.on_recv(None)
            self._stream.close(linger=0)

    def _receive(self, frames: list[Any]) -> None:
        try:
            _, parts = self._session.feed_identities(frames)
            message = self._session.deserialize(parts)
        except (ValueError, TypeError, KeyError, IndexError):
            # Unsigned, or no message at all, such as the channel's own welcome.
            return
        self._listener(message)


def _address(manager: Any) -> tuple[Any, ...]:
    return (id(manager), manager.iopub_port, manager.session.key)
