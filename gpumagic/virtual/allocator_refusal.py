"""Write what CUDA's allocator says when it has too little memory."""

from gpumagic.virtual import host_memory


def refusal(
    size: int, ordinal: int, capacity: int, limit: int, used: int, reserved: int, *, host: bool
) -> str:
    """The text of its error; `host`: it is the host that has no more. All sizes in bytes."""
    allowed = f"{readable(limit)} allowed; " if limit < capacity else ""
    free = max(capacity - reserved, 0)
    text = (
        f"CUDA out of memory. Tried to allocate {readable(size)}. GPU {ordinal} has a "
        f"total capacity of {readable(capacity)} of which {readable(free)} is "
        f"free. Including non-PyTorch memory, this process has {readable(reserved)} memory in use. "
        f"{allowed}Of the allocated memory {readable(used)} is allocated by PyTorch, and "
        f"{readable(reserved - used)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    if host:
        there = readable(host_memory.available())
        text += f" A virtual GPU's memory is the host's, which has {there} left."
    return text


def readable(nbytes: int) -> str:
    """A size as CUDA's allocator writes it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
