"""A real kernel, and what it answers over its wire."""

import os

from jupyter_client.manager import KernelManager

TIMEOUT = 120


class Kernel:
    def __init__(self, **env):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=os.environ | {"OMP_NUM_THREADS": "1"} | env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def send(self, code, **options):
        return self.client.execute(code, **options)

    def outputs(self, sent, until=None):
        """Every output of a request, up to its end or to the first that `until` accepts."""
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind in ("stream", "display_data", "execute_result", "error"):
                found.append((kind, content))
                if until and until(kind, content):
                    return found

    def run(self, code):
        sent = self.send(code)
        found = self.outputs(sent)
        while True:
            reply = self.client.get_shell_msg(timeout=TIMEOUT)
            if reply["parent_header"].get("msg_id") == sent:
                return found, reply["content"]


def text(found):
    parts = []
    for kind, content in found:
        if kind == "stream":
            parts.append(content["text"])
        elif kind == "error":
            parts.append(f"{content['ename']}: {content['evalue']}\n")
        else:
            parts.append(content["data"]["text/plain"] + "\n")
    return "".join(parts).replace("\N{NO-BREAK SPACE}", " ")
