"""Waiting for what must come."""

import asyncio

ANSWER_S = 10
"""For how long, in seconds; a busy machine is slow."""


async def becomes(condition, note="it never became so"):
    """Let the loop run until something is so."""
    for _ in range(int(ANSWER_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(note)
