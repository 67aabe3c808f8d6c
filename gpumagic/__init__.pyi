from . import virtual as virtual
from .cell.report import Report as Report
from .cell.run import last_report as last_report
from .device import Device as Device
from .dryrun import DryRun as DryRun
from .dryrun import dry_run as dry_run
from .errors import CrossDeviceWarning as CrossDeviceWarning
from .errors import GpuError as GpuError
from .ledger.watch import watch as watch
from .memory.ask import memory as memory
from .memory.memory_report import MemoryReport as MemoryReport
from .mismatch import explain as explain
from .moving.move import move as move
from .placement.on import on as on
from .placement.torch_devices import cpu as cpu
from .placement.torch_devices import devices as devices
from .placement.torch_devices import gpu as gpu
from .placement.torch_devices import num_gpus as num_gpus
from .placement.torch_devices import try_all_gpus as try_all_gpus
from .placement.torch_devices import try_gpu as try_gpu
from .telemetry.collect import snapshot as snapshot
from .timing import Comparison as Comparison
from .timing import compare as compare
from .timing import last_comparison as last_comparison
from .widget import monitor as monitor

__version__: str
