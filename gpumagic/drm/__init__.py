"""Read the GPUs of AMD and Intel from Linux's sysfs and fdinfo; nothing raises."""

from gpumagic.drm.card_list import Folder as Folder
from gpumagic.drm.card_list import GraphicsCard as GraphicsCard
from gpumagic.drm.card_list import graphics_cards as graphics_cards
from gpumagic.drm.card_list import is_integrated as is_integrated
from gpumagic.drm.card_list import pci_gpus as pci_gpus
from gpumagic.drm.clients import Client as Client
from gpumagic.drm.clients import kfd_memory as kfd_memory
from gpumagic.drm.clients import kfd_nodes as kfd_nodes
from gpumagic.drm.clients import read_clients as read_clients
