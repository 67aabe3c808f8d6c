"""Build traces as kineto writes them on a GPU: operators, calls of CUDA's runtime, kernels, copies.

The host's clock goes on as operators are called; the device works through its queue.
"""

LAUNCH = 6.0  # microseconds of a call of the runtime


class RecordedCell:
    """A cell of which each call adds events; `trace` is the whole."""

    def __init__(self, ready=True):
        self.events, self.now, self.free, self.ids = [], 5_000_000.0, 0.0, 0
        self.began, self.line_began, self.line = self.now, None, None

    def event(self, cat, name, start, duration, tid=100, **args):
        times = {"ts": start, "dur": duration}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "args": args} | times
        )

    def at(self, number, source):
        """Go on to a line."""
        if self.line is not None:
            start, (line, code) = self.line_began, self.line
            where = {"file": "cell.py", "line": line, "function": "", "source": code}
            self.event("user_line", code, start, self.now - start, tid="lines", **where)
        self.line_began, self.line = self.now, (number, source)
        return self

    def python(self, microseconds):
        self.now += microseconds
        return self

    def _queued(self, cat, name, microseconds, call, number):
        """A call of the runtime now, and what it has the device do."""
        self.event("cuda_runtime", call, self.now, LAUNCH, correlation=number)
        begin = max(self.now + LAUNCH, self.free)
        self.free = begin + microseconds
        args = {"device": 0, "stream": 7, "correlation": number, "External id": number}
        self.event(cat, name, begin, microseconds, tid=7, **args)
        self.now += LAUNCH

    def operator(self, name, kernel, host=10.0):
        """An operator that launches one kernel."""
        self.ids += 1
        self.event("cpu_op", name, self.now, host, **{"External id": self.ids})
        end = self.now + host
        self._queued("kernel", f"void {name}", kernel, "cudaLaunchKernel", self.ids)
        self.now = end
        return self

    def copy(self, microseconds):
        """A copy of pageable memory, for which the host waits."""
        self.ids += 1
        begin = self.now
        self._queued("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", microseconds,
                     "cudaMemcpyAsync", self.ids)  # fmt: skip
        self._wait()
        self.event("cpu_op", "aten::copy_", begin, self.now - begin, **{"External id": self.ids})
        return self

    def item(self):
        """A number is read."""
        self.ids += 1
        begin = self.now
        name = "aten::_local_scalar_dense"
        self._queued("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 2.0, "cudaMemcpyAsync",
                     self.ids)  # fmt: skip
        self._wait()
        self.event("cpu_op", name, begin, self.now - begin, **{"External id": self.ids})
        return self

    def _wait(self):
        end = max(self.free + 3.0, self.now + 1.0)
        self.event("cuda_runtime", "cudaStreamSynchronize", self.now, end - self.now)
        self.now = end

    def load(self, microseconds):
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.event("user_annotation", name, self.now, microseconds, **{"External id": 0})
        self.now += microseconds
        return self

    def trace(self):
        self.at(0, "")
        cell = {"device": "cuda:0", "virtual": False, "thread": 100}
        self.event("user_cell", "cell", self.began, self.now - self.began, tid="lines", **cell)
        self.now += 5
        self._wait()  # the profiler's, for the rest of the queue
        return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": self.events}
