"""Read what Linux tells of AMD's and Intel's GPUs, in sysfs and fdinfo: none of it raises."""

from gpumagic.drm.card_list import GraphicsCard, graphics_cards, is_integrated, pci_gpus
from gpumagic.drm.clients import Client, read_clients
from gpumagic.drm.folder import Folder
from gpumagic.drm.kfd import KfdNode, kfd_memory, kfd_nodes

__all__ = [
    "Client",
    "Folder",
    "GraphicsCard",
    "KfdNode",
    "graphics_cards",
    "is_integrated",
    "kfd_memory",
    "kfd_nodes",
    "pci_gpus",
    "read_clients",
]
