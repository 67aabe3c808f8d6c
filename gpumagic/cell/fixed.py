"""Record an operand that `--fix` brought where the others are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """One operand that was brought where the others are."""

    name: str  # the variable, or the expression that it is part of
    nbytes: int  # of all times together
    source: str
    destination: str
    line: int | None = None
    count: int = 1  # one where the variable itself was moved
