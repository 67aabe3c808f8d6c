"""Start and stop the monitor with the Jupyter server."""

from pathlib import Path

from jupyter_server.extension.application import ExtensionApp

from gpumagic.server.hub import Hub
from gpumagic.server.kernels import KernelCells, KernelTable
from gpumagic.server.routes import HUB, routes
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.processes import Owners
from gpumagic.telemetry.sampler import Sampler

# What pages ask kernels on the control channel. The status that a kernel sends around its answer is
# not that of the cell which runs there: the server and its pages are to leave it aside.
_ASIDE = ("gpumagic_request", "gpumagic_reply")


class Extension(ExtensionApp):
    """gpumagic in a Jupyter server."""

    name = "gpumagic"

    def initialize_settings(self) -> None:
        """Make the hub, which does nothing until somebody asks."""
        server = self.serverapp
        assert server is not None
        manager = server.kernel_manager
        if hasattr(manager, "untracked_message_types"):
            manager.untracked_message_types = [*manager.untracked_message_types, *_ASIDE]
        kernels = KernelTable(server.kernel_manager, server.session_manager)
        owners = Owners(kernels.kernels, root=Path(server.root_dir))
        sampler = Sampler(Collector(owners=owners, usable=False))
        self.hub = Hub(sampler, kernels, KernelCells(kernels.notebook))
        self.settings[HUB] = self.hub

    def initialize_handlers(self) -> None:
        """Add the routes; the server puts its base_url before them."""
        self.handlers.extend(routes())

    async def stop_extension(self) -> None:
        """End all that runs: the server stops."""
        if hasattr(self, "hub"):
            await self.hub.close()
