"""Tell who holds the bytes on each GPU: by name, each storage once, down to the last byte."""

from gpumagic.display import shown

shown.register("gpumagic.memory.memory_report.MemoryReport", "gpumagic.memory.memory_view")
shown.register("gpumagic.memory.freed.Freed", "gpumagic.memory.freed_view")
shown.register("gpumagic.memory.memory_changes.MemoryChanges", "gpumagic.memory.changes_view")
shown.register("gpumagic.memory.memory_tree.MemoryTree", "gpumagic.memory.tree_view")
shown.register("gpumagic.memory.out_of_memory.OutOfMemory", "gpumagic.memory.out_of_memory_view")
shown.register("gpumagic.memory.peak.MemoryPeak", "gpumagic.memory.peak_view")
